"""Tuning: schedules are tried and timed, and the fastest are remembered.

In: problems, a GPU. Out: a log of every trial, and rows of the fastest. Knows: verify and runtime."""
