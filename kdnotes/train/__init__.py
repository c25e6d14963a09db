"One training loop on one or several ranks. Knows no records, no telemetry and no task by name."
