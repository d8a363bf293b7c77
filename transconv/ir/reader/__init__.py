"""The parser of kernels' text.

In: what the printer has printed. Out: the kernel, or one line that says what was found and what was
expected. Knows: the nodes of the IR."""

from transconv.ir.reader.kernels import parse_kernel

__all__ = ["parse_kernel"]
