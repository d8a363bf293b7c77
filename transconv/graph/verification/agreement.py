"""Agreement with torch: what rounding may change of a result, measured, not assumed.

    near       as close as the roundings of its operations, two to eight: nothing else is computed
    exact      torch's operators in f64
    rounded    the same, with each value moved by what its type may round: by chance, and all to one side;
               what is compared is then equal where it is as close

Each is computed where those before do not suffice: what one allows, the others do not take back.

An error is too large above four times that of torch's own result and of the rounded ones, against the
exact one. An element that rounding moves over an edge, such as that of a cast to integers, may be on
either side. Indices that were chosen among values are judged by the values that they select."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch

from transconv.graph.verification.fx_reference import (
    Change,
    RecordedNode,
    Unknown,
    Values,
    bytes_of,
    spacing,
)
from transconv.runtime import torch_internals

Tensor = torch.Tensor
aten = torch.ops.aten
TIMES = 4  # torch's own error
NARROW = 2.0**-12  # spacings above it are of 16-bit types, and of tf32
TF32 = 2.0**-11
PIECE = 1 << 24  # elements that are compared at a time
SEED = 0x7AB5
WIDER = 12  # bytes of f64 and of what is compared, for each of f32: six runs are held one by one
EXTREMES = (aten.argmax, aten.argmin, aten.max, aten.min)
WITHIN = torch_internals.max_pool_with_places  # its indices are those within each window
POOLS = {
    aten.max_pool2d_with_indices: 2,
    aten.max_pool3d_with_indices: 3,
    aten.adaptive_max_pool2d: 2,
    aten.adaptive_max_pool3d: 3,
}


def difference(values: Values, name: str, got: Tensor, tf32: bool) -> str:
    """In what a result is not torch's, in words; empty where it is. ``tf32``: its kernel rounds what it
    multiplies. Raises Unknown where torch's operators cannot tell."""
    nodes = values.needed(name)
    want: Any = values.evaluated(nodes, [name])[name] if nodes else values.known[name]
    if not isinstance(want, Tensor):
        raise Unknown(f"{name} is no tensor")
    if want.shape != got.shape or want.dtype is not got.dtype:
        return f"{name} is {_said(got)}, torch's is {_said(want)}"
    eps = spacing([n.node for n in (*nodes, values.of.nodes[name])])
    eps = max(eps, TF32 * 2 if tf32 else 0.0)
    if near(got, want, eps, sum(map(_computes, nodes))):
        return ""
    if bytes_of(nodes) * WIDER > room(want.device):
        raise Unknown("there is no memory to judge a difference in f64")
    if (choice := _choice(values, nodes, name)) is not None:
        bad = _chosen_otherwise(values, nodes, choice, got, want)
    else:
        bad = _too_far(values, nodes, name, got, want, tf32)
    return _told(bad, got, want)


def _computes(node: RecordedNode) -> bool:
    """Whether an operation may round: a view and one of several results do not."""
    return node.target is not operator.getitem and not getattr(node.target, "is_view", False)


def near(got: Tensor, want: Tensor, eps: float, roundings: int = 2) -> bool:
    """Whether results are equal, or floats with that spacing as close as sums of other orders are, and
    of 16 bits as so many operations that each round: a sum of two large values may be small. NaN is where
    NaN is."""
    if got.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    share, level = 32 * eps, 32 * eps
    if eps > NARROW:
        share, level = 2 * eps, eps / 2 * min(max(roundings, 2), 8)
    for a, b in zip(_pieces(got), _pieces(want), strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        wide = torch.float64 if a.dtype is torch.float64 else torch.float32
        a, b = a.to(wide), b.to(wide)
        least = torch.finfo(got.dtype).tiny * share
        if _is_close(a, b, share, level, least):
            continue
        size = torch.nan_to_num(b, 0.0, 0.0, 0.0).abs()
        most = size.max()
        usual = most * (size / most.clamp(min=least)).square().mean().sqrt()  # squares may overflow
        allowed = share * size + level * usual + least
        if not bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed)).all()):
            return False
    return True


def _is_close(a: Tensor, b: Tensor, share: float, level: float, least: float) -> bool:
    """The same of tensors without infinities and NaN, in half as many operations; else False."""
    if not a.numel():
        return True
    size = b.abs()
    usual = size.mean() * level + least  # at most the root of the mean square; most have its kernel loaded
    beyond = (a - b).abs_().sub_(size, alpha=share).max()
    return bool((beyond <= usual) & (usual < float("inf")))


def room(device: torch.device) -> int:
    """Bytes that can still be had; on a CPU nobody asks."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + held)


def _said(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {[*t.shape]}"


def _pieces(t: Tensor) -> Iterator[Tensor]:
    """A tensor in parts along its longest dim: comparing takes several times its memory."""
    count = -(-t.numel() // PIECE)
    if count <= 1 or not t.dim():
        return iter([t])
    return iter(t.chunk(count, max(range(t.dim()), key=lambda d: t.shape[d])))


def _told(bad: Tensor, got: Tensor, want: Tensor) -> str:
    """The sentence about wrong elements."""
    if not bool(bad.any()):
        return ""
    first = tuple(torch.nonzero(bad)[0].tolist()) if bad.dim() else ()
    one, other = (
        f"{x:.9g}" if isinstance(x, float) else str(x) for x in (t[first].item() for t in (got, want))
    )
    return (
        f"{int(bad.sum())} of {bad.numel()} elements differ, the first at {list(first)}: "
        f"{one} instead of {other}"
    )


# -- floats, and what is made of them ---------------------------------------------------------------


def _too_far(
    values: Values, nodes: Sequence[RecordedNode], name: str, got: Tensor, want: Tensor, tf32: bool
) -> Tensor:
    """Which elements are farther from all that rounding makes of them than torch's error allows."""
    wide = values.of.nodes[name].node.meta["val"].dtype in (torch.float64, torch.complex128)
    exact = values.evaluated(nodes, [name], wide=True)[name]
    runs = chain(
        [exact],
        (
            values.evaluated(nodes, [name], wide=True, change=change)[name]
            for change in _changes(got.device, wide, tf32)
        ),
    )
    if not got.is_floating_point() and not got.is_complex():
        same: Tensor = got == want
        for run in runs:
            same |= got == run
            if bool(same.all()):
                break
        return ~same
    ours = got.to(exact.dtype)
    kind = torch.finfo(got.dtype)
    ulp = kind.eps * torch.nan_to_num(exact.abs(), 0.0, 0.0, 0.0).clamp(min=kind.tiny)
    moved = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
    away = torch.full_like(moved, float("inf"))
    good = bad = moved > 0
    for run in chain([want.to(exact.dtype)], runs):
        away = torch.minimum(away, torch.nan_to_num((ours - run).abs(), float("inf")))
        moved = torch.maximum(moved, torch.nan_to_num((run - exact).abs(), 0.0, 0.0, 0.0))
        stored = run.to(got.dtype)
        good |= (got == stored) | (got.isnan() & stored.isnan())
        usual = torch.minimum(moved.max(), 16 * moved.mean()) if moved.numel() else moved
        bad = ~(good | (away <= TIMES * (moved + usual + ulp)))
        if not bool(bad.any()):  # further runs only allow more
            break
    return bad


def _changes(device: torch.device, wide: bool, tf32: bool) -> Iterator[Change]:
    """What rounding may make of values: all moved up, all down, and twice by chance, once of these with
    comparisons as they are then: where all is near an edge, both sides are seen. What is given is
    exact, but sums of it are not: it moves with the others where all do, by some roundings of the type in
    which is summed."""
    one = torch.finfo(torch.float64 if wide else torch.float32).eps * 2

    def aside(share: float) -> Change:
        return Change(lambda t, what, eps, least: t if what == "product" else t + share * t.abs())

    def by_chance(seed: int, meets: bool) -> Change:
        drawn = torch.Generator(device).manual_seed(seed)

        def change(t: Tensor, what: str, eps: float, least: float) -> Tensor:
            size = eps if what in ("result", "stored") else TF32 if what == "product" and tf32 else 0.0
            if not size:
                return t
            sign = torch.randint(0, 2, t.shape, generator=drawn, device=t.device, dtype=torch.int8)
            return t + size * t.abs().clamp(min=least) * (2 * sign - 1)

        return Change(change, meets)

    yield from (aside(one), aside(-one), by_chance(SEED, True), by_chance(SEED + 1, False))


# -- indices ----------------------------------------------------------------------------------------


def _choice(values: Values, nodes: Sequence[RecordedNode], name: str) -> RecordedNode | None:
    """The operation of which a value is the chosen indices, in their shape; None where it is not."""
    by_name = {n.name: n for n in nodes}
    at = by_name.get(name)
    while at is not None:
        packet = getattr(at.target, "overloadpacket", None)
        if packet in (aten.argmax, aten.argmin):
            return at
        if at.target is not getattr(torch.ops.prims, "convert_element_type").default and (  # noqa: B009
            packet not in (aten._to_copy, aten.clone, aten.alias)
        ):
            break
        at = by_name.get(at.inputs[0])
    if at is None or at.target is not operator.getitem or at.args[1] != 1:
        return None
    made = by_name.get(at.inputs[0])
    packet = getattr(made.target, "overloadpacket", None) if made is not None else None
    return made if packet in EXTREMES or (made is not None and _pooled(made)) else None


def _chosen_otherwise(
    values: Values, nodes: Sequence[RecordedNode], choice: RecordedNode, got: Tensor, want: Tensor
) -> Tensor:
    """Which indices select other values than torch's."""
    of = choice.inputs[0]
    before = values.needed(of)
    known = values.evaluated(before, [of])[of]
    exact = values.evaluated(before, [of], wide=True)[of]
    inside = _last_dims(choice)
    most = inside(known).shape[-1] if known.dim() else 1
    here = (got >= 0) & (got < most)
    if choice.target is WITHIN:
        window, *around = choice.args[1:5]
        here = (got >= 0) & (got < prod(window))
        sizes = known.shape[-len(window) :]
        got, want = (torch_internals.max_pool_index(t, window, sizes, *around) for t in (got, want))
    flat, one, other = inside(known), got.clamp(0, most - 1).long(), want.long()
    a, b = (_selected(flat, choice, i) for i in (one, other))
    error = (known.to(exact.dtype) - exact).abs() if known.is_floating_point() else torch.zeros(1)
    most_off = torch.nan_to_num(error, 0.0, 0.0, 0.0).max() if error.numel() else torch.zeros(())
    rounded = spacing([n.node for n in before]) * torch.nan_to_num(b.double(), 0.0, 0.0, 0.0).abs()
    good = (
        (a == b)
        | (a != a) & (b != b)
        | ((a.double() - b.double()).abs() <= TIMES * (most_off.to(rounded.device) + rounded))
    )
    return ~(good & here)


def _pooled(choice: RecordedNode) -> int:
    """How many dims a pool chooses from; 0 of another operation."""
    packet: Any = getattr(choice.target, "overloadpacket", None)
    return len(choice.args[1]) if choice.target is WITHIN else POOLS.get(packet, 0)


def _last_dims(choice: RecordedNode) -> Callable[[Tensor], Tensor]:
    """What makes the elements that an operation chose from the last dim."""
    if n := _pooled(choice):
        return lambda t: t.flatten(-n)
    dim = choice.args[1] if len(choice.args) > 1 else choice.kwargs.get("dim")
    if dim is None:
        return lambda t: t.reshape(-1)
    return lambda t: t.movedim(dim, -1) if t.dim() else t.reshape(1)


def _selected(flat: Tensor, choice: RecordedNode, indices: Tensor) -> Tensor:
    """The elements that indices select, in the shape of the indices."""
    if n := _pooled(choice):
        return flat.gather(-1, indices.flatten(-n)).view(indices.shape)
    dim = choice.args[1] if len(choice.args) > 1 else choice.kwargs.get("dim")
    if dim is None:
        return flat[indices.reshape(-1)].view(indices.shape)
    keep = (
        indices.dim() == flat.dim()
        and flat.dim() > 0
        and bool(choice.kwargs.get("keepdim", choice.args[2] if len(choice.args) > 2 else False))
    )
    lead = indices.squeeze(dim) if keep else indices
    found = (
        flat.gather(-1, lead.unsqueeze(-1)).squeeze(-1)
        if flat.dim() and lead.dim() == (flat.dim() - 1)
        else flat.expand(lead.shape)
    )
    return found.unsqueeze(dim) if keep else found
