"Sentences, tables, figures and pages, from codes and numbers."
