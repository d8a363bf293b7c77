"""The planner of a region: which values are stored, so that later kernels have what earlier ones compute.

    rides    a value whose operands stand in one group, at its own positions, is computed there
    stored   what another group needs of it; what is handed out; what is too dear to compute again
    read     everything else: views and maps of what is in memory are evaluated where they are read

A value is stored, or what it is made of:

    where -> mul -> sum       the sum is another kernel's: "where" is stored, and "mul" evaluated again
    sum -> expand -> sub      the sum is stored, not its copies

What moves fewer bytes is taken: those that are written and read, beside those that are read to evaluate a
value again. And what could be evaluated where it is read is written once where that costs less."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from transconv.graph.fusion.groups import FusionGroup, FusionPlan, Price, ahead, map_group, visits
from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Counted,
    Indexed,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    Reduced,
    RegionInput,
    aliased,
    features_last,
    images,
    ingredients,
    instructions,
    ordered,
    sources,
)
from transconv.graph.sizes import Index, like, same
from transconv.ir import Var

STORED_DEARER = "is evaluated {:.3g} times: {:.3g} us, written and read once {:.3g} us"
COMPARED = "is compared with another value: evaluated again it may be rounded otherwise"
STORED_ANYWAY = "is handed out: read, not evaluated again"
SHARED = 0.5  # of reading what the same kernel stores: others behind it read that anyway
DEEPEST = 24  # operations that are evaluated again at most, one of the other


class MaterializeReason(NamedTuple):
    """Why a product's factors are written first. ``there``: what they were views of that was in memory
    already: then the factor itself is written; else what it is a view of, which another kernel may store
    as well."""

    reason: str
    there: frozenset[Piece] = frozenset()


Apart = Mapping[Piece, Sequence[MaterializeReason]]
"""Products whose factors are written first: in one step what is computed, in another what is seen through
views."""
NONE: Apart = MappingProxyType({})
MOST_STORED = 16  # small values that one kernel stores
LONGEST = 100  # operations of one kernel, one of the other's result; of views twice as many
CUT = "is at the end of a chain of {} operations, the longest of one kernel"
CUT_OFF = "is needed after such a chain"


class Planner:
    """What is known of a plan while it is made, and what is stored for it.

    ``home``: the group in which a value rides; ``chain``: how many operations, one of the
    other's result, have made a value of what is in memory; ``cut``: what is in memory because those are
    too many, and is read from there by whatever is made of it."""

    def __init__(
        self,
        outputs: Sequence[Piece],
        rates: Price,
        apart: Apart,
        again: Mapping[Piece, str],
        free: Collection[Piece] = frozenset(),
    ) -> None:
        self.apart, self.again = apart, again
        self.fixed = {*outputs}.difference(free)  # in torch's order
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
            for x in at.operands:
                if x not in seen:
                    seen.add(x)
                    left.append(x)
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
                    piece.of, piece.move(at, names), group, seen
                )
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
        away = [x for x in dict.fromkeys(piece.operands) if self.home.get(x) not in (None, group)]
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
        found: dict[Index, None] = {}
        for x in piece.operands:
            if (own := group.at.get(x)) is not None:
                if isinstance(piece, MovedView) and piece.back:
                    found[group.simple(piece.back(own))] = None
                elif isinstance(piece, Mapped):
                    found[own] = None
        found |= dict.fromkeys(group.positions(piece.shape))
        return next((at for at in found if self.fits(piece, at, group, set())), None)

    # -- stores ----------------------------------------------------------------------------------

    def keep(
        self, piece: Piece, user: Piece | None, reason: str, exact: bool = False, itself: bool = False
    ) -> None:
        """Have a value in memory for a user, or for arithmetic what a kernel evaluates it from. ``exact``:
        it, or what it is a view of, or only widens; ``itself``, or without a user: nothing else."""
        if user is None:
            self.hold(piece)
            return
        narrow = exact or not isinstance(user, (Mapped, Reduced))
        for base in [piece] if itself else bases(piece, self, narrow):
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
        if piece not in group.at:
            group.at[piece] = group.positions(piece.shape)[0] if group.product is None else ()
        self.plan.stored[piece] = group

    def mapping(self, piece: Piece) -> FusionGroup:
        """The group that stores a value which rides nowhere: one that stores another of its shape, if it
        may, and both read a tensor or are so small that a launch takes longer."""
        needs = self.needs(piece)
        for group in self.plan.groups:
            if group.number > needs and piece in group.at:  # a row that is reduced
                return group
        for group in reversed(self.plan.groups):
            if (
                group.kind != "map"
                or not same(group.stores[0].shape, piece.shape)
                or self.needs(piece, group) >= group.number
            ):
                continue
            others = self.memory - {*group.stores}
            reads = sources(piece, others)
            beside = {t for x in group.stores for t in sources(x, others)}
            small = (
                len(group.stores) < MOST_STORED
                and self.rates.moved(sum(x.bytes for x in {piece, *group.stores, *reads, *beside}))
                < self.rates.launch_us
            )
            if small or reads & beside:
                return self.evaluates(group, piece)
        group = map_group(len(self.plan.groups), piece.shape)
        self.plan.groups.append(group)
        return self.evaluates(group, piece)

    def evaluates(self, group: FusionGroup, piece: Piece) -> FusionGroup:
        """Note what a group evaluates for a value that rides nowhere."""
        known = {*self.plan.stored, *self.home}
        group.evaluated |= dict.fromkeys(
            reversed([x for x in ingredients(piece, known) if x not in known])
        )
        return group

    def forget(self, group: FusionGroup) -> None:
        """What rides with a group and is evaluated by others alone is none of its operations."""
        others = self.memory - {*group.stores}
        needed = {x for piece in group.stores for x in ingredients(piece, others)}
        for piece in [p for p in group.evaluated if p not in needed]:
            del group.evaluated[piece]


def bases(piece: Piece, planner: Planner, only_views: bool) -> list[Piece]:
    """The values to store, so that a later kernel has a value that another one computes. ``only_views``:
    it, or what it is a view of, or a wider type of, in the same kernel."""
    found: dict[Piece, tuple[float, tuple[Piece, ...]]] = {}
    home = planner.home.get(piece)

    def cheapest(x: Piece, deep: int) -> tuple[float, tuple[Piece, ...]]:
        """Microseconds of moving it, and what is stored for it."""
        if x not in found:
            found[x] = _stored(x, planner, home)
            if deep < DEEPEST and not _is_there(x, planner) and _evaluates(x, planner, only_views):
                parts = [cheapest(o, deep + 1) for o in x.operands]
                work = ahead(x)
                again = planner.rates.worked(work) + sum(us for us, _ in parts)
                if again < found[x][0] or (
                    again == found[x][0] and (isinstance(x, MovedView) or copies(x))
                ):
                    found[x] = again, tuple(dict.fromkeys(b for _, own in parts for b in own))
        return found[x]

    return [*cheapest(piece, 0)[1]]


def _stored(x: Piece, planner: Planner, home: FusionGroup | None) -> tuple[float, tuple[Piece, ...]]:
    if isinstance(x, (ConstantValue, Counted)):
        return 0.0, ()
    if _is_there(x, planner):
        shared = home is not None and planner.plan.stored.get(x) is home
        return planner.rates.moved(x.bytes) * (SHARED if shared else 1.0), ()
    times = 1 if x in planner.outputs else 2  # written and read, by a kernel that may read what it is of
    made = () if x in planner.outputs or x in planner.home else sources(x, planner.memory)
    return planner.rates.moved(times * x.bytes + sum(t.bytes for t in made)), (x,)


def _is_there(x: Piece, planner: Planner) -> bool:
    return isinstance(x, (RegionInput, ConstantValue, Counted)) or x in planner.plan.stored


def _evaluates(x: Piece, planner: Planner, only_views: bool) -> bool:
    """Whether a kernel that has the operands of a value may evaluate it."""
    if only_views:
        home = planner.home.get(x)
        return (
            home is not None
            and (viewed(x) or widens(x) or copies(x))
            and (planner.home.get(x.operands[0]) is home)
        )
    return isinstance(x, (Mapped, MovedView))


def viewed(piece: Piece) -> bool:
    """Whether a value is another one, seen from elsewhere, of which it has all elements."""
    return isinstance(piece, MovedView) and piece.back is not None


def widens(piece: Piece) -> bool:
    """Whether a value is cheap to compute from one of a narrower type, such as its cast."""
    return (
        isinstance(piece, Mapped)
        and len(piece.inputs) == 1
        and piece.work <= 1.0
        and piece.inputs[0].dtype.itemsize < piece.dtype.itemsize
        and same(piece.inputs[0].shape, piece.shape)
    )


def copies(piece: Piece) -> bool:
    """Whether a value is another one in memory of its own, which only what is handed out needs."""
    return (
        isinstance(piece, Mapped)
        and not piece.work
        and len(piece.inputs) == 1
        and (piece.inputs[0].dtype is piece.dtype and same(piece.inputs[0].shape, piece.shape))
    )


def compared(piece: Mapped, planner: Planner) -> None:
    """Store what is compared for equality in another kernel: evaluated again it may be rounded otherwise
    than where it was reduced."""
    for x in piece.inputs:
        while isinstance(x, MovedView):
            x = x.of
        if not _is_there(x, planner):
            planner.keep(x, piece, COMPARED, itself=True)


# -- what is written once ----------------------------------------------------------------------------


def weigh(piece: Mapped, planner: Planner) -> None:
    """Store a map that several kernels would evaluate, where that costs less."""
    users = planner.users.get(piece, [])
    ends = sum(x.anchored or x in planner.outputs for x in users) + (piece in planner.outputs)
    if ends < 2:
        return
    _keep_if_cheaper(piece, users[0], ends, ends, 0.0, planner)


def weigh_windows(piece: Piece, user: Reduced, planner: Planner) -> None:
    """Store what windows that overlap would evaluate several times, where that costs less."""
    views = piece
    while isinstance(views, (MovedView, PiecewiseIndex)) and views not in planner.plan.stored:
        views = views.operands[0]
    if (
        views is piece
        or views.size == 0
        or views in planner.plan.stored
        or isinstance(views, (RegionInput, ConstantValue))
    ):
        return
    _weigh_visits(views, user, like(piece.size) / like(views.size), 0.0, planner)


def step(product: ProductSum, stored: Container[Piece], reason: str) -> MaterializeReason:
    """One more step in which the factors of a product are written first, behind a plan that stores some
    values."""
    return MaterializeReason(
        reason, frozenset(x for f in product.factors if (x := seen(f.of, stored)) in stored)
    )


def seen(piece: Piece, stored: Container[Piece]) -> Piece:
    """What a value is a view of: what is stored, or what is computed."""
    while (
        isinstance(piece, (MovedView, PiecewiseIndex))
        and piece not in stored
        and not any(isinstance(x, Mapped) for x in piece.operands[1:])
    ):
        piece = piece.operands[0]
    return piece


def weigh_factor(piece: ProductSum, side: int, planner: Planner) -> None:
    """Store a factor that is computed, where it would be evaluated too often."""
    stored = planner.plan.stored
    views = piece.factors[side].of
    if isinstance(views, PiecewiseIndex) and views in planner.outputs:
        planner.keep(views, piece, STORED_ANYWAY, itself=True)
    views = seen(views, {*stored, *planner.outputs})
    for reason, there in (r for part in (piece, *piece.others) for r in planner.apart.get(part, ())):
        written = views in there or isinstance(views, (RegionInput, ConstantValue))
        kept = piece.factors[side].of if written else views
        base = kept if piece.relation else aliased(kept)
        if base in stored or isinstance(base, (RegionInput, ConstantValue)):
            continue
        if piece.relation and kept not in planner.home and kept not in planner.outputs:
            kept.strides = features_last(kept.shape)  # nothing else says how it lies
        planner.keep(kept, piece, reason, itself=written)
    if views in stored or isinstance(views, (RegionInput, ConstantValue)):
        return
    if (isinstance(views, Mapped) and instructions(views, planner.memory)) or not isinstance(
        views, (MovedView, PiecewiseIndex, Mapped)
    ):
        _weigh_visits(views, piece, visits(piece, side), planner.rates.late(piece), planner)


def _weigh_visits(piece: Piece, user: Piece, count: float, late: float, planner: Planner) -> None:
    if piece in planner.outputs:
        planner.keep(piece, user, STORED_ANYWAY, exact=True)
    else:
        _keep_if_cheaper(piece, user, count, 1, late, planner)


def _keep_if_cheaper(
    piece: Piece, user: Piece, count: float, kernels: int, late: float, planner: Planner
) -> None:
    """Store a value that would be evaluated ``count`` times by some kernels, each of which reads what it
    is made of, if it takes fewer microseconds that they read it. ``late``: what evaluating it takes
    beside."""
    rates, memory = planner.rates, planner.memory
    read = sum(x.bytes for x in sources(piece, memory))
    own = instructions(piece, memory) * like(piece.size)
    again = rates.worked(own * count) + rates.moved(read) * kernels + late
    once = rates.kernel(read + piece.bytes, own, None) + kernels * rates.moved(piece.bytes)
    if once < again:
        planner.keep(piece, user, STORED_DEARER.format(count, again, once), exact=True)
