"""Figures of the architecture, from the package's own source: see ``metrics.py``."""
