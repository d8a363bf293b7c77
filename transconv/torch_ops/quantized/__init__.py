"""Quantised convolutions: calls, modules, models; integers and floats of 8 bits, weights of 4."""
