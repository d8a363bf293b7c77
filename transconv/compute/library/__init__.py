"""A library of computations: texts of a few lines from shapes, strides and types, of any rank and layout,
and the texts of their gradients. See Formula."""

from transconv.compute.library.batch import batch_norm
from transconv.compute.library.formula import Formula, Gradient
from transconv.compute.library.norms import group_norm, layer_norm, rms_norm
from transconv.compute.library.page import Page, Seen, Strided
from transconv.compute.library.pools import average_pool, max_pool
from transconv.compute.library.products import linear, matmul
from transconv.compute.library.reductions import NORMS, ROWS, reduced
from transconv.compute.library.softmax import cross_entropy, log_softmax, normalize, softmax

__all__ = [
    "Formula", "Gradient", "NORMS", "Page", "ROWS", "Seen", "Strided", "average_pool", "batch_norm",
    "cross_entropy", "group_norm", "layer_norm", "linear", "log_softmax", "matmul", "max_pool",
    "normalize", "reduced", "rms_norm", "softmax",
]
