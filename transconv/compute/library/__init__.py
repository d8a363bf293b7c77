"""Generators of computations: from shapes, strides and types of any rank and layout to the text of a
function of torch and the texts of its gradients. See Formula."""

from transconv.compute.library.norms import (
    batch_norm,
    group_norm,
    layer_norm,
    mixed,
    moments,
    rms_norm,
    scaled,
    sums,
)
from transconv.compute.library.page import (
    Gradient,
    LibraryFormula,
    LibraryText,
    NamedSpace,
    Strided,
    TensorView,
    named,
)
from transconv.compute.library.pools import (
    adaptive_average_pool,
    adaptive_max_pool,
    average_pool,
    max_pool,
)
from transconv.compute.library.reductions import (
    NORMS,
    ROWS,
    cross_entropy,
    extreme,
    linear,
    log_softmax,
    matmul,
    normalize,
    reduced,
    softmax,
)
from transconv.compute.library.views import (
    embedding,
    flip,
    fold,
    gather,
    join,
    nearest,
    pad,
    shuffle,
    take,
    unfold,
)

__all__ = ["NORMS", "ROWS", "Gradient", "LibraryFormula", "LibraryText", "NamedSpace", "Strided",
           "TensorView", "adaptive_average_pool", "adaptive_max_pool", "average_pool", "batch_norm",
           "cross_entropy", "embedding", "extreme", "flip", "fold", "gather", "group_norm", "join",
           "layer_norm", "linear", "log_softmax", "matmul", "max_pool", "mixed", "moments", "named",
           "nearest", "normalize", "pad", "reduced", "rms_norm", "scaled", "shuffle", "softmax", "sums",
           "take", "unfold"]
