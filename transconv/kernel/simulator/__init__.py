"""The simulator: a kernel's Python source on NumPy arrays."""
