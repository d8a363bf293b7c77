"""Verification: check, fuzz, bisect, the oracles behind them, and the compile matrix.

In: problems and schedules. Out: right, or what is wrong, where, and how to repeat it. Knows: the
runtime and what is below it."""
