"""Contexts for ``python -m bench distributed``: no rows are sent, rows are counted, nothing computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transconv.distributed import halo
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor


@contextmanager
def rows_counted() -> Iterator[list[int]]:
    """The bytes of each message with rows that this rank receives inside."""
    real, found = halo._batch, list[int]()

    def counted(requests: list[Any]) -> Any:
        found.extend(r.tensor.nbytes for r in requests if r.op is halo._receive)
        return real(requests)

    halo._batch = counted
    try:
        yield found
    finally:
        halo._batch = real


@contextmanager
def no_rows() -> Iterator[None]:
    """Convolutions send nothing and wait for nothing; results are wrong."""
    real = halo._batch
    halo._batch = lambda requests: []
    try:
        yield
    finally:
        halo._batch = real


@contextmanager
def nothing_computed() -> Iterator[None]:
    """torch's convolutions, which answer while kernels are prepared, leave results as memory has them: of
    2^31 elements and more they are slow or have no room."""
    real = aten_convolutions.aten_forward, aten_convolutions.aten_backward

    def forward(x: Tensor, w: Tensor, b: Tensor | None, p: Params, dual: bool = False) -> Tensor:
        shape = arguments.output_shape(x.shape, w.shape, p)
        return arguments.empty_result(x, shape, arguments.channels_last_result(x, w))

    def backward(
        grad: Tensor, x: Tensor, w: Tensor, p: Params, mask: Any, dual: bool = False
    ) -> tuple[Tensor | None, ...]:
        bias = grad.new_empty(grad.shape[1])
        return tuple(
            torch.empty_like(t) if wanted else None for t, wanted in zip((x, w, bias), mask, strict=True)
        )

    aten_convolutions.aten_forward, aten_convolutions.aten_backward = forward, backward
    try:
        yield
    finally:
        aten_convolutions.aten_forward, aten_convolutions.aten_backward = real
