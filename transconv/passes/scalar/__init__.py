"""Passes over index arithmetic, masks and loads: elimination, hoisting, unrolling, widths."""
