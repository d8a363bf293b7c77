"""Measuring, beside the package: problem lists, timing against cuDNN, mass checks, reports."""
