"""Models with quantised weights: schemes, modules, 4-bit and 8-bit weights."""
