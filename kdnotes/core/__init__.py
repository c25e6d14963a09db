"Configuration, arms, run_id and files: what everything else stands on. Knows no torch."
