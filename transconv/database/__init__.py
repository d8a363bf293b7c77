"""Between the heuristics and the compiler: what tuning found out, and how it takes part in choices."""
