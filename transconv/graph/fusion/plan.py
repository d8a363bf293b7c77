"""Which values are stored, and by which kernel: one pass over the values in their order.

    rides    a value whose operands stand in one group, at its own positions, is computed there
    stored   what another group needs of it; what is handed out; what is too dear to compute again
    read     everything else: views and maps of what is in memory are evaluated where they are read

Each edge between two kernels has the reason why it is one.

Also here: reductions and products of a plan: each joins a group, or begins one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from transconv.graph.fusion import concat_views, epilogue_reductions, fusion_cost, materialize
from transconv.graph.fusion.groups import FusionGroup, behind, map_group, product_group, rows_group
from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Index,
    Indexed,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    Reduced,
    RegionInput,
)
from transconv.graph.fusion.memory_order import features_last, images, memory_of
from transconv.graph.sizes import Length, same
from transconv.ir import Var

Apart = Mapping[Piece, Sequence[materialize.MaterializeReason]]
"""Products whose factors are written first: in one step what is computed, in another what is seen through
views."""
NONE: Apart = MappingProxyType({})
MOST_STORED = 16  # small values that one kernel stores
LONGEST = 100  # operations of one kernel, one of the other's result; of views twice as many
CUT = "is at the end of a chain of {} operations, the longest of one kernel"
CUT_OFF = "is needed behind such a chain"


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that goes through memory: from its operation to another one, and why."""

    value: str
    user: str
    reason: str


@dataclass(slots=True)
class FusionPlan:
    """The groups in the order in which they run, what is in memory behind which of them, and which of it
    lies in the memory of a concatenation."""

    groups: list[FusionGroup] = field(default_factory=list)
    stored: dict[Piece, FusionGroup] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    places: dict[Piece, concat_views.ConcatOffset] = field(default_factory=dict)

    def strides(self, piece: Piece) -> tuple[Length, ...]:
        """Of a value that is stored, in elements."""
        place = self.places.get(piece)
        return memory_of(piece if place is None else place.whole)

    def note(self, value: Piece, user: Piece, reason: str) -> None:
        """That a value goes through memory, and why."""
        self.edges.append(Edge(value.label or "a value", user.label or "a value", reason))


def ordered(ends: Iterable[Piece]) -> list[Piece]:
    """All values that some are made of, operands first."""
    found: dict[Piece, None] = {}
    left: list[tuple[Piece, bool]] = [(e, False) for e in reversed([*ends])]
    while left:
        piece, known = left.pop()
        if known:
            found[piece] = None
        elif piece not in found:
            left.append((piece, True))
            left += [(x, False) for x in reversed(piece.operands) if x not in found]
    return [*found]


def planned(outputs: Sequence[Piece], rates: fusion_cost.Price, apart: Apart = NONE,
            again: Mapping[Piece, str] = MappingProxyType({}),
            free: AbstractSet[Piece] = frozenset()) -> FusionPlan:
    """The plan for some values to be in memory. ``apart``: products whose factors are written first;
    ``again``: those whose results are read again by reductions, with the reasons; ``free``: outputs whose
    order in memory nothing depends on."""
    return Planner(outputs, rates, apart, again, free).plan


class Planner:
    """Makes a plan. ``home``: the group in which a value rides; ``chain``: how many operations, one of the
    other's result, have made a value of what is in memory; ``cut``: what is in memory because those are
    too many, and is read from there by whatever is made of it."""

    def __init__(self, outputs: Sequence[Piece], rates: fusion_cost.Price, apart: Apart,
                 again: Mapping[Piece, str], free: AbstractSet[Piece] = frozenset()) -> None:
        self.apart, self.again = apart, again
        self.fixed = {*outputs} - free  # in torch's order
        self.outputs, self.rates, self.plan = list(dict.fromkeys(outputs)), rates, FusionPlan()
        self.order = ordered(self.outputs)
        self.images = images(self.order) - self.fixed
        self.home: dict[Piece, FusionGroup] = {}
        self.users: dict[Piece, list[Piece]] = {}
        self.chain: dict[Piece, int] = {}
        self.cut: set[Piece] = set()
        for piece in self.order:
            for x in dict.fromkeys(piece.operands):
                self.users.setdefault(x, []).append(piece)
        for piece in self.order:
            self.place(piece)
            self.limit(piece)
        for piece in self.outputs:
            self.hold(piece)
        concat_views.place(self)
        for group in self.plan.groups:
            self.forget(group)

    def place(self, piece: Piece) -> None:
        match piece:
            case RegionInput() | ConstantValue():
                return
            case Reduced():
                reduce(piece, self)
            case ProductSum():
                multiply(piece, self)
            case _:
                self.ride(piece)
                if isinstance(piece, Mapped) and piece.equal and piece not in self.home:
                    materialize.compared(piece, self)
                if piece not in self.home and isinstance(piece, Mapped):
                    materialize.weigh(piece, self)

    def limit(self, piece: Piece) -> None:
        """Store a value at the end of a long chain: texts and kernels of any length take long to compile,
        and what reads them recurses."""
        made = [self.chain[x] for x in piece.operands if x not in self.plan.stored]
        self.chain[piece] = count = 1 + max(made, default=0) if piece.operands else 0
        if count < LONGEST * (1 if isinstance(piece, Mapped) else 2) or piece in self.plan.stored:
            return
        for user in self.users.get(piece, ())[:1]:
            self.keep(piece, user, CUT.format(count), itself=True)
            self.cut.add(piece)

    # -- what is known of values -----------------------------------------------------------------

    @property
    def memory(self) -> set[Piece]:
        return {*self.plan.stored}

    def needs(self, piece: Piece, within: FusionGroup | None = None) -> int:
        """The last group that must have run before a value can be read: -1, none. ``within``: by a group,
        which evaluates what it stores itself."""
        most, left, seen = -1, [piece], {piece}
        while left:
            at = left.pop()
            found = self.plan.stored.get(at)
            if found is not None and (found is not within or at in self.cut):
                most = max(most, found.number)
                continue
            left += [x for x in at.operands if x not in seen]
            seen |= {*at.operands}
        return most

    def fits(self, piece: Piece, at: Index, group: FusionGroup, seen: set[tuple[Piece, Index]]) -> bool:
        """Whether a group has all that a value at a position is made of; ``seen``: what was asked for."""
        if isinstance(piece, (RegionInput, ConstantValue)) or (piece, at) in seen:
            return True
        seen.add((piece, at))
        own = self.home.get(piece)
        mine = own is not None and own.number == group.number and piece not in self.cut
        if piece in self.plan.stored and not mine:
            return self.plan.stored[piece].number < group.number
        at = group.simple(at)
        if piece.anchored:
            return mine and group.at[piece] == at
        match piece:
            case MovedView():
                return self.fits(piece.of, piece.move(at), group, seen)
            case PiecewiseIndex():
                return all(self.fits(p.of, p.move(at), group, seen) for p in piece.parts)
            case Indexed():
                told = [(p, move(at)) for p, move in piece.told]
                names = [Var("told_") for _ in told]
                return all(self.fits(p, a, group, seen) for p, a in told) and self.fits(
                    piece.of, piece.move(at, names), group, seen)
        return all(self.fits(x, at, group, seen) for x in piece.operands)

    # -- rides -----------------------------------------------------------------------------------

    def ride(self, piece: Piece) -> None:
        """Let a value be computed where its operands are, or store these."""
        homes = [self.home[x] for x in piece.operands if x in self.home]
        if not homes:
            return
        group = max(homes, key=lambda g: g.number)
        if self.cut.intersection(piece.operands):
            for x in piece.operands:
                if x in self.home:
                    self.keep(x, piece, CUT_OFF)
            return
        away = [x for x in piece.operands if self.home.get(x) not in (None, group)]
        if all(self.needs(x) < group.number for x in piece.operands if x not in self.home):
            held = [x for x in away if x not in self.plan.stored]
            for x in held:
                self.plan.stored[x] = self.home[x]  # as if: until it is known that the rest fits
            places = [self.position(piece, g) for g in (group, *group.siblings)]
            for x in held:
                del self.plan.stored[x]
            if all(at is not None for at in places):
                for x in held:
                    self.keep(x, piece, f"one kernel has the tiles of {group.name} alone")
                self.home[piece] = group
                for g, at in zip((group, *group.siblings), places, strict=True):
                    g.at[piece] = at or ()
                group.evaluated[piece] = None
                return
        for x in piece.operands:
            if x in self.home:
                self.keep(x, piece, self.why_not(piece, group))

    def why_not(self, piece: Piece, group: FusionGroup) -> str:
        said = {"product": "tile", "rows": "row", "map": "element"}[group.kind]
        if isinstance(piece, (MovedView, PiecewiseIndex, Indexed)):
            return f"{piece.label} moves elements to another {said} of {group.name}"
        return f"its operands are not in one {said}"

    def position(self, piece: Piece, group: FusionGroup) -> Index | None:
        """Where a value stands in a group that has its operands."""
        found = []
        for x in piece.operands:
            if (own := group.at.get(x)) is not None:
                if isinstance(piece, MovedView) and piece.back:
                    found.append(group.simple(piece.back(own)))
                elif isinstance(piece, Mapped):
                    found.append(own)
        found += group.positions(piece.shape)
        return next((at for at in dict.fromkeys(found) if self.fits(piece, at, group, set())), None)

    # -- stores ----------------------------------------------------------------------------------

    def keep(self, piece: Piece, user: Piece | None, reason: str, exact: bool = False,
             itself: bool = False) -> None:
        """Have a value in memory for a user, or for arithmetic what a kernel evaluates it from. ``exact``:
        it, or what it is a view of, or only widens; ``itself``, or without a user: nothing else."""
        if user is None:
            self.hold(piece)
            return
        narrow = exact or not isinstance(user, (Mapped, Reduced))
        for base in [piece] if itself else materialize.bases(piece, self, narrow):
            self.plan.note(base, user, reason)
            self.hold(base)

    def hold(self, piece: Piece) -> None:
        """Have a value stored by the kernel that has it."""
        if piece in self.plan.stored or isinstance(piece, RegionInput):
            return
        group = self.home.get(piece) or self.mapping(piece)
        if piece in self.images:
            piece.strides = features_last(piece.shape)
        group.stores.append(piece)
        group.at.setdefault(piece, group.positions(piece.shape)[0] if group.product is None else ())
        self.plan.stored[piece] = group

    def mapping(self, piece: Piece) -> FusionGroup:
        """The group that stores a value which rides nowhere: one that stores another of its shape, if it
        may, and both read a tensor or are so small that a launch takes longer."""
        needs = self.needs(piece)
        for group in self.plan.groups:
            if group.number > needs and piece in group.at:  # a row that is reduced
                return group
        for group in reversed(self.plan.groups):
            if group.kind != "map" or not same(group.stores[0].shape, piece.shape) or self.needs(
                    piece, group) >= group.number:
                continue
            others = self.memory - {*group.stores}
            reads = fusion_cost.sources(piece, others)
            beside = {t for x in group.stores for t in fusion_cost.sources(x, others)}
            small = len(group.stores) < MOST_STORED and self.rates.moved(
                sum(x.bytes for x in {piece, *group.stores, *reads, *beside})) < self.rates.launch_us
            if small or reads & beside:
                return self.evaluates(group, piece)
        group = map_group(len(self.plan.groups), piece.shape)
        self.plan.groups.append(group)
        return self.evaluates(group, piece)

    def evaluates(self, group: FusionGroup, piece: Piece) -> FusionGroup:
        """Note what a group evaluates for a value that rides nowhere."""
        known = {*self.plan.stored, *self.home}
        group.evaluated |= dict.fromkeys(
            reversed([x for x in fusion_cost.inside(piece, known) if x not in known]))
        return group

    def forget(self, group: FusionGroup) -> None:
        """What rides with a group and is evaluated by others alone is none of its operations."""
        others = self.memory - {*group.stores}
        needed = {x for piece in group.stores for x in fusion_cost.inside(piece, others)}
        for piece in [p for p in group.evaluated if p not in needed]:
            del group.evaluated[piece]


def reduce(piece: Reduced, planner: Planner) -> None:
    """Place a reduction: it leaves with the kernel of its operand, is one more of a group's rows, or
    begins a group of rows."""
    why = epilogue_reductions.left(piece, planner)
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
    reads = {t for x in piece.inputs for t in fusion_cost.sources(x, planner.memory)}
    for other in planner.plan.groups[::-1]:
        same = any(
            reads & fusion_cost.sources(x, planner.memory) for r in other.within for x in r.operands
        )
        if same and _joins(piece, other, planner):
            return
    for x in piece.inputs:
        materialize.weigh_windows(x, piece, planner)
    made = rows_group(len(planner.plan.groups), piece.inputs, piece.dims, _shapes_near(piece, planner))
    planner.plan.groups.append(made)
    for x in piece.inputs:
        planner.evaluates(made, x)
    _joined(piece, made, made.at[piece.inputs[0]], planner)


def _joins(piece: Reduced, group: FusionGroup, planner: Planner) -> bool:
    """Whether a reduction is one more of a group's rows."""
    shape = piece.inputs[0].shape
    if group.kind != "rows" or any(planner.needs(x) >= group.number for x in piece.inputs
                                   if x not in planner.home):
        return False
    places = [group.at[x] for x in piece.inputs if x in group.at] + group.positions(shape)[:1]
    for at in places:
        own = {v for d in piece.dims for v in group.axes_of(at, (d,))}
        rest = {v for d in range(len(shape)) if d not in piece.dims for v in group.axes_of(at, (d,))}
        straight = not piece.op.startswith("arg") or at in group.positions(shape)
        if own == group.reduced and not rest & own and straight and all(
                planner.fits(x, at, group, set()) for x in piece.inputs):
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
            planner.keep(x, piece, f"a product reads an element of {planner.home[x].name} many times, in "
                      "other tiles")
        else:
            materialize.weigh_factor(piece, side, planner)
    made = product_group(len(planner.plan.groups), piece)
    made.evaluated[piece] = None
    planner.home[piece] = made
    planner.plan.groups.append(made)
