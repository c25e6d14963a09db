"Models and their students, intermediate layers, the teacher cache. Knows no training."
