"""Graphs compared with torch: each launch is computed in NumPy from the text of its computation, and
copies to and from host memory are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import memmove
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from transconv.compute import Alone, Workload, execute, kernels, why_not_lowered
from transconv.functional.calls.compiled_launch import program
from transconv.graph import backend
from transconv.graph.pieces.piece_execution import HostLink
from transconv.graph.regions import region_calls

Tensor = torch.Tensor


@dataclass(frozen=True)
class Meant:
    """Stands in for a launch. Raises where a part of the text can be no kernel."""

    texts: tuple[str, ...]

    def at(self, sizes: Mapping[str, int]) -> Meant:
        """For given sizes, where these are names; one kernel has to take them all."""
        (compute,) = [program(text).compute for text in self.texts]
        Alone(compute).refuse()
        return Meant((str(compute.at(**sizes)),))

    def is_known(self) -> bool:
        """Operands may be written over: all elements are computed before one is stored."""
        return True

    def begun(self) -> tuple[None, tuple[()]]:
        """Results are looked at every time."""
        return None, ()

    def start_prepacked(self, tensors: Sequence[Tensor], store: Any, judge: Any = None) -> None:
        """Nothing is copied, nor judged."""
        self.start(tensors)

    def start(self, tensors: Sequence[Tensor]) -> None:
        for text in self.texts:
            self.run(text, tensors)

    def run(self, text: str, tensors: Sequence[Tensor]) -> None:
        found = program(text)
        for kernel in kernels(found.compute):
            assert why_not_lowered(kernel) is None, (why_not_lowered(kernel), text)
        memory = [*found.given.values(), *found.stored.values()]
        views = [
            t.as_strided(m.shape, m.strides, t.storage_offset())
            for t, m in zip(tensors, memory, strict=True)
        ]
        arrays = [(t.double() if t.is_floating_point() else t).numpy() for t in map(Tensor.detach, views)]
        count = len(found.given)
        given = dict(zip(found.given, arrays[:count], strict=True))
        before = dict(zip(found.stored, arrays[count:], strict=True))
        made = execute(found.compute, given, before=before)  # other texts store the other parts
        for name, into in zip(found.stored, views[count:], strict=True):
            into.detach().copy_(torch.from_numpy(np.array(made[name].value, order="C")))


class LateLink(HostLink):
    """Copies by address, as late as they may be; what they copy has to be there until then. ``log``: the
    numbers of those that begin, ends, and what else is noted."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late: dict[int, tuple[bool, list[Any]]] = {}
        self.log: list[Any] = []

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]], up: bool) -> int:
        storages = [[StorageWeakRef(t.untyped_storage()) for t in pair] for pair in pairs]
        places = [(*(t.data_ptr() for t in pair), pair[0].nbytes) for pair in pairs]
        self.log.append(number := len(self.log))
        self.late[number] = up, [*zip(storages, places, strict=True)]
        return number

    def end(self, copy: int | None) -> None:
        if copy is None:  # between calls
            assert not self.late
            return
        up = self.late[copy][0] if copy in self.late else None
        for number in [n for n in self.late if n <= copy and self.late[n][0] is up]:
            for storages, place in self.late.pop(number)[1]:
                assert not any(s.expired() for s in storages)
                memmove(*place)
        self.log.append(("end", copy))


@contextmanager
def by_meaning() -> Iterator[list[str]]:
    """Inside, texts are executed in NumPy; their list."""
    texts: list[str] = []

    def meant(asked: str | Workload, *_: Any) -> Meant:
        own = (asked,) if isinstance(asked, str) else tuple(str(c) for c in asked.computations)
        texts.extend(own)
        return Meant(own)

    with patch.object(region_calls, "launch", meant):
        yield texts


def traced(f: Callable[..., Any], inputs: Sequence[Tensor], **options: str) -> Callable[..., Any]:
    """The backend's function for what fx traces of a function: without Dynamo, which takes longer."""
    gm = fx.symbolic_trace(f) if not isinstance(f, fx.GraphModule) else f
    return backend(gm, list(inputs), options={"rest": "eager", **options})


def results(made: Any) -> list[Tensor]:
    """As a list."""
    return list(made) if isinstance(made, (tuple, list)) else [made]


def compare(
    f: Callable[..., Any],
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    most: float,
    gradients: bool = True,
) -> None:
    """Results, strides and gradients of ``run`` against those of ``f``. AssertionError."""
    given = [[x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in range(2)]
    want, got = results(f(*given[0])), results(run(*given[1]))
    assert len(want) == len(got)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.shape == b.shape and a.dtype is b.dtype, f"result {i}"
        assert _strides(a) == _strides(b), f"strides of result {i}: {a.stride()}, {b.stride()}"
        near(b, a, most, f"result {i}")
    ends = [i for i, a in enumerate(want) if a.requires_grad]
    assert ends == [i for i, b in enumerate(got) if b.requires_grad]
    if gradients and ends:
        torch.manual_seed(1)
        grads = [torch.randn_like(want[i]) for i in ends]
        leaves = [[x for x in own if x.requires_grad] for own in given]
        one, other = (
            torch.autograd.grad([made[i] for i in ends], own, grads, allow_unused=True)
            for made, own in zip((want, got), leaves, strict=True)
        )
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert (a is None) == (b is None), f"gradient {i}"
            if a is not None:
                near(b, a, most, f"gradient {i}")


def near(got: Tensor, want: Tensor, most: float, what: str) -> None:
    """AssertionError for elements that differ by more than a share of their size."""
    if not want.is_floating_point():
        assert torch.equal(got, want), what
        return
    off = (got.double() - want.double()).abs()
    allowed = most * (1 + want.double().abs())
    bad = ~((off <= allowed) | (got.isnan() & want.isnan()) | (got == want))
    assert not bad.any(), f"{what}: off by {off[bad].max():g} at {bad.nonzero()[0].tolist()}"


def _strides(t: Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]
