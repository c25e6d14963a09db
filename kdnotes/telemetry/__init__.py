"Meters, the sampler of a training, and its summary. Knows no records."
