"""A computation of several examples at once: the same, over one axis more.

    read  x = X[m, k]                     read  x = X[example, m, k]
    read  w = W[k]                        read  w = W[k]                   the same for all examples
    store Y[m] = sum(x*w; k)        ->    store Y[example, m] = sum(x*w; k)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.compute import Compute
from transconv.compute.names import fresh
from transconv.compute.steps import Axis
from transconv.compute.text.format import parse
from transconv.errors import ComputeError
from transconv.ir import Layout, LayoutBlock, Tensor, View, ViewDim


def of_examples(compute: Compute, count: int, given: Collection[str]) -> Compute:
    """The computation of ``count`` examples: the tensors ``given`` and all that is stored have them at a
    first dim, one behind the other. Raises ComputeError where sizes are arguments."""
    if compute.named is not None:
        raise ComputeError(f"sizes that are arguments ({compute.named}) have no examples; "
                           "expected numbers")
    taken = {*compute.names.all, *(t.name for t in compute.tensors)}
    axis = Axis(fresh("example", taken), count, "")
    stored = {w.view.tensor.name for w in compute.writes}

    def seen(view: View) -> View:
        tensor = view.tensor
        if tensor.name not in stored and tensor.name not in given:
            return view
        return View(several(tensor, axis.name, count), (ViewDim(axis.var), *view.dims))

    made = compute.over(seen)
    name = compute.name.removesuffix("_examples")
    made = replace(made, axes=(axis, *compute.axes), name=f"{name}_examples")
    return parse(str(with_roles(made)))


def several(tensor: Tensor, dim: str, count: int) -> Tensor:
    """A tensor of a first dim more, along which tensors like this one lie."""
    old = tensor.layout
    step = 1 + sum((b.size - 1) * b.stride for b in old.blocks)
    blocks = (LayoutBlock(0, count, step), *(replace(b, dim=b.dim + 1) for b in old.blocks))
    return Tensor(tensor.name, (dim, *tensor.dims), (count, *tensor.shape),
                  Layout(old.dtype, old.ndims + 1, blocks, old.offset))
