"What is learnt and scored: the Task, its batches, corpora and metrics. Knows no models and no training."
