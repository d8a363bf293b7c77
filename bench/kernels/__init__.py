"""Kernels of the kernel API (``examples/kernels``) beside the same written by hand in Triton (``by_hand``)
and beside torch: a row each in ``kernels.csv``. ``api_us``, ``triton_us``, ``torch_us``: medians, caches
cold; ``ratio``: of Triton's time to ours; ``lines``: of functions, without blank ones and docstrings;
``masks``: how often ``mask=`` is written; ``error``: from the answer in f64."""

from bench.kernels.measures import arguments, main

__all__ = ["arguments", "main"]
