"""The lowering of a Python function to a kernel of the IR for given arguments, its stages and its text.

Refused are kernels that read what they write, but for the same elements before it, as ``x = x + 1`` reads:
threads of a group would need a barrier between, and groups run in no order.

Reductions over few elements are written out, in a thread's registers, without exchange between threads:

    x = load(X, row*3 + col)                   x_0 = load(X, row*3);  x_1 = load(X, row*3 + 1);  ..
    d = x[row] - y[page]             ->        d_0 = x_0[row] - y_0[page];  ..
    s = sum(d * d, over=col)                   s = d_0*d_0 + d_1*d_1 + ..

Elements are added in their order, as a loop adds them, with one rounding for a product and its sum
(``fma(d_2, d_2, fma(d_1, d_1, d_0*d_0))``). Only what nothing else reads is divided, so that nothing is
computed twice; loads may be repeated where they are small beside what is computed of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from transconv import ir
from transconv.backend_triton import emit, function_name
from transconv.kernel.annotations import NOTHING, Group, Meant
from transconv.kernel.frontend.blocks import Blocks
from transconv.kernel.frontend.expressions import ExpressionEvaluator
from transconv.kernel.frontend.inlining import Calls
from transconv.kernel.frontend.reader import ArrayAccess, GroupScope
from transconv.kernel.frontend.statements import Statements
from transconv.kernel.launch.arguments import Arguments, Needed, Sizing, sizing
from transconv.kernel.launch.kernel_plan import LoweredKernel
from transconv.kernel.simulator.names import meaning_of
from transconv.kernel.source import FunctionSource, Refusal
from transconv.kernel.tiles.arrays import number_of, whole
from transconv.kernel.tiles.kernel_builder import Building, Chip
from transconv.kernel.tiles.values import Tile
from transconv.passes import finish, told_addresses
from transconv.simplify import facts_of, range_of, simplify
from transconv.support import KernelError
from transconv.target import Target

MOST_WARPS = 8
MOST_THREADS = 1024  # of a program
MOST_ELEMENTS = 1 << 20  # of a tile, in Triton
STAGES = 3  # iterations whose loads are in flight
PER_WARP = 512  # elements of the largest tile for each warp
OF_FUNCTIONS = 128  # the same where as many as MANY functions are computed of each
MANY = 5  # then registers for 16 elements of a thread leave room for half of the threads
OF_PRODUCT = 2048  # the same for accumulators of the matrix unit


def lowered(
    source: FunctionSource,
    group: Group,
    arguments: Arguments,
    target: Target,
    precision: str = "ieee",
    fixed: frozenset[int] = frozenset(),
    plain: frozenset[int] = frozenset(),
    meant: Meant = NOTHING,
) -> LoweredKernel:
    """The kernel of a function for arguments like those of a call. ``fixed``: the places of numbers that
    are constants; those that the kernel needs to know become so. ``plain``: of those whose divisors do not
    matter; ``meant``: what the kernel declares, for this call. Raises KernelError with the user's line."""
    numbers = arguments.numbers_with(group.work)
    said = {n.said: at for at, n in enumerate(numbers)}
    fixed |= {said[n] for n in meant.constants if n in said}
    while True:
        found = sizing(numbers, fixed, plain)
        try:
            names = {n: number_of(found.exprs[said[place]]) for n, place in meant.places.items()}
            written = traced(
                source, group, arguments.specs(found), Chip(target, precision), found, names | meant.tuned
            )
            check_order(written.accesses, arguments.alike)
            if not (more := found.places(found.divided - written.divided)):
                break
            plain |= more
        except Needed as needed:
            fixed |= found.places(needed.names)
        except KernelError:  # said again of the numbers, if they are not the reason
            if found.sizes is None:
                raise
            fixed = frozenset(range(len(numbers)))
    kernel = written_out(written.kernel)
    warps = group.warps_hint or _warps(kernel)
    _check_limits(source, kernel, warps, target)
    stages = finish(kernel, target)
    header = (
        f"kernel {source.name}, {source.file.rsplit('/', 1)[-1]}:{source.first + 1}",
        f"groups of {' x '.join(map(str, group.shape))}"
        if kernel.sizes
        else f"groups {' x '.join(map(str, group.groups))} of {' x '.join(map(str, group.shape))}",
        f"target {target.name}",
        *(f"size {told}" for told in found.told),
    )
    text = emit(stages[-1][1], header)
    return LoweredKernel(
        source.name,
        group,
        tuple(stages),
        text,
        written.numbers,
        warps,
        group.stages_hint or STAGES,
        found,
        fixed,
        plain,
    )


class Tracer(Statements, Calls, Blocks, ExpressionEvaluator):
    """Reads all of a kernel's source."""


@dataclass(frozen=True, slots=True)
class WrittenKernel:
    """A kernel as the source has it, the names of its run-time numbers, its accesses in order, the sizes
    whose divisors matter to it."""

    kernel: ir.Kernel
    numbers: tuple[str, ...]
    accesses: tuple[ArrayAccess, ...]
    divided: frozenset[str]


def traced(
    source: FunctionSource,
    group: Group,
    arguments: Mapping[str, Any],
    chip: Chip,
    numbers: Sizing,
    meant: Mapping[str, Any],
) -> WrittenKernel:
    """The kernel as the source has it. ``arguments``: a Tensor, a number, or an expression of sizes for
    each parameter but the group; ``meant``: the values of symbols and of tunable numbers."""
    # Numbers come behind arrays: the first argument of a launch has to have a device.
    tensors = {
        n: t
        for last in (False, True)
        for n, t in arguments.items()
        if isinstance(t, ir.Tensor) and t.number is last
    }
    b = Building((source.name, *tensors), numbers.sizes)
    for t in (t for t in tensors.values() if t.extents):
        b.divides(t.far)
    program = ir.Var(b.fresh("program"))
    work = numbers.exprs[len(numbers.exprs) - len(group.work) :]
    groups = tuple(simplify((n + (m - 1)) // m, b.facts) for n, m in zip(work, group.shape, strict=True))
    for n in (n for n, m in zip(work, group.shape, strict=True) if m > 1):
        b.divides(n)
    programs = simplify(prod(groups, start=ir.ONE), b.facts)
    b.facts = b.facts.with_range(program, 0, None).assume(program < ir.maximum(programs, 1))
    tracer = Tracer(b, source, chip, meant, meaning_of)
    first, *rest = source.parameters
    ids = _ids(b, program, groups)
    size = group.subgroup_size_hint or chip.target.warp_size
    tracer.here = GroupScope(
        group.shape, tuple(number_of(n) for n in work), tuple(Tile((), e) for e in ids), size
    )
    tracer.env[first] = tracer.here
    floats: list[str] = []
    for name in rest:
        given = arguments[name]
        if isinstance(given, ir.Tensor) and given.number:
            value = b.let(f"{name}_value", ir.Load(given, ir.ZERO, ir.TRUE))
            tracer.env[name] = Tile((), value)
            floats.append(name)
        elif isinstance(given, ir.Tensor):
            tracer.env[name] = whole(given)
        else:
            tracer.env[name] = number_of(given) if isinstance(given, ir.Expr) else given
    tracer.run(source.tree.body)
    many, most = (
        (None, group.count)
        if isinstance(programs, ir.Const)
        else (programs, range_of(programs, facts_of(numbers.sizes)).hi)
    )
    stop = ir.LARGEST_SIZE if most is None else min(ir.LARGEST_SIZE, max(1, int(most)))
    body = ir.For(program, stop, b.body(), "grid", until=many)
    kernel = ir.Kernel(
        function_name(source.name), tuple(tensors.values()), body, tuple(b.notes), _required(b, tensors)
    )
    return WrittenKernel(kernel, tuple(floats), tuple(tracer.accesses), frozenset(b.divided))


def _required(b: Building, tensors: Mapping[str, ir.Tensor]) -> ir.Sizes | None:
    """The sizes that are arguments with what the kernel requires of them: what branches depend on, and
    arrays that 32 bits count where those of the call are so."""
    if b.sizes is None:
        return None
    counts = [simplify(prod(t.extents, start=ir.ONE), b.facts) for t in tensors.values() if t.extents]
    fits = [n <= ir.LARGEST_SIZE for n in counts if ir.value_at(n, b.sizes.like) <= ir.LARGEST_SIZE]
    more = [c for c in (simplify(c, b.facts) for c in fits) if not isinstance(c, ir.Const)]
    return replace(b.sizes, where=(*b.decided, *dict.fromkeys(more)))


def _ids(b: Building, program: ir.Var, groups: tuple[ir.Expr, ...]) -> tuple[ir.Expr, ...]:
    """The place of a program among the groups, the last dimension fastest."""
    found: list[ir.Expr] = []
    for at, count in enumerate(groups):
        behind = simplify(prod(groups[at + 1 :], start=ir.ONE), b.facts)
        place: ir.Expr = program // behind if behind is not ir.ONE else program
        place = place if at == 0 else place % count
        place = simplify(place, b.facts)
        if not isinstance(place, (ir.Var, ir.Const)):
            place = b.let(f"id_{at}", place)
        if isinstance(place, ir.Var):
            b.facts = b.facts.with_range(place, 0, None).assume(place < ir.maximum(count, 1))
        found.append(place)
    return tuple(found)


def _check_limits(source: FunctionSource, kernel: ir.Kernel, warps: int, target: Target) -> None:
    """Raise KernelError for more threads than a program may have, and for a tile that Triton refuses."""
    if warps * target.warp_size > MOST_THREADS:
        raise KernelError(
            f"{source.name}: warps_hint={warps} are {warps * target.warp_size} threads on "
            f"{target.name}; expected up to {MOST_THREADS // target.warp_size} warps"
        )
    name, elements, dtype = _largest(kernel, stored=True)
    if elements > MOST_ELEMENTS:
        raise KernelError(
            f"{source.name}: the tile {name} has {elements} elements, {elements * dtype.bytes} bytes; "
            f"expected up to {MOST_ELEMENTS} elements: a smaller group, or a loop"
        )


def _largest(kernel: ir.Kernel, stored: bool = False) -> tuple[str, int, ir.DType]:
    """The largest tile: its name, elements, and their type. ``stored``: also what is stored without a
    name, such as zeros."""
    scope: dict[ir.Var, tuple[Any, ...]] = {}
    found: tuple[str, int, ir.DType] = "", 1, ir.f32
    for at in ir.walk(kernel):
        if isinstance(at, (ir.Alloc, ir.Let)):
            scope[at.var] = at.lanes if isinstance(at, ir.Alloc) else ir.lanes_of(at.value, scope)
            elements = prod(x.extent for x in scope[at.var])
            found = max(found, (at.var.name, elements, at.var.type), key=_second)
        elif isinstance(at, ir.Reduce):  # of a tile without a name, such as a broadcast
            elements = prod(x.extent for x in ir.lanes_of(at.x, scope))
            found = max(found, ("of a reduction", elements, at.dtype), key=_second)
        elif stored and isinstance(at, ir.Store):
            elements = prod(
                x.extent for x in {*ir.lanes_of(at.offset, scope), *ir.lanes_of(at.value, scope)}
            )
            found = max(found, (f"stored to {at.tensor.name}", elements, at.value.dtype), key=_second)
    return found


def _second(tile: tuple[str, int, ir.DType]) -> int:
    return tile[1]


def _warps(kernel: ir.Kernel) -> int:
    """The warps of a program, from its largest tile."""
    _, largest, _ = _largest(kernel)
    products = [s for s in ir.find(kernel, ir.FuncCall) if s.func.multiplies]
    functions = [
        e
        for e in ir.find(kernel, ir.Expr)
        if isinstance(e, ir.Div) or (isinstance(e, ir.Call) and e.name != "fma")
    ]
    per = OF_PRODUCT if products else OF_FUNCTIONS if len(functions) >= MANY else PER_WARP
    least = 4 if products else 1
    return max(least, min(MOST_WARPS, 1 << max(0, (largest // per).bit_length() - 1)))


def explained(made: LoweredKernel, meant: Meant, why: str, chip: Target) -> str:
    """The groups of a kernel, their shape and who chose it, warps, sizes that are arguments and what is
    required of them, masks that were proved away, addresses. ``why``: lines about who chose what was not
    hinted, if it was not the compiler."""
    group = made.group
    hinted = group.group_shape_hint is not None
    lines = [
        f"kernel     {made.name}",
        f"target     {chip.name}",
        f"work       {' x '.join(map(str, group.work))}",
        f"group      {' x '.join(map(str, group.shape))} ({'as hinted' if hinted else 'chosen'})",
        f"groups     {' x '.join(map(str, group.groups))} = {group.count} programs",
        f"sub-group  {group.subgroup_size_hint or chip.warp_size}"
        + (
            f" (as hinted; the chip's warps have {chip.warp_size})"
            if group.subgroup_size_hint not in (None, chip.warp_size)
            else " (the chip's)"
        ),
        f"warps      {made.warps}" + (" (as hinted)" if group.warps_hint else ""),
        f"stages     {made.num_stages}" + (" (as hinted)" if group.stages_hint else ""),
    ]
    lines += [f"tunable    {n} = {v}" for n, v in meant.tuned.items()]
    lines += [why] if why else []
    lines += [f"size       {told}" for told in made.sizing.told]
    sizes = made.kernel.sizes
    lines += [f"requires   {ir.text_of(c)}" for c in (sizes.where if sizes else ())]
    lines += [
        f"constant   {n.said} = {n.value}"
        for at, n in enumerate(made.sizing.numbers)
        if not made.sizing.is_argument(at)
    ]
    lines += [f"masks      {note}" for note in made.kernel.notes]
    return "\n".join([*lines, told_addresses(made.kernel)])


# -- the order of accesses -------------------------------------------------------------------------


def check_order(accesses: Sequence[ArrayAccess], alike: Mapping[str, str]) -> None:
    """Refuse a read behind a write of the same memory. ``alike``: for each name of an array the first name
    of the same memory. Raises KernelError at the line of the read."""
    written: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        if access.writes:
            written.setdefault(memory, access)
    seen: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        first = written.get(memory)
        if access.writes:
            seen.setdefault(memory, access)
        elif first is not None and (memory in seen or _again(access, first)):
            raise _refusal(access, first).at(access.place)
    for access in (a for a in accesses if not a.writes):
        for write in (w for w in accesses if w.writes):
            same = alike.get(access.array, access.array) == alike.get(write.array, write.array)
            if same and (access.offset is not write.offset or write.atomic):
                raise _elsewhere(access, write).at(access.place)


def _elsewhere(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    return Refusal(
        f"a read of other elements of {read.array} than line {write.place.line} writes, which "
        "another group or thread may have written before",
        "reads of the elements that are written, of the same shape; results in another array",
        "group.store(Y[i:], x)",
    )


def _again(read: ArrayAccess, write: ArrayAccess) -> bool:
    """Whether a loop brings a read back after a write."""
    return bool(set(read.loops) & set(write.loops))


def _refusal(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    other = "" if read.array == write.array else f", which shares memory with {write.array}"
    return Refusal(
        f"a read of {read.array}{other} after line {write.place.line} stores to it",
        "reads before the first store; keep the value under a name, or launch a second kernel",
        "y = x * 2.0; group.store(Y[i:], y); z = y + 1.0",
    )


MOST = 16  # elements of a reduction of a tile of three dimensions or more
MOST_OF_ROWS = 4  # of others, whose loads have the reduced dimension innermost and would be strided


def written_out(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with its short reductions written out where that computes nothing twice."""
    return _Short(kernel).made()


class _Unknown(Exception):
    """An element of a value that cannot be computed alone."""


class _Short:
    """The pass that writes reductions out. ``values``: of names, as they are written so far; ``scope``:
    their lanes; ``parts``: the names of single elements; ``made_of``: their definitions, to be placed
    behind that of the whole; ``gone``: names that nothing reads any more."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        self.values: dict[ir.Var, ir.Expr] = {}
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.readers: dict[ir.Var, set[ir.Var | None]] = {}
        self.changing = ir.updated(kernel.body)
        self.taken = {v.name for v in _bound(kernel)} | {t.name for t in kernel.params}
        self.parts: dict[tuple[ir.Var, ir.Lane, int], ir.Var] = {}
        self.made_of: dict[ir.Var, list[ir.Let]] = {}
        self.gone: set[ir.Var] = set()
        for at in ir.walk(kernel.body):
            if isinstance(at, ir.Alloc):
                self.scope[at.var] = at.lanes
            elif isinstance(at, ir.Let):
                self.scope[at.var] = ir.lanes_of(at.value, self.scope)
                self.values[at.var] = at.value
            if isinstance(at, ir.Stmt):
                reader = at.var if isinstance(at, ir.Let) else None
                for e in (c for c in at.children() if isinstance(c, ir.Expr)):
                    for v in ir.free_vars(e):
                        self.readers.setdefault(v, set()).add(reader)

    def made(self) -> ir.Kernel:
        for var, value in list(self.values.items()):
            if isinstance(value, ir.Reduce) and (found := self.sum_of(var, value)) is not None:
                self.values[var] = found
        if not self.made_of:
            return self.kernel
        elements = (let.value for made in self.made_of.values() for let in made)
        whole = {v for value in elements for v in ir.free_vars(value)}
        for var in reversed(self.made_of):  # what is read comes before what reads it
            if var not in whole and all(
                r is not None and (r in self.gone or var not in ir.free_vars(self.values[r]))
                for r in self.readers[var]
            ):
                self.gone.add(var)
        return _Placed(self).rebuilt(self.kernel)

    def sum_of(self, var: ir.Var, value: ir.Reduce) -> ir.Expr | None:
        """The elements, combined in their order; None if the reduction stays."""
        lanes = ir.lanes_of(value.x, self.scope)
        lane, most = value.lane, MOST if len(lanes) > 2 else MOST_OF_ROWS
        if lane.extent > most or len(lanes) < 2 or not self._alone(var, value.x, lane, len(lanes)):
            return None
        neutral = ir.REDUCERS[value.op].identity(value.dtype)
        made: ir.Expr | None = None
        for k in range(lane.extent):
            e = simplify(_LaneElement(self, lane, k).mutate(value.x))
            if e != neutral:
                made = e if made is None else self.combined(value.op, made, e)
        made = neutral if made is None else made
        return (
            made if ir.lanes_of(made, self.scope) == self.scope[var] else ir.Spread(made, self.scope[var])
        )

    def combined(self, op: str, made: ir.Expr, e: ir.Expr) -> ir.Expr:
        """One more element, combined with those before; a product that is summed is not rounded, and the
        factors of one that is inactive are 0."""
        match e:
            case ir.Mul() if op == "sum" and e.dtype is ir.f32:
                return ir.Call("fma", (e.a, e.b, made))
            case ir.Select(cond, ir.Mul(a, b), _) if op == "sum" and e.dtype is ir.f32:
                return ir.Call("fma", (*(ir.Select(cond, x, ir.Const(0.0, ir.f32)) for x in (a, b)), made))
        return ir.REDUCERS[op].node(made, e)

    def _alone(self, var: ir.Var, value: ir.Expr, lane: ir.Lane, rank: int) -> bool:
        """Whether the elements can be computed one by one, and nothing else reads what they are of."""
        try:
            needed = {v for v, _ in self._needed(value, lane)}
        except _Unknown:
            return False
        whole = {var, *needed}
        return bool(needed) and all(
            self.readers[v] <= whole or (isinstance(self.values[v], ir.Load) and len(self.scope[v]) < rank)
            for v in needed
        )

    def _needed(self, e: ir.Expr, lane: ir.Lane) -> Iterator[tuple[ir.Var, ir.Lane]]:
        """The names whose elements along a lane are needed. Raises _Unknown."""
        if lane not in ir.lanes_of(e, self.scope):
            return
        if isinstance(e, ir.Var):
            if e not in self.values or e in self.changing or ir.free_vars(self.values[e]) & self.changing:
                raise _Unknown
            yield e, lane
            yield from self._needed(self.values[e], lane)
        elif isinstance(e, (ir.Reduce, ir.Running, ir.Gather)):
            raise _Unknown
        else:
            inner = e.old[e.new.index(lane)] if isinstance(e, ir.Renamed) and lane in e.new else lane
            for c in e.children():
                if isinstance(c, ir.Expr) and not isinstance(c, ir.Lane):
                    yield from self._needed(c, inner)

    def part(self, var: ir.Var, lane: ir.Lane, k: int) -> ir.Expr:
        """The name of an element of a value along a lane."""
        found = self.parts.get((var, lane, k))
        if found is None:
            value = simplify(_LaneElement(self, lane, k).mutate(self.values[var]))
            if isinstance(value, ir.Const):
                return value
            name, number = f"{var.name}_{k}", 2
            while name in self.taken:
                name, number = f"{var.name}_{k}_{number}", number + 1
            self.taken.add(name)
            found = self.parts[var, lane, k] = ir.Var(name, value.dtype)
            self.scope[found] = ir.lanes_of(value, self.scope)
            self.made_of.setdefault(var, []).append(ir.Let(found, value))
        return found


class _LaneElement(ir.ExprMutator):
    """An expression at one place of a lane."""

    def __init__(self, short: _Short, lane: ir.Lane, k: int) -> None:
        super().__init__()
        self.short, self.lane, self.k = short, lane, k
        self.done[lane] = ir.Const(k)

    def mutate_Var(self, at: ir.Var) -> ir.Expr:
        lanes = self.short.scope.get(at, ())
        return self.short.part(at, self.lane, self.k) if self.lane in lanes else at

    def mutate_Select(self, at: ir.Select) -> ir.Expr:
        """Of an element that is inactive nothing is computed."""
        cond = simplify(self.mutate(at.cond))
        if isinstance(cond, ir.Const):
            chosen: ir.Expr = self.mutate(at.yes if cond.value else at.no)
            return chosen
        return ir.Select(cond, self.mutate(at.yes), self.mutate(at.no))

    def mutate_Renamed(self, at: ir.Renamed) -> ir.Expr:
        lane = at.old[at.new.index(self.lane)] if self.lane in at.new else self.lane
        if lane is self.lane and lane in at.old:  # this lane of the result is not that of what is inside
            return at
        x = (
            at.x
            if lane not in ir.lanes_of(at.x, self.short.scope)
            else (_LaneElement(self.short, lane, self.k).mutate(at.x))
        )
        there = ir.lanes_of(x, self.short.scope)
        kept = [(o, n) for o, n in zip(at.old, at.new, strict=True) if o in there]
        return ir.Renamed(x, *map(tuple, zip(*kept, strict=True))) if kept else x

    def mutate_Spread(self, at: ir.Spread) -> ir.Expr:
        lanes = tuple(lane for lane in at.lanes if lane != self.lane)
        x = self.mutate(at.x)
        return ir.Spread(x, lanes) if lanes else x


class _Placed(ir.ExprMutator):
    """New values of names, and elements behind what they are of."""

    def __init__(self, short: _Short) -> None:
        super().__init__()
        self.short = short

    def mutate_Let(self, at: ir.Let) -> ir.Stmt:
        made = self.short.made_of.get(at.var, ())
        if at.var in self.short.gone:
            return ir.seq(*made)
        return ir.seq(replace(at, value=self.short.values[at.var]), *made)


def _bound(root: ir.Node) -> Iterator[ir.Var]:
    return (n for n in ir.walk(root) if isinstance(n, ir.Var))
