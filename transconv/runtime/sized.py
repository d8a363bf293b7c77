"""The sizes of a call that are arguments of kernels: read from its tensors, and checked against the
kernels' requirements before a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transconv.errors import TensorError
from transconv.ir import Expr, Sizes, Tensor, free_vars, value_at


def sizes_of_call(named: Sizes, wanted: Sequence[Tensor], tensors: Mapping[str, Any],
                  about: str) -> dict[str, int]:
    """Each size by name: that of the first tensor that has it as a dimension. Raises TensorError, with a
    message of one line, for sizes that do not meet the requirements, and if no tensor has a size."""
    found: dict[str, int] = {}
    for tensor in wanted:
        given = tensors.get(tensor.name)
        shape = tuple(getattr(given, "shape", ()))
        if not tensor.extents or len(shape) != len(tensor.extents):
            continue
        for extent, size in zip(tensor.extents, shape, strict=True):
            if (told := _told(extent, int(size))) is not None:
                found.setdefault(*told)
    if missing := [n for n in named.names if n not in found]:
        raise TensorError(f"no tensor of the call tells {missing[0]}, as a dimension of that size does; "
                          f"the plan is for {about}")
    if reason := named.why_not(found):
        raise TensorError(f"{reason}; the plan requires {named}, and is for {about}")
    return found


def _told(extent: Expr, size: int) -> tuple[str, int] | None:
    """The size that a dimension tells, such as M where it is M, M*2 or M + 3 long; None for none."""
    names = free_vars(extent)
    if len(names) != 1:
        return None
    (var,) = names
    start, step = (value_at(extent, {var.name: n}) for n in (0, 1))
    if step == start:
        return None
    found = (size - start) // (step - start)
    return (var.name, found) if value_at(extent, {var.name: found}) == size else None
