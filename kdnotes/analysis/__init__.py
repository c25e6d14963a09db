"From records to intervals, tests, comparisons, tables and figures. Knows no training."
