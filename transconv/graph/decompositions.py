"""How AOTAutograd writes a graph: torch's decompositions, but for operations that rows translate whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from transconv.graph import translate  # noqa: F401  # its tables have entered their rows
from transconv.graph.rows import ROWS

# Softmax, batch norms and the gradients of norms become moments and maps, of which one kernel is made again.
ALSO = ("_softmax", "_log_softmax", "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm",
        "_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward", "addcmul",
        "addcdiv", "linalg_vector_norm", "std", "glu", "hardsigmoid", "mish", "native_dropout_backward")


@functools.lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by operation."""
    aten = torch.ops.aten
    more = get_decompositions([getattr(aten, name) for name in ALSO if hasattr(aten, name)])
    found = {**core_aten_decompositions(), **more}
    return {op: how for op, how in found.items() if op not in ROWS}
