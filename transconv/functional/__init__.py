"""transconv.functional: functions of torch that are computations of a few lines, with torch's signatures.

In: torch tensors. Out: torch tensors and gradients, computed by kernels of the library's texts or, with
the reason, by torch. Knows: the torch border and everything below it."""

from transconv.functional.norms import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from transconv.functional.pools import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from transconv.functional.products import bmm, linear, matmul
from transconv.functional.reductions import (
    all,
    amax,
    amin,
    any,
    logsumexp,
    mean,
    prod,
    std,
    sum,
    var,
)
from transconv.functional.rows import cross_entropy, log_softmax, normalize, softmax

__all__ = [
    "adaptive_avg_pool2d", "all", "amax", "amin", "any", "avg_pool2d", "batch_norm", "bmm",
    "cross_entropy", "group_norm", "instance_norm", "layer_norm", "linear", "log_softmax", "logsumexp",
    "matmul", "max_pool2d", "mean", "normalize", "prod", "rms_norm", "softmax", "std", "sum", "var",
]
