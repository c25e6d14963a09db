"Is this machine, this configuration, this code right? The doctor and its probes."
