"""Modules on sharded rows: norms, padding, windows, upsampling."""
