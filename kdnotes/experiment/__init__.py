"From a plan to finished runs."
