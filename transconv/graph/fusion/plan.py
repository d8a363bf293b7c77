"""The plan of a region: one pass over the values in their order, which places each in a group.

A value rides in the group of its operands, or is stored (fusion/planner.py). A reduction leaves with the
product whose result it reduces, joins a group of rows, or begins one:

    conv -> mean, var              one kernel stores the result and parts of its sums and squared
                                   deviations; a small one combines the parts

Concatenations are stored by parts, where these stand in them:

    a = conv(x)    b = conv(y)    z = conv(cat(a, b))

The kernels of a and b store into slices of one tensor, so that no kernel copies them, and the one of z
reads a plain tensor, in boxes. What is no kernel's own result, such as a tensor that was handed in, is
copied to its slice. A concatenation that begins another one is a slice of it: in a network in which each
layer reads all results before it, they are parts of one tensor.

Each edge between two kernels has the reason why it is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import torch

from transconv.graph.fusion.groups import (
    ConcatOffset,
    FusionGroup,
    FusionPlan,
    Price,
    Statistic,
    behind,
    map_group,
    numbers_of,
    product_group,
    rows_group,
)
from transconv.graph.fusion.index_ir import (
    ALIGNED,
    ConstantValue,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    Reduced,
    RegionInput,
    features_last,
    memory_of,
    sources,
)
from transconv.graph.fusion.planner import (
    NONE,
    Apart,
    Planner,
    compared,
    viewed,
    weigh,
    weigh_factor,
    weigh_windows,
    widens,
)
from transconv.graph.sizes import Index, Length, SymbolicSize, like, with_axis
from transconv.ir import Const, FloorDiv, Var, as_expr, free_vars, substitute
from transconv.simplify import Facts, simplify


def planned(
    outputs: Sequence[Piece],
    rates: Price,
    apart: Apart = NONE,
    again: Mapping[Piece, str] = MappingProxyType({}),
    free: AbstractSet[Piece] = frozenset(),
) -> FusionPlan:
    """The plan for some values to be in memory. ``apart``: products whose factors are written first;
    ``again``: those whose results are read again by reductions, with the reasons; ``free``: outputs whose
    order in memory nothing depends on."""
    planner = Planner(outputs, rates, apart, again, free)
    for piece in planner.order:
        _place(piece, planner)
        planner.limit(piece)
    for piece in planner.outputs:
        planner.hold(piece)
    store_in_slices(planner)
    for group in planner.plan.groups:
        planner.forget(group)
    return planner.plan


def _place(piece: Piece, planner: Planner) -> None:
    match piece:
        case RegionInput() | ConstantValue():
            return
        case Reduced():
            reduce(piece, planner)
        case ProductSum():
            multiply(piece, planner)
        case _:
            planner.ride(piece)
            if isinstance(piece, Mapped) and piece not in planner.home:
                if piece.equal:
                    compared(piece, planner)
                weigh(piece, planner)


# -- reductions and products -------------------------------------------------------------------------


def reduce(piece: Reduced, planner: Planner) -> None:
    """Place a reduction: it leaves with the kernel of its operand, is one more of a group's rows, or
    begins a group of rows."""
    why = reduce_in_epilogue(piece, planner)
    if not why:
        return
    homes = [planner.home[x] for x in piece.inputs if x in planner.home]
    group = max(homes, key=lambda g: g.number) if homes else None
    if group is not None and _joins(piece, group, planner):
        return
    for x in piece.inputs:
        if x in planner.home:
            assert group is not None
            planner.keep(x, piece, why if group.kind == "product" else "another set of axes is reduced")
    reads = {t for x in piece.inputs for t in sources(x, planner.memory)}
    for other in planner.plan.groups[::-1]:
        same = any(reads & sources(x, planner.memory) for r in other.within for x in r.operands)
        if same and _joins(piece, other, planner):
            return
    for x in piece.inputs:
        weigh_windows(x, piece, planner)
    made = rows_group(len(planner.plan.groups), piece.inputs, piece.dims, _shapes_near(piece, planner))
    planner.plan.groups.append(made)
    for x in piece.inputs:
        planner.evaluates(made, x)
    _joined(piece, made, made.at[piece.inputs[0]], planner)


def _joins(piece: Reduced, group: FusionGroup, planner: Planner) -> bool:
    """Whether a reduction is one more of a group's rows."""
    shape = piece.inputs[0].shape
    if group.kind != "rows" or any(
        planner.needs(x) >= group.number for x in piece.inputs if x not in planner.home
    ):
        return False
    places = [group.at[x] for x in piece.inputs if x in group.at] + group.positions(shape)[:1]
    for at in places:
        own = {v for d in piece.dims for v in group.axes_of(at, (d,))}
        rest = {v for d in range(len(shape)) if d not in piece.dims for v in group.axes_of(at, (d,))}
        straight = not piece.op.startswith("arg") or at in group.positions(shape)
        if (
            own == group.reduced
            and not rest & own
            and straight
            and all(planner.fits(x, at, group, set()) for x in piece.inputs)
        ):
            _joined(piece, group, at, planner)
            return True
    return False


def _joined(piece: Reduced, group: FusionGroup, at: Index, planner: Planner) -> None:
    """Note a reduction as one of a group's, of elements at a position."""
    group.within[piece] = at
    group.at[piece] = behind(at, piece)
    group.evaluated[piece] = None
    planner.home[piece] = group


def _shapes_near(piece: Reduced, planner: Planner) -> list[tuple[Length, ...]]:
    """The shapes in which the elements that are reduced are seen before and behind it."""
    size = piece.inputs[0].size
    found: dict[Piece, None] = {}
    left: list[Piece] = [*piece.inputs]
    while left and len(found) < 256:
        at = left.pop()
        if at.size != size or at in found or isinstance(at, ProductSum):
            continue
        found[at] = None
        left += [*at.operands, *planner.users.get(at, [])]
    return list(dict.fromkeys(x.shape for x in found))


def multiply(piece: ProductSum, planner: Planner) -> None:
    """Begin the group of a product; what its factors are made of is stored where that is cheaper."""
    for side, factor in enumerate(piece.factors):
        x = factor.of
        if x in planner.home:
            planner.keep(
                x,
                piece,
                f"a product reads an element of {planner.home[x].name} many times, in other tiles",
            )
        else:
            weigh_factor(piece, side, planner)
    made = product_group(len(planner.plan.groups), piece)
    made.evaluated[piece] = None
    planner.home[piece] = made
    planner.plan.groups.append(made)


# -- concatenations ----------------------------------------------------------------------------------


RUN = 64  # bytes: two sectors of memory
IN_PLACE = "is stored where it stands in the concatenation"


def store_in_slices(planner: Planner) -> None:
    """Change a plan so that concatenations are stored by parts: those that are stored, and those of which
    all parts are."""
    found = [
        p
        for p in planner.order
        if isinstance(p, PiecewiseIndex)
        and p.along is not None
        and all(isinstance(n, int) for n in (*memory_of(p), *features_last(p.shape), *_lengths(p)))
    ]
    for piece in sorted(found, key=lambda p: -p.bytes):
        if not _slice(piece, planner):
            _whole(piece, planner)


def _starts(piece: PiecewiseIndex) -> list[int]:
    """Where the parts begin along the dim."""
    return [sum(numbers_of(_lengths(piece)[:i])) for i in range(len(piece.parts))]


def _lengths(piece: PiecewiseIndex) -> list[Length]:
    """The sizes of the parts along the dim."""
    assert piece.along is not None
    return [part.of.shape[piece.along] for part in piece.parts]


def _whole(piece: PiecewiseIndex, planner: Planner) -> None:
    """Have the parts of a concatenation stored in it, and copied where no kernel stores them."""
    plan, own = planner.plan, planner.plan.stored.get(piece)
    strides = _strides(piece, planner)
    lies = [
        _computed(p.of, ConcatOffset(piece, start * strides[piece.along or 0], strides), planner)
        for p, start in zip(piece.parts, _starts(piece), strict=True)
    ]
    runs = [strides[piece.along or 0] * like(p.of.shape[piece.along or 0]) for p in piece.parts]
    places = {
        x: at
        for (x, at), run in reversed([*zip(lies, runs, strict=True)])
        if _may_lie(x, at, run * piece.dtype.itemsize, planner)
    }
    if not places or (own is None and len(places) < len(piece.parts)) or (own and own.kind != "map"):
        return
    piece.strides = strides
    plan.places |= places
    for x in places:
        plan.note(x, piece, IN_PLACE)
    if own is None:
        plan.stored[piece] = max((plan.stored[x] for x in places), key=lambda g: g.number)
        return
    own.stores.remove(piece)
    for x, at in reversed(lies):
        if places.get(x) != at:
            _copy(x, at, own, planner)


def _computed(part: Piece, at: ConcatOffset, planner: Planner) -> tuple[Piece, ConcatOffset]:
    """What a part of a concatenation is a view of, if a product stores that, and where it lies there."""
    base, strides = part, at.strides
    while base not in planner.plan.stored and viewed(base) and isinstance(base, MovedView):
        if (found := _strides_below(base, strides)) is None:
            return part, at
        base, strides = base.of, found
    group = planner.plan.stored.get(base)
    if group is None or group.product is None:
        return part, at
    return base, ConcatOffset(at.whole, at.behind, strides)


def _strides_below(view: MovedView, strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of what a view is of, where the view lies with these; None if it has none."""
    assert view.back is not None
    sizes = view.of.shape
    own = [Var(f"d{d}") for d in range(len(sizes))]
    facts = Facts()
    for v, n in zip(own, sizes, strict=True):
        facts = with_axis(facts, v.name, n)
    place = sum((e * n for e, n in zip(view.back(tuple(own)), strides, strict=True)), start=as_expr(0))

    def at(d: int) -> int:
        found = simplify(substitute(place, {v: as_expr(int(k == d)) for k, v in enumerate(own)}), Facts())
        return int(found.value) if isinstance(found, Const) else 0

    steps = tuple(at(d) for d in range(len(sizes)))
    line = sum((v * n for v, n in zip(own, steps, strict=True)), start=as_expr(0))
    return steps if simplify(place - line, facts) == as_expr(0) else None


def _copy(part: Piece, at: ConcatOffset, own: FusionGroup, planner: Planner) -> None:
    """Store a part behind a group, by a kernel of its own."""
    plan = planner.plan
    copy = MovedView(shape=part.shape, dtype=part.dtype, label=at.whole.label, of=part, move=tuple)
    group = map_group(own.number, copy.shape)
    group.stores, group.at[copy] = [copy], group.positions(copy.shape)[0]
    plan.groups.insert(plan.groups.index(own) + 1, planner.evaluates(group, copy))
    plan.places[copy], plan.stored[copy] = at, group


def _strides(piece: PiecewiseIndex, planner: Planner) -> tuple[int, ...]:
    """How a concatenation lies: as torch has it where it is handed out, else with features last if it is
    an image of a convolution."""
    if piece not in planner.fixed and any(x in planner.images for x in (piece, *piece.operands)):
        return numbers_of(features_last(piece.shape))
    return numbers_of(memory_of(piece))


def _may_lie(part: Piece, at: ConcatOffset, run: int, planner: Planner) -> bool:
    """Whether the kernel that stores a value may store it so many elements behind the beginning of a
    tensor: it is needed nowhere else in an order of its own, boxes may begin there, and what is stored in
    one piece, ``run`` bytes, is as long as what memory moves at once. A product may store its result in
    another order, if that has such rows."""
    group = planner.plan.stored.get(part)
    if (
        group is None
        or part not in group.stores
        or part in group.statistics
        or (
            isinstance(part, RegionInput)
            or part in planner.outputs
            or part in planner.plan.places
            or part.dtype is not at.whole.dtype
        )
    ):
        return False
    size = part.dtype.itemsize
    mine = memory_of(part)
    wide = [d for d, n in enumerate(part.shape) if n != 1]
    order = [sorted(wide, key=lambda d: -like(own[d])) for own in (at.strides, mine)]
    steps = [n for n in (at.behind, *(at.strides[d] for d in wide)) if n != 1]
    inner = order[0][-1] if wide else 0
    kept = order[0] == order[1] or (
        group.product is not None and at.strides[inner] == 1 and like(part.shape[inner]) * size >= RUN
    )
    return kept and run >= RUN and all(n * size % ALIGNED == 0 for n in steps)


def _slice(piece: PiecewiseIndex, planner: Planner) -> bool:
    """Whether all parts of a concatenation stand in another one as they do in it; it is then a slice."""
    plan, own = planner.plan, planner.plan.stored.get(piece)
    first = plan.places.get(piece.parts[0].of)
    if (
        first is None
        or first.whole.along != piece.along
        or piece in planner.outputs
        or (own and own.kind != "map")
    ):
        return False
    step = numbers_of(memory_of(first.whole))[piece.along or 0]
    for part, start in zip(piece.parts, _starts(piece), strict=True):
        at = plan.places.get(part.of)
        if at is None or (at.whole, at.behind) != (first.whole, first.behind + start * step):
            return False
    if own is not None:
        own.stores.remove(piece)
    plan.stored[piece] = max((plan.stored[p.of] for p in piece.parts), key=lambda g: g.number)
    plan.places[piece] = first
    return True


# -- reductions that leave with a product ------------------------------------------------------------


KEPT = (torch.float32, torch.float64)


def reduce_in_epilogue(piece: Reduced, planner: Planner) -> str:
    """Have a reduction leave with the product of its input, or say why it does not."""
    x = piece.inputs[0] if piece.deviating is None else piece.deviating
    group = planner.home.get(x)
    if group is None or group.product is None:
        return "its input is no result of a product"
    op = "squares" if piece.deviating is not None else piece.op
    at = group.at[x]
    if why := planner.again.get(group.product) or _why_not(piece, op, x, at):
        return why
    if group.siblings:
        return "the parts of its input are computed apart"
    if not all(_own_axes(group.product)):
        return "a vector is multiplied, which is a reduction of rows"
    if any(isinstance(n, SymbolicSize) for _, n in group.axes):
        return "sizes that are names do not tell how many tiles there are"
    place = group.simple(behind(at, piece))
    if (why := _why_not_place(place)) or x.size != group.product.size:
        return why or "it reduces values more often than the product has them"
    if op == "squares" and not any(
        s[:3] == ("sum", x, at) and group.at[p] == place for p, s in group.statistics.items()
    ):
        return "its mean does not leave with the product"
    if all(p in group.statistics for p in group.stores):
        planner.hold(_result(x, group, planner))
    group.statistics[piece] = Statistic(op, x, at, _is_applied(piece, planner))
    group.at[piece] = place
    group.stores.append(piece)
    group.evaluated[piece] = None
    planner.plan.stored[piece] = group
    return ""


def _result(x: Piece, group: FusionGroup, planner: Planner) -> Piece:
    """What is stored beside a statistic of a value: this, but for what only the statistic needs."""
    alone = True  # whether nothing else needs what was passed
    while x not in planner.outputs and x not in planner.plan.stored:
        own = [y for y in x.operands if planner.home.get(y) is group]
        alone &= len(planner.users[x]) == 1
        narrow = len(own) == 1 and own[0].dtype.itemsize <= x.dtype.itemsize
        if not own or not ((alone and narrow and isinstance(x, Mapped)) or viewed(x) or widens(x)):
            break
        x = own[0]
    return x


def _why_not(piece: Reduced, op: str, x: Piece, at: Index) -> str:
    if op not in ("sum", "max", "min", "squares"):
        return f"{op} is no statistic that leaves with a product"
    if op != "squares" and (len(piece.inputs) > 1 or piece.write is not str):
        return "it reduces what is computed of the result"
    if piece.dtype not in KEPT:
        return f"a statistic is kept in f32, this is {piece.dtype}"
    return "" if len(at) == len(x.shape) else "its input stands elsewhere"


def _own_axes(product: ProductSum) -> tuple[set[str], set[str]]:
    """The axes of a product that one factor alone has, for each."""
    one, other = ({v.name for e in factor.at for v in free_vars(e)} for factor in product.factors)
    sizes = dict(product.axes)
    one, other = ({name for name in own if sizes.get(name, 1) != 1} for own in (one, other))
    return one - other, other - one


def _why_not_place(place: Index) -> str:
    """Why the places of a reduction are none that a store can reduce to."""
    names: list[str] = []
    for e in place:
        match e:
            case Var(name) | FloorDiv(Var(name), Const()):
                names.append(name)
            case Const():
                pass
            case _:
                return f"its places, {e}, are no axes of the product"
    return "" if len(names) == len({*names}) else "its places have an axis twice"


def _is_applied(piece: Reduced, planner: Planner) -> bool:
    """Whether what is reduced are rows of memory, and the result is applied to each of their elements."""
    x, left, seen = piece.inputs[0], list[Piece]([piece]), set[Piece]()
    steps = [(like(n), d) for d, n in enumerate(memory_of(x)) if x.shape[d] != 1]
    while left and steps and min(steps)[1] in piece.dims:
        users = {u for u in planner.users.get(left.pop(), []) if not isinstance(u, ProductSum)} - seen
        if any(u.size == x.size for u in users):
            return True
        left += users
        seen |= users
    return False
