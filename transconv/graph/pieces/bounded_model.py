"""``transconv.within``: a model that runs within a bound of memory, with every bit of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from transconv.graph.backend_options import MemoryBound, RankGroup, compiled_alone
from transconv.graph.pieces.piece_passes import PiecePlan
from transconv.support import Unsupported, one_line
from transconv.torch_ops.tensor_subclasses import served

AXES = ("n", "d", "h", "w")
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{c}ib": 1 << (10 * (i + 1)) for i, c in enumerate("kmgt")
}


def within(
    model: Callable[..., Any],
    memory: str | int | None = "8 GB",
    over: str | None = None,
    host: str | int | None = None,
    ranks: Any = None,
) -> BoundedModel:
    """The model, executed in pieces such that what is there at once, weights included, stays within
    ``memory``: bytes, or a text such as ``"8 GB"`` or ``"512 MiB"``; None: without a bound, in one piece.

    ``over``: the axis of images along which pieces are cut: ``"n"`` (images), ``"d"`` (depth or time),
    ``"h"`` or ``"w"``; default: the outermost one with several positions; where that exceeds the bound, or
    is short and computes much again, the one that is estimated to take least. Where the pieces of one axis
    exceed the bound, those of two are taken, of the second axis as few as are estimated to take least.
    What a piece reads beyond its edges is found exactly, norms are computed over the whole, and every bit
    of the result is that of ``within(model, memory=None, over=...)`` of the first axis, and of gradients:
    a backward pass computes the forward pass again, in pieces. For inference call it within
    ``torch.no_grad()``.

    ``host``: the pinned host memory, as ``memory``, in which tensors may wait between passes, where the
    bound cannot be met without, or where that is estimated to take less time; 0: none; default: half of
    what is free there at the first call. Of several ranks that of each; the half is divided among them.

    ``ranks``: a DeviceMesh of one dim, whose ranks share the work: each runs neighbouring pieces of its
    own, and has a part of what is kept between; the bound is that of each. Every rank calls the model with
    the same input, and has the whole result, with every bit of that of one process.

    The first call of each shape finds the pieces. It raises Unsupported where no number of pieces stays
    within the bound, with the least that would do. ``report()`` tells what was found.

    ValueError for a memory, a host, an axis or ranks that are none of these; TypeError for a model that is
    not callable."""
    if not callable(model):
        raise TypeError(f"model: expected a module or a function, got {type(model).__name__}")
    if over is not None and over not in AXES:
        raise ValueError(f"over={one_line(repr(over))}; expected one of {', '.join(AXES)}, or None")
    room = None if host is None else _bytes(host, "host", 0)
    bound = MemoryBound(_bytes(memory), str(memory), over or "", room, ranks=_ranks(ranks))
    return BoundedModel(getattr(model, "_orig_mod", model), bound)


def _ranks(mesh: Any) -> RankGroup | None:
    """The ranks of a mesh of one dim; None for none. Raises ValueError."""
    if mesh is None:
        return None
    if getattr(mesh, "ndim", 0) != 1 or not hasattr(mesh, "get_local_rank"):
        raise ValueError(f"ranks={one_line(repr(mesh))}; expected a DeviceMesh of one dim, or None")
    if mesh.get_coordinate() is None:
        raise ValueError(f"ranks={one_line(repr(mesh))}: this process is none of them")
    room: Any = import_module("transconv.distributed.halo")  # which imports DTensor
    found: RankGroup = room.MeshRanks(mesh)
    return found


def _bytes(memory: str | int | None, name: str = "memory", least: int = 1) -> int:
    """Bytes of a text, at least so many. Raises ValueError."""
    if memory is None:
        return 1 << 62
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= least:
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if isinstance(memory, str) and found and found[2] in UNITS:
        if (count := int(float(found[1]) * UNITS[found[2]])) >= least:
            return count
    raise ValueError(f'{name}={memory!r}; expected bytes, a text such as "8 GB" or "512 MiB", or None')


class BoundedModel(nn.Module):
    """A model within a bound (``within``)."""

    def __init__(self, model: Callable[..., Any], bound: MemoryBound) -> None:
        super().__init__()
        self.model, self.bound = model, bound
        self._compiled: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def forward(self, *given: Any, **named: Any) -> Any:
        """The model's result; with gradients where torch computes them."""
        tensors = [t for t in tree_leaves((given, named)) if isinstance(t, torch.Tensor)]
        shapes = tuple(t.shape for t in tensors)
        if shapes not in self._compiled:  # torch compiles one function for eight of them at most
            own = self.model.parameters() if isinstance(self.model, nn.Module) else ()
            if any(map(served, (*tensors, *own))):
                why = "the model or its input is dealt over ranks; deal the pieces of a plain model, by "
                why += "within(..., ranks=mesh), or bound the modules that each rank computes on plain "
                why += "tensors: parallelize(..., whole=[...])"
                raise Unsupported("within:ranks", why)
            if self.bound.ranks is not None:
                kind = f"{type(self.model).__name__} within {self.bound.told} over {self.bound.over!r}"
                what = ", ".join(f"{t.dtype} {[*t.shape]}" for t in tensors)
                self.bound.ranks.agree(f"{kind}, gradients {torch.is_grad_enabled()}, of {what}")
            words: Any = {"fullgraph": True, "dynamic": False, "options": {"within": self.bound}}
            self._compiled[shapes] = compiled_alone(self.model, "bounded", **words)
        return self._compiled[shapes](*given, **named)

    def __getstate__(self) -> dict[str, Any]:
        bound = replace(self.bound, links={}, plans={}, made={})
        return {**self.__dict__, "bound": bound, "_compiled": {}}  # a copy compiles anew

    def report(self) -> BoundReport:
        """What was found for the calls so far."""
        return BoundReport(self.bound, tuple(self.bound.plans.values()))


@dataclass(frozen=True, slots=True)
class BoundReport:
    """``plans``: of each region of each graph, in their order."""

    bound: MemoryBound
    plans: tuple[PiecePlan, ...]

    @property
    def peak(self) -> int:
        """Bytes that are there at once at most, as estimated: weights, inputs, and what kernels make."""
        return max((*(p.peak for p in self.plans), *self.bound.left.values()), default=0)

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory in which tensors wait. The plans share them; they are held from the
        first call on."""
        each = zip_longest(*(p.buffers for p in self.plans), fillvalue=0)
        return sum(max(sizes) for sizes in each)

    def __str__(self) -> str:
        lines = [f"within {self.bound.told}: {size_text(self.peak)} at most (estimated)"]
        for plan in self.plans:
            if plan.whole:
                lines.append(
                    f"{len(plan.steps)} steps, each once and whole; {size_text(plan.beside)} beside"
                )
                continue
            share = plan.us / plan.once if plan.once else 1.0
            dealt = f" on {plan.ranks} ranks" * (plan.ranks > 1)
            lines.append(
                f"{len(plan.steps)} steps in {len(plan.passes)} passes along {plan.axes}{dealt}, "
                f"{share:.2f} of the time of each step once (estimated); {size_text(plan.beside)} of "
                "weights and inputs"
            )
            if plan.waits:
                copies, exposed = (sum(getattr(p, n) for p in plan.passes) for n in ("copies", "exposed"))
                lines.append(
                    f"{len(plan.waits)} wait between passes in {size_text(sum(plan.buffers))} of pinned "
                    f"host memory; copies take {copies / 1e3:.3g} ms (estimated), of which "
                    f"{exposed / 1e3:.3g} are not behind kernels"
                )
            lines.append("  pass  pieces       peak         us  keeps, and what is whole")
            for p in plan.passes:
                places = {
                    **dict.fromkeys(p.over, " in place"),
                    **dict.fromkeys(plan.waits, " in host memory"),
                }
                kept = [m.name + places.get(m, "") for m in p.wanted.memories]
                kept += [f"statistics of {s.name}" for s in p.wanted.steps]
                kept += [f"whole {s.name}" for s in p.whole]
                count = f"{p.pieces}x{p.columns}" if p.columns > 1 else f"{p.pieces}"
                lines.append(
                    f"  {p.level:4}  {count:>6}  {size_text(p.peak):>9}  {p.us:9.4g}  {'; '.join(kept)}"
                )
            for p in plan.passes:
                if p.sample is not None and p.wanted.most < plan.ranks:
                    lines.append(f"  {p.level:4}  {p.wanted.most} of {plan.ranks} ranks have a piece")
        lines += [f"{of}, whole: {size_text(n)} at least" for of, n in self.bound.left.items()]
        return "\n".join(lines)


def too_small(
    bound: MemoryBound, needed: int, beside: int, aside: int, doing: str, along: str = ""
) -> Unsupported:
    """The refusal of a bound where more is ``needed``. ``beside``: bytes that are there anyway, and
    ``aside`` those of them that libraries take; ``doing``: while what happens the most is there."""
    also = f", {size_text(aside)} what torch's libraries take" * bool(aside)
    return Unsupported(
        "within:memory",
        f"memory={bound.told!r} is too small: at least {size_text(needed, up=True)} are needed{along}, "
        f"of which {size_text(beside - aside)} are weights and other tensors that the caller holds{also}; "
        f"the most is there while {doing}",
    )


def size_text(count: int, up: bool = False) -> str:
    """A number of bytes, in words; ``up``: no less than it is."""
    unit = max(e for e in (0, 3, 6, 9, 12) if e == 0 or count >= 10**e)
    step = 10 ** max(0, len(str(count)) - 4)  # four digits
    found = -(-count // step) * step if up else count
    return f"{found / 10**unit:.4g} {('bytes', 'KB', 'MB', 'GB', 'TB')[unit // 3]}"
