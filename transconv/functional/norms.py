"""Norms and softmax with the signatures of torch.nn.functional: what scales the elements of a row, of a
group or of a batch by statistics of them, and the loss that softmax is for.

Images are f16, bf16, f32 or f64; their moments and factors are f32, of f64 images f64. Where rows are in
several places, the parts of a norm are functions of tensors, too (compute/library/norms.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, Specs, Values, as_first, expect
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import dims
from transconv.ir import f32, f64
from transconv.support import Unsupported

Tensor = torch.Tensor


def _layer(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, w, b = given
    assert x is not None
    return library.layer_norm(x, len(numbers[0]), w, b, numbers[1], saves, made[0])


def _rms(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, w = given
    assert x is not None
    eps = numbers[1]
    if eps is None:  # torch's: that of the type in which it computes
        eps = (f64 if x.dtype is f64 else f32).spacing
    return library.rms_norm(x, len(numbers[0]), w, eps, saves, made[0])


def _group(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, w, b = given
    assert x is not None
    return library.group_norm(x, numbers[0], w, b, numbers[1], saves, made[0])


def _instance(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, mean, variance, w, b = given
    own, _, eps = numbers
    assert x is not None
    if not own:
        return library.batch_norm(x, mean, variance, w, b, False, 0.0, eps, saves, made[0])
    if mean is not None:
        raise Unsupported("stats:instance", "running statistics of instances")
    return library.group_norm(x, x.shape[1], w, b, eps, saves, made[0])


def _batch(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, mean, variance, w, b = given
    training, momentum, eps = numbers
    assert x is not None
    if (mean is None) is not (variance is None):
        raise Unsupported("stats:one", "one of the running statistics")
    return library.batch_norm(x, mean, variance, w, b, training, momentum, eps, saves, made[0])


def _by_batch(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """torch's batch_norm without its side effects: the new running statistics are results."""
    if not training or mean is None or variance is None:
        return F.batch_norm(x, mean, variance, w, b, training, momentum, eps)
    mean, variance = mean.detach().clone(), variance.detach().clone()
    return F.batch_norm(x, mean, variance, w, b, training, momentum, eps), mean, variance


def _by_instance(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    own: bool,
    momentum: float,
    eps: float,
) -> Any:
    """torch's instance_norm without its side effects: the new running statistics are results."""
    if not own or mean is None or variance is None:
        return F.instance_norm(x, mean, variance, w, b, own, momentum, eps)
    mean, variance = mean.detach().clone(), variance.detach().clone()
    return F.instance_norm(x, mean, variance, w, b, own, momentum, eps), mean, variance


def _keep_statistics(
    tensors: Sequence[Tensor | None], numbers: Numbers, results: Sequence[Tensor]
) -> Tensor:
    """Move the running statistics, in place as torch does: also those of inference mode outside of it."""
    if len(results) == 3:
        for held, new in zip(tensors[1:3], results[1:], strict=True):
            assert held is not None
            if not torch.compiler.is_compiling() and held.is_inference():
                with torch.inference_mode():
                    held.copy_(new)
            else:
                with torch.no_grad():
                    held.copy_(new)
    return results[0]


def _of_last(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, *affine = given
    assert x is not None
    expect(len(numbers[0]) > 0 and x.shape[-len(numbers[0]) :] == numbers[0])
    expect(all([t is None or t.shape == numbers[0] for t in affine]))
    return (x.shape,)


def _of_groups(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    assert given[0] is not None
    expect(given[0].shape[1] % numbers[0] == 0)
    return _of_features(given, (False,))


def _of_features(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, *features = given
    assert x is not None
    expect(all([t is None or t.shape == x.shape[1:2] for t in features]))
    running = features[:2] if numbers[0] and features[0] is not None else []
    return (x.shape, *[t.shape for t in running if t is not None])


LAYER = declare(
    "layer_norm",
    lambda x, w, b, shape, eps: F.layer_norm(x, shape, w, b, eps),
    _layer,
    autocast="f32",
    passing=("B",),
    shapes=_of_last,
    shaped=True,
)
RMS = declare(
    "rms_norm",
    lambda x, w, shape, eps: F.rms_norm(x, shape, w, eps),
    _rms,
    autocast="torch",
    shapes=_of_last,
    shaped=True,
)
GROUP = declare(
    "group_norm",
    lambda x, w, b, groups, eps: F.group_norm(x, groups, w, b, eps),
    _group,
    autocast="f32",
    passing=("B",),
    shapes=_of_groups,
)
INSTANCE = declare(
    "instance_norm",
    _by_instance,
    _instance,
    passing=("P", "Q", "B"),
    handed=F.instance_norm,
    finish=_keep_statistics,
    shapes=_of_features,
)
BATCH = declare(
    "batch_norm",
    _by_batch,
    _batch,
    passing=("P", "Q", "B"),
    handed=F.batch_norm,
    finish=_keep_statistics,
    shapes=_of_features,
)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm: over the last dims, of the sizes ``normalized_shape``, also those of
    weight and bias. The mean first, then squared deviations from it, in f32 (f64 for f64). f16, bf16, f32
    and f64 have kernels. Raises what torch raises, with the operands named."""
    return call(LAYER, (input, weight, bias), (normalized_shape, eps))


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm; ``eps`` None: the spacing of f64 beside 1 for f64,
    that of f32 for all other types. As layer_norm."""
    return call(RMS, (input, weight), (normalized_shape, eps))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.group_norm of input (n, c, ...), weight and bias (c,). As layer_norm."""
    return call(GROUP, (input, weight, bias), (num_groups, eps))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.instance_norm of input (n, c, ...); torch computes where running statistics are
    updated. As layer_norm."""
    return call(
        INSTANCE, (input, running_mean, running_var, weight, bias), (use_input_stats, momentum, eps)
    )


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.batch_norm of input (n, c, ...): in training by its own statistics, which
    update the running ones in place; else by the running ones. As layer_norm."""
    return call(BATCH, (input, running_mean, running_var, weight, bias), (training, momentum, eps))


def _wide(x: Tensor) -> Tensor:
    """Tensors of 8 and 16 bits as f32, as kernels compute them."""
    return x.float() if x.element_size() < 4 else x


def _each(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape(*t.shape, *[1] * (like.dim() - 2))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _wide(x)
    mean = x.flatten(2).mean(2)
    return mean, (x - _each(mean, x)).square().flatten(2).sum(2)


def _sums(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    g = _wide(g)
    return (g * _wide(x)).flatten(2).sum(2), g.flatten(2).sum(2)


def _scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (_wide(x) * _each(a, x) + _each(b, x)).to(x.dtype)


def _mixed(g: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (_wide(g) * _each(a, x) + _wide(x) * _each(b, x) + _each(c, x)).to(x.dtype)


def _formula(name: str) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x = given[0]
        assert x is not None
        if saves:
            raise Unsupported("gradient:parts", "a part of a norm has no gradient of its own")
        if any(
            t is not None and len(t.shape) == len(x.shape) and len(x.shape) > 2 and t != x for t in given
        ):
            raise Unsupported("layout:two", "two images that lie differently")
        of = getattr(library, name)
        found: library.LibraryFormula = of(x, made[0]) if len(made) == 1 else of(x)
        return found

    return formula


def _both(tensors: Any, numbers: Numbers, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results


MOMENTS = declare("moments", _moments, _formula("moments"), finish=_both)
SUMS = declare("sums", _sums, _formula("sums"), finish=_both)
SCALED = declare("scaled", _scaled, _formula("scaled"))
MIXED = declare("mixed", _mixed, _formula("mixed"))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image and feature of x [n, c, ...] the mean, and the sum of squared deviations from it."""
    return cast(tuple[Tensor, Tensor], call(MOMENTS, (x,), ()))


def sums(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image and feature the sum of g*x, and that of g."""
    return cast(tuple[Tensor, Tensor], call(SUMS, (_as(g, x), x), ()))


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a*x + b with a and b [n, c], in the type and layout of x."""
    return call(SCALED, (x, a, b), ())


def mixed(g: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*g + b*x + c with a, b and c [n, c], in the type and layout of x."""
    return call(MIXED, (_as(g, x), x, a, b, c), ())


def _as(g: Tensor, x: Tensor) -> Tensor:
    """A gradient that lies as its tensor."""
    if g.stride() == x.stride() and g.dtype is x.dtype:
        return g
    return torch.empty_like(x).copy_(g)


Ints = int | tuple[int, ...]


def _exponential(make: Any) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, dim = given[0], numbers[0]
        if dim is None:
            raise Unsupported("dim:implicit", "expected dim=...")
        assert x is not None
        found: library.LibraryFormula = make(x, *dims(dim, len(x.shape)), y=made[0])
        return found

    return formula


def _softmax_again(values: Values, numbers: Numbers, g: Tensor) -> tuple[Tensor, ...]:
    y, dtype = _wide(values["Y"]), g.dtype
    g = _wide(g)
    found = y * (g - (y * g).sum(numbers[0], keepdim=True))
    return (found.to(numbers[2] or dtype),)


def _log_softmax_again(values: Values, numbers: Numbers, g: Tensor) -> tuple[Tensor, ...]:
    y, dtype = _wide(values["Y"]), g.dtype
    g = _wide(g)
    found = g - y.exp() * g.sum(numbers[0], keepdim=True)
    return (found.to(numbers[2] or dtype),)


SOFTMAX = declare(
    "softmax",
    lambda x, dim, dtype, _: F.softmax(x, dim, dtype=dtype),
    _exponential(library.softmax),
    autocast="f32",
    again=_softmax_again,
    shapes=as_first,
)
LOG_SOFTMAX = declare(
    "log_softmax",
    lambda x, dim, dtype, _: F.log_softmax(x, dim, dtype=dtype),
    _exponential(library.log_softmax),
    autocast="f32",
    again=_log_softmax_again,
    shapes=as_first,
)


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.softmax: exp(input) over its sum along ``dim``, of any shape; ``dtype`` of the
    result, default input's. f16, bf16, f32 and f64 have kernels, the rest is torch's. Raises what torch
    raises: IndexError for a dim out of range, with the operands named."""
    return call(SOFTMAX, (input,), (dim, dtype, dtype and _narrow(input, dtype)))


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.log_softmax: the logarithm of ``softmax``. Arguments, dtypes and errors as
    there."""
    return call(LOG_SOFTMAX, (input,), (dim, dtype, dtype and _narrow(input, dtype)))


def _narrow(input: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The input's type where the result has another: that of its gradient."""
    return None if dtype is input.dtype else input.dtype


def _normalize(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    p, dim, eps = numbers
    if p != 2:
        raise Unsupported("norm:order", f"p={p}; only p=2 has a kernel")
    (x,) = given
    assert x is not None
    return library.normalize(x, dims(dim, len(x.shape)), eps, made[0])


NORMALIZE = declare(
    "normalize",
    lambda x, p, dim, eps, **out: F.normalize(x, p, dim, eps, **out),
    _normalize,
    autocast="f32",
    shapes=as_first,
)


def normalize(
    input: Tensor, p: float = 2.0, dim: Ints = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """torch.nn.functional.normalize: input over its norm along ``dim``, or over ``eps`` where that is
    larger. p=2 has kernels; with ``out`` torch computes. Dtypes and errors as softmax."""
    return call(NORMALIZE, (input,), (p, dim, eps), out)


def _rows(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, t = given
    assert x is not None and t is not None
    dim = min(1, len(x.shape) - 1)
    return library.cross_entropy(x, t, dim, numbers[0], y=made[0])


def _of_rows(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, t = given
    assert x is not None and t is not None
    dim = min(1, len(x.shape) - 1)
    expect(len(x.shape) > 1 and t.shape == x.shape[:dim] + x.shape[dim + 1 :])
    return (t.shape,)


CROSS_ENTROPY = declare(
    "cross_entropy",
    lambda x, t, ignore: F.cross_entropy(x, t, ignore_index=ignore, reduction="none"),
    _rows,
    whole=(False, True),
    autocast="f32",
    shapes=_of_rows,
)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy of input (n, c, ...) and classes (n, ...) as integers.
    Weights, smoothing and targets that are probabilities are torch's. An invalid class gives infinity on
    a GPU, where torch aborts with a device assertion; dtypes and errors as softmax."""
    plain = (
        weight is None
        and size_average is None
        and reduce is None
        and isinstance(label_smoothing, float)
        and label_smoothing == 0
        and reduction in ("none", "mean", "sum")
        and isinstance(target, Tensor)
        and target.dtype is torch.int64
    )
    if not plain:
        if not torch.compiler.is_compiling():
            stats.handed_over("form:cross_entropy", "cross_entropy")
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    rows: Tensor = call(CROSS_ENTROPY, (input, target), (ignore_index,))
    if reduction == "none":
        return rows
    stats.refuse_invariant("torch", f"torch would compute the {reduction} of the losses of all samples")
    wide = rows.dtype if rows.dtype is torch.float64 else torch.float32
    total = rows.sum(dtype=wide)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(rows.dtype)
