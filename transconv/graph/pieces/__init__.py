"""Graphs within a bound of memory: kernels run in pieces over space or time, with every bit of the whole.

In: the kernels of a region. Out: passes of launches over parts of tensors. Knows: regions, schedules and
what they leave, and the relation of compute/restriction.py."""
