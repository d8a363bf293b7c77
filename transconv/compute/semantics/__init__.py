"""What a computation means: its evaluation in NumPy, error bounds, sampled points."""
