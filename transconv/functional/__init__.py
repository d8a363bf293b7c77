"""transconv.functional: functions with torch's signatures, computed by kernels of generated computations.

In: torch tensors. Out: torch tensors and gradients, computed by kernels of the library's texts or, with
the reason, by torch. Knows: the torch border and everything below it. Importing it registers all
operators that exported programs name."""

from transconv.functional import computation as computation
from transconv.functional.calls.dispatch import explain as explain
from transconv.functional.causal import causal_conv1d_fn, causal_conv1d_update
from transconv.functional.norms import (
    batch_norm,
    cross_entropy,
    group_norm,
    instance_norm,
    layer_norm,
    log_softmax,
    normalize,
    rms_norm,
    softmax,
)
from transconv.functional.pools import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from transconv.functional.reductions import (
    all,
    amax,
    amin,
    any,
    argmax,
    argmin,
    bmm,
    linear,
    logsumexp,
    matmul,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from transconv.functional.views import (
    cat,
    embedding,
    flip,
    fold,
    gather,
    index_select,
    interpolate,
    pad,
    pixel_shuffle,
    pixel_unshuffle,
    unfold,
)
from transconv.support import nearest
from transconv.torch_ops.fused import fused_functional, traced_route  # noqa: F401
from transconv.torch_ops.quantized import quantized_route  # noqa: F401

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "bmm",
    "cat",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "cross_entropy",
    "embedding",
    "flip",
    "fold",
    "gather",
    "group_norm",
    "index_select",
    "instance_norm",
    "interpolate",
    "layer_norm",
    "linear",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mean",
    "min",
    "normalize",
    "pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "prod",
    "rms_norm",
    "softmax",
    "std",
    "sum",
    "unfold",
    "var",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{nearest(name, __all__)}")
