"Is this machine, this configuration, this code right and fast? Profiles, probes, doctor, bench, GPU check."
