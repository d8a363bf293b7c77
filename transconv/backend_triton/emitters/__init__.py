"""Emitters: Triton and Gluon texts of kernels."""
