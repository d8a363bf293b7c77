"""Launches of compiled kernels: launchers, descriptors, records of what is compiled."""
