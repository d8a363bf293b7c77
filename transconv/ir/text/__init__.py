"""Texts of the IR: the printer, headers of kernels, infix expressions for people."""
