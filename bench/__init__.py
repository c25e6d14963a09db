"Programs that measure kdnotes, from a clone: other libraries beside it, a GPU machine, synchronisation, stages of a run."
