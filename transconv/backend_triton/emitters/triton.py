"""The Triton emitter: from a lanewise kernel to the text of a readable Triton (``tl``) kernel.

Emission is one-to-one: there is no algebra here. A let becomes an assignment, a loop a ``for``, a
lane ``tl.arange``, a load ``tl.load`` with its mask, a dot ``tl.dot``. Expressions are
spelled in emitters/arithmetic.py; tiles that are loaded, reduced, and seen in another shape here. A tensor
is a parameter by its address, or by a descriptor of its boxes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from transconv import ir
from transconv.backend_triton.emitters.arithmetic import ATOM, LEVEL, POSTFIX, ArithmeticSpeller
from transconv.backend_triton.launch.bound_start import begun, imported


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor as a parameter. ``box``: the extents of a box where it is passed as a descriptor; None
    where it is passed as an address."""

    tensor: ir.Tensor
    box: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Its name in the text."""
        return self.tensor.name if self.box is None else box_name(self.tensor.name)

    def __str__(self) -> str:
        if self.box is None:
            return str(self.tensor)
        every = f" of every {list(self.tensor.every)}" if self.tensor.every else ""
        return f"{self.tensor} in boxes of {list(self.box)}{every}"


def parameters(kernel: ir.Kernel) -> tuple[Parameter, ...]:
    """A kernel's parameters, in order."""
    read: list[ir.BoxLoad | ir.BoxStore] = [*ir.find(kernel, ir.BoxLoad), *ir.find(kernel, ir.BoxStore)]
    copied: list[ir.Fetch | ir.Send] = [*ir.find(kernel, ir.Fetch), *ir.find(kernel, ir.Send)]
    boxes = {x.tensor: x.extents for x in read} | {x.tensor: x.piece.buffer.extents for x in copied}
    return tuple(Parameter(p, boxes.get(p)) for p in kernel.params)


ONE = ir.Lane("one", 1, 128)  # a dimension of one element, behind all others


def box_name(name: str) -> str:
    """The name in the text of a tensor's descriptor."""
    return f"{name}_box"


def is_counted(place: ir.Expr, lanes: Sequence[ir.Lane]) -> bool:
    """Whether a place along lanes is 0, 1, 2 and so on, from the first element to the last."""
    if ir.free_vars(place):
        return False
    shape = tuple(x.extent for x in lanes)
    found = ir.Evaluator(ir.Memory({}), {x: i for i, x in enumerate(lanes)}, len(shape)).compute(place)
    return bool((np.broadcast_to(found, shape).ravel() == np.arange(prod(shape))).all())


def is_lost(dtype: ir.DType, fill: float) -> bool:
    """Whether Triton 3.6 loads another number where a mask of several elements does not hold. It puts a
    constant of 8 or 16 bits several times into a word, extended with its sign: four of 128 become
    0xffffff80, which is 128 and three times 255. Numbers whose sign bit is 0 are right, and those of ones
    alone."""
    if dtype.kind != "int" or dtype.bits >= 32:
        return False
    ones = (1 << dtype.bits) - 1
    bits = int(fill) & ones
    return bits >> dtype.bits - 1 == 1 and bits != ones


def _times(x: ir.Const, value: float) -> ir.Const:
    """A sum or a product of equal constants, which wraps around."""
    return ir.Const(value if isinstance(value, float) else ir.wrapped(int(value), x.type), x.type)


class ExprSpeller(ArithmeticSpeller):
    """The speller of all expressions."""

    def spell_Reduce(self, e: ir.Reduce) -> tuple[str, int]:
        lanes = self.lanes(e.x)
        if e.lane not in lanes:  # nothing varies along the lane: the sum is a product
            if ir.REDUCERS[e.op].node is ir.Add and isinstance(e.x, ir.Const):
                return self.spell(self.typed(_times(e.x, e.x.value * e.lane.extent)))
            if ir.REDUCERS[e.op].node is ir.Add and e.dtype.kind == "int":
                times = ir.Const(ir.wrapped(e.lane.extent, e.dtype), e.dtype)
                return f"{self.fit(e.x, lanes, LEVEL[ir.Mul] + 1)} * {self.text(times)}", LEVEL[ir.Mul]
            if ir.REDUCERS[e.op].node is ir.Add:
                return f"{self.fit(e.x, lanes, LEVEL[ir.Mul] + 1)} * {e.lane.extent}", LEVEL[ir.Mul]
            if ir.REDUCERS[e.op].node is not ir.Mul:
                return self.fit(self.typed(e.x), lanes, POSTFIX), POSTFIX
            if isinstance(e.x, ir.Const):
                return self.spell(self.typed(_times(e.x, e.x.value**e.lane.extent)))
            every = tuple(sorted((*lanes, e.lane), key=lambda x: (x.axis, x.name)))
            return self.spell(ir.Reduce(e.op, ir.Spread(e.x, every), e.lane))
        text = self.text(self.not_a_dot(e.x, lanes))
        if ir.REDUCERS[e.op].helper:  # a function of the module's own
            return f"{self.space}.reduce({text}, {lanes.index(e.lane)}, {e.op}_of)", POSTFIX
        return f"{self.space}.{e.op}({text}, axis={lanes.index(e.lane)})", POSTFIX

    def not_a_dot(self, x: ir.Expr, lanes: tuple[ir.Lane, ...]) -> ir.Expr:
        """The same product, rows after columns: Triton (3.6) takes the sum of ``a[:, :, None] *
        b[None, :, :]`` for a matrix product in tf32, also where it is too short along K for the
        matrix unit, which then is wrong. It does not with the factors exchanged."""
        if isinstance(x, ir.Mul) and lanes[-1] not in self.lanes(x.a) and lanes[0] not in self.lanes(x.b):
            return ir.Mul(x.b, x.a)
        return x

    def spell_Running(self, e: ir.Running) -> tuple[str, int]:
        lanes = self.lanes(e)
        text, axis = (
            self.text(e.x if e.lane in self.lanes(e.x) else ir.Spread(e.x, lanes)),
            lanes.index(e.lane),
        )
        if not ir.REDUCERS[e.op].helper:
            return f"{self.space}.cum{e.op}({text}, axis={axis})", POSTFIX
        return f"{self.space}.associative_scan({text}, {axis}, {e.op}_of)", POSTFIX

    def spell_Gather(self, e: ir.Gather) -> tuple[str, int]:
        """The elements along one dimension, in which those that are looked through are joined."""
        own, result = self.lanes(e.x), self.lanes(e)
        known = [(lane, at) for lane, at in zip(e.lanes, e.places, strict=True) if lane in own]
        if len(known) < len(e.lanes):  # along the others nothing varies
            x = ir.Gather(e.x, *zip(*known, strict=True)) if known else e.x
            return self.spell(ir.Spread(x, result))
        kept = [x for x in own if x not in e.lanes]
        new = [x for x in result if x not in kept] or [ONE]
        first = len([x for x in own[: min(map(own.index, e.lanes))] if x in kept])
        before, after = kept[:first], kept[first:]
        place: ir.Expr = ir.ZERO
        for lane, at in known:
            place = at if place is ir.ZERO else place * lane.extent + at
        order = [*before, *new, *after]
        if prod(x.extent for x in new) == prod(x.extent for x in e.lanes) and is_counted(place, new):
            text = self.permuted(self.text(e.x), own, [*before, *e.lanes, *after])
            return self.permuted(self.reshaped(text, order, True), order, result), POSTFIX
        source = self.joined(self.text(e.x), own, before, e.lanes, after)
        every = tuple(sorted([*kept, *new], key=lambda x: (x.axis, x.name)))
        where = self.joined(self.text(ir.Spread(place, every)), every, before, new, after)
        made = f"{self.space}.gather({source}, {where}, {first})"
        if new == [ONE]:
            return f"{self.space}.sum({made}, axis={first}, dtype={self.type(e.dtype)})", POSTFIX
        made = self.reshaped(made, order, len(new) != 1)
        return self.permuted(made, order, result), POSTFIX

    def joined(
        self,
        text: str,
        own: Sequence[ir.Lane],
        before: Sequence[ir.Lane],
        joint: Sequence[ir.Lane],
        after: Sequence[ir.Lane],
    ) -> str:
        """A tile of lanes ``own`` with dimensions ``before``, one of those of ``joint``, and ``after``."""
        text = self.permuted(text, own, [*before, *joint, *after])
        whole = ir.Lane("", prod(x.extent for x in joint), 0)
        return self.reshaped(text, [*before, whole, *after], len(joint) != 1)

    def reshaped(self, text: str, lanes: Sequence[ir.Lane], changes: bool) -> str:
        shape = ", ".join(str(x.extent) for x in lanes)
        return f"{self.space}.reshape({text}, ({shape}))" if changes else text

    def permuted(self, text: str, own: Sequence[ir.Lane], lanes: Sequence[ir.Lane]) -> str:
        order = [[*own].index(x) for x in lanes]
        if order == sorted(order):
            return text
        return f"{self.space}.permute({text}, ({', '.join(map(str, order))}))"

    def spell_Spread(self, e: ir.Spread) -> tuple[str, int]:
        if self.lanes(e.x) == e.lanes:
            return self.spell(e.x)
        shape = ", ".join(str(x.extent) for x in e.lanes)
        if isinstance(e.x, ir.Const):  # a number of Python has no shape to broadcast
            return f"{self.space}.full(({shape}, ), {self.text(e.x)}, {self.type(e.dtype)})", POSTFIX
        return f"{self.space}.broadcast_to({self.fit(e.x, e.lanes)}, ({shape}))", POSTFIX

    def spell_Renamed(self, e: ir.Renamed) -> tuple[str, int]:
        """The same text, unless the new lanes come in another order."""
        before = self.lanes(e.x)
        order = [x for lane in self.lanes(e) for x in before if e.of(x) is lane]
        if order == [*before]:
            return self.spell(e.x)
        return self.permuted(self.text(e.x), before, order), POSTFIX

    def spell_Load(self, e: ir.Load) -> tuple[str, int]:
        if e.tensor.number:
            return e.tensor.name, ATOM
        lanes = self.lanes(e)
        address = self.address(e.tensor, e.offset, lanes)
        if e.mask is ir.TRUE:
            return f"{self.space}.load({address})", POSTFIX
        fill = e.fill if e.dtype.kind == "float" else int(e.fill)
        other = self.text(self.typed(ir.Const(fill, e.dtype)))
        mask = self.condition(e.mask, lanes)
        if lanes and is_lost(e.dtype, fill):
            loaded = f"{self.space}.load({address}, mask={mask}, other=0)"
            return f"{self.space}.where({mask}, {loaded}, {other})", POSTFIX
        return f"{self.space}.load({address}, mask={mask}, other={other})", POSTFIX

    def condition(self, mask: ir.Expr, lanes: tuple[ir.Lane, ...]) -> str:
        """A mask that is not always true. One that never is becomes a tensor, as Triton asks for."""
        if not isinstance(mask, ir.Const):
            return self.fit(mask, lanes)
        return f"{self.space}.full(({'1, ' * len(lanes)}), False, {self.space}.int1)"

    def spell_BoxLoad(self, e: ir.BoxLoad) -> tuple[str, int]:
        """A descriptor loads the box in the order of memory; it is permuted to the order of its lanes."""
        lanes, memory = self.lanes(e), self.memory_lanes(e)
        text = f"{box_name(e.tensor.name)}.load([{self.corner(e)}])"
        if len(e.extents) != len(memory):
            text += f".reshape({', '.join(str(x.extent) for x in memory)})"
        text += ".T" if list(lanes) != memory else ""
        return self.unboxed(text, e.tensor.dtype)

    @staticmethod
    def unboxed(text: str, of: ir.DType) -> tuple[str, int]:
        """What was moved in a box, as its own type."""
        return (text, POSTFIX) if of.boxed is of else (f"{text} != 0", LEVEL[ir.Ne])

    def memory_lanes(self, box: ir.BoxLoad | ir.BoxStore) -> list[ir.Lane]:
        return list(dict.fromkeys(x for w in box.within for x in self.lanes(w)))

    def corner(self, box: ir.BoxLoad | ir.BoxStore) -> str:
        return ", ".join(self.text(c) for c in box.corner)

    def address(self, tensor: ir.Tensor, offset: ir.Expr, lanes: tuple[ir.Lane, ...]) -> str:
        """``tensor + offset``, with every lane of ``lanes`` even if the offset does not vary along it."""
        own = self.lanes(offset)
        moved = isinstance(offset, ir.Sub) and isinstance(offset.b, ir.Const)  # a pointer minus a number
        level = LEVEL[ir.Add if moved or isinstance(offset, ir.Add) else ir.Mul]
        text = f"{tensor.name} + {self.fit(offset, lanes, level)}"
        if own != lanes:
            shape = ", ".join(str(x.extent) for x in lanes)
            text += f" + tl.zeros(({shape},), tl.int32)"
        return text


WIDTH = 100
SHORT = 24  # characters; shorter bracket contents stay on one line


class TlEmitter(ExprSpeller):
    """Spells the statements of one kernel, as lines."""

    def lines(self, s: ir.Stmt) -> list[str]:
        return list(getattr(self, f"lines_{type(s).__name__}")(s))

    def block(self, s: ir.Stmt) -> list[str]:
        return ["    " + line for line in self.lines(s)] or ["    pass"]

    def lines_Seq(self, s: ir.Seq) -> Iterator[str]:
        for before, part in zip((None, *s.stmts), s.stmts, strict=False):
            if isinstance(part, ir.For) or isinstance(before, ir.For):
                yield ""
            yield from self.lines(part)

    def lines_Let(self, s: ir.Let) -> list[str]:
        s = ir.Let(s.var, self.typed(s.value), s.origin)
        self.name(s)
        return [f"{s.var.name} = {self.text(s.value)}"]

    def lines_For(self, s: ir.For) -> list[str]:
        if s.programs:
            self.numbers.add(s.var)
            start = "tl.program_id(0)" if s.kind == "grid" else self.text(s.start)
            how = f", num_stages={s.stages}" if s.stages else ", flatten=True" * loads_something(s.body)
            dealt = f"{start}, {self.end(s)}, {s.programs}{how}"
            return [f"for {s.var.name} in tl.range({dealt}):", *self.block(s.body)]
        if s.kind == "grid":
            return [f"{s.var.name} = {self.space}.program_id(0)", *self.lines(s.body)]
        self.numbers.add(s.var)
        stages = f", num_stages={s.stages}" if s.stages else ""
        bounds = f"{self.text(s.start)}, {self.end(s)}"
        return [f"for {s.var.name} in tl.range({bounds}{stages}):", *self.block(s.body)]

    def end(self, s: ir.For) -> str:
        return str(s.stop) if s.until is None else self.text(s.until)

    def lines_If(self, s: ir.If) -> list[str]:
        out = [f"if {self.text(s.cond)}:", *self.block(s.then)]
        return out if s.other is None else [*out, "else:", *self.block(s.other)]

    def lines_Alloc(self, s: ir.Alloc) -> list[str]:
        self.scope[s.var] = s.lanes
        shape = "".join(f"{x.extent}, " for x in s.lanes).rstrip()
        shape = shape.removesuffix(",") if len(s.lanes) > 1 else shape
        return [f"{s.var.name} = tl.full(({shape}), {self.text(s.init)}, {self.type(s.var.type)})"]

    def lines_Update(self, s: ir.Update) -> list[str]:
        """A variable keeps its shape, also where simpler values have lost a lane: behind a branch or in a
        loop Triton refuses another."""
        lanes = self.scope[s.var]
        value = s.value if self.lanes(s.value) == lanes else ir.Spread(s.value, lanes)
        return [f"{s.var.name} = {self.fit(value, lanes)}"]

    def lines_Store(self, s: ir.Store) -> list[str]:
        return [f"{self.space}.store({self.write(s.tensor, s.offset, s.value, s.mask)})"]

    def write(self, tensor: ir.Tensor, offset: ir.Expr, value: ir.Expr, mask: ir.Expr) -> str:
        lanes = tuple(
            sorted(
                {*self.lanes(offset), *self.lanes(value), *self.lanes(mask)},
                key=lambda x: (x.axis, x.name),
            )
        )
        text = f"{self.address(tensor, offset, lanes)}, {self.fit(self.typed(value), lanes)}"
        return text if mask is ir.TRUE else f"{text}, mask={self.condition(mask, lanes)}"

    def lines_BoxStore(self, s: ir.BoxStore) -> list[str]:
        lanes, memory = self.lanes(s.value), self.memory_lanes(s)
        value = self.fit(s.value, lanes, POSTFIX)
        value += ".T" if list(lanes) != memory else ""
        if len(s.extents) != len(memory):
            value += f".reshape({', '.join(map(str, s.extents))})"
        return [f"{box_name(s.tensor.name)}.store([{self.corner(s)}], {value})"]

    def lines_FuncCall(self, s: ir.FuncCall) -> list[str]:
        return list(getattr(self, f"call_{s.func.name}")(s))

    def call_dot(self, s: ir.FuncCall) -> list[str]:
        acc, a, b = s.args
        assert isinstance(acc, ir.Var) and isinstance(a, ir.Expr) and isinstance(b, ir.Expr)
        self.products.add(acc)
        precision = f', input_precision="{s.func.attr("precision")}"' if a.dtype.memory is ir.f32 else ""
        precision += f", out_dtype={self.type(acc.dtype)}" if acc.dtype.kind == "int" else ""
        if a.dtype.is_short and b.dtype.is_short and s.func.attr("precision") == "ieee":
            steps = min(ir.EXACT_TERMS, *(x.extent for x in self.lanes(a) if x in self.lanes(b)))
            precision += f", max_num_imprecise_acc={steps}"
        return [f"{acc.name} = tl.dot({self.text(a)}, {self.text(b)}, {acc.name}{precision})"]

    def call_dot_scaled(self, s: ir.FuncCall) -> list[str]:
        acc, a, b, a_scale, b_scale = (self.text(e) for e in s.args if isinstance(e, ir.Expr))
        left, right = (f'"{s.func.attr(x).removeprefix("f8").removeprefix("f4")}"' for x in "ab")
        assert isinstance(s.args[0], ir.Var)
        self.products.add(s.args[0])
        right_scale = f"{self.space}.trans({b_scale})"  # Triton wants rows of scales on both sides
        return [f"{acc} = tl.dot_scaled({a}, {a_scale}, {left}, {b}, {right_scale}, {right}, {acc})"]

    def call_atomic_add(self, s: ir.FuncCall) -> list[str]:
        tensor, offset, value, mask = s.args
        assert isinstance(tensor, ir.Tensor) and isinstance(offset, ir.Expr)
        assert isinstance(value, ir.Expr) and isinstance(mask, ir.Expr)
        return [f'{self.space}.atomic_add({self.write(tensor, offset, value, mask)}, sem="relaxed")']

    def call_assume(self, s: ir.FuncCall) -> list[str]:
        assert isinstance(s.args[0], ir.Expr)
        return [f"{self.space}.assume({self.text(s.args[0])})"]

    def lines_Comment(self, s: ir.Comment) -> list[str]:
        return [f"# {line}" for line in s.text.splitlines()]


def emit(kernel: ir.Kernel, header: tuple[str, ...] = (), first: tuple[str, ...] = ()) -> str:
    """The text of a module with one ``@triton.jit`` function named like the kernel; ``first``: the
    first lines of its body."""
    lanes = [f"    {x.name} = tl.arange(0, {x.extent})" for x in spelled_lanes(kernel.body)]
    body = [*lanes, *multiples_said(kernel), *TlEmitter().block(kernel.body)]
    given = parameters(kernel)
    sizes = kernel.sizes.names if kernel.sizes else ()
    params = ", ".join([*(p.name for p in given), *sizes])
    about = [f"# {line}" for line in header]
    tensors = [f"    # {p}" for p in given]
    requires = [f"    # sizes {kernel.sizes}"] if sizes else []
    own = ir.helpers(
        {c.name for c in ir.find(kernel, ir.Call)},
        {c.type for c in ir.find(kernel, ir.Cast)},
        {*(r.op for r in ir.find(kernel, ir.Reduce)), *(r.op for r in ir.find(kernel, ir.Running))},
        "triton.jit",
        "tl",
    )
    lines = [
        *about,
        "",
        "import triton",
        "import triton.language as tl",
        *imported(first),
        "",
        *own,
        "",
        f"@triton.jit(do_not_specialize={[*sizes]})" if sizes else "@triton.jit",
        f"def {kernel.name}({params}):",
        *requires,
        *tensors,
        "",
        *begun(first),
        *folded(body),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def multiples_said(kernel: ir.Kernel, mentioned: Container[str] | None = None) -> list[str]:
    """Lines that say what sizes are multiples of. Triton knows nothing of an argument that it is not
    specialised on; with this it finds the addresses that begin at a multiple of 4 or 16 bytes.
    ``mentioned``: the names that matter, if not all."""
    known = kernel.sizes.multiples if kernel.sizes else {}
    return [
        f"    {name} = {name} // {share} * {share}  # it is a multiple"
        for name, share in known.items()
        if share > 1 and (mentioned is None or name in mentioned)
    ]


def spelled_lines(lets: Iterable[ir.Let], value: ir.Expr) -> list[str]:
    """The lines of a function's body that binds names of numbers and returns a value; ``{tl}`` stands for
    the language."""
    speller = TlEmitter()
    speller.space = "{tl}"
    return [*(line for s in lets for line in speller.lines(s)), f"return {speller.text(value)}"]


def loads_something(body: ir.Stmt) -> bool:
    """Whether any load has a mask that may hold. Triton 3.6 ends the process where it flattens a loop over
    tiles that reads nothing."""
    never = {ir.FALSE, *(s.var for s in ir.find(body, ir.Let) if s.value is ir.FALSE)}
    return any(not isinstance(x, ir.Load) or x.mask not in never for x in ir.find(body, ir.MemoryRead))


def folded(lines: list[str]) -> list[str]:
    """Break long lines: a call before its mask, else after the outermost comma that fits; the rest is
    aligned with its neighbours."""
    out: list[str] = []
    for line in lines:
        cut = line.find(", mask=")
        if line.lstrip().startswith("#"):
            out.append(line)
        elif len(line) > WIDTH and 0 < line.find("(") < cut:
            before = _filled(line[: cut + 1])
            out += [*before, " " * innermost(before) + line[cut + 2 :]]
        else:
            out += _filled(line)
    return out


def innermost(lines: list[str]) -> int:
    """The column at which the contents of the bracket begin that is opened last and not closed; 0 without
    one."""
    opened: list[int] = []
    for line in lines:
        for i, c in enumerate(line, 1):
            if c in "([":
                opened.append(i)
            elif c in ")]" and opened:
                opened.pop()
    return opened[-1] if opened else 0


def _filled(line: str, around: tuple[int, ...] = ()) -> list[str]:
    """A line in pieces, all but the last ending in a comma. ``around``: the columns at which the contents
    of the open brackets begin."""
    if len(line) <= WIDTH:
        return [line]
    opened = list(around)
    commas: list[tuple[int, int, tuple[int, ...]]] = []  # how deep, minus where, the brackets around
    for i, c in enumerate(line):
        if c in "([":
            opened.append(i + 1)
        elif c in ")]" and opened:
            begin = opened.pop()
            if i - begin < SHORT and line[begin - 1] in "([":
                commas = [x for x in commas if -x[1] < begin]
        elif c == "," and opened and i < WIDTH:
            commas.append((len(opened), -i, tuple(opened)))
    if not commas:
        return [line]
    _, at, around = min(commas)
    rest = " " * around[-1] + line[1 - at :].lstrip()
    return [line] if len(rest) >= len(line) else [line[: 1 - at], *_filled(rest, around)]


def spelled_lanes(root: ir.Stmt) -> list[ir.Lane]:
    """The lanes that the text mentions, in the order of a tile's dimensions; those inside a box are not
    spelled."""
    found: set[ir.Lane] = set()
    stack: list[ir.Node] = [root]
    while stack:
        at = stack.pop()
        if isinstance(at, ir.Lane):
            found.add(at)
        elif isinstance(at, (ir.BoxLoad, ir.BoxStore, ir.Fetch, ir.Send)):
            stack += [*at.corner, *([at.value] if isinstance(at, ir.BoxStore) else [])]
        elif isinstance(at, (ir.SlotTile, ir.Put)):
            stack += [at.value] if isinstance(at, ir.Put) else []
        elif isinstance(at, (ir.Alloc, ir.Spread, ir.Reduce, ir.Renamed, ir.Running, ir.Gather)):
            stack += [at.init if isinstance(at, ir.Alloc) else at.x]  # their lanes are shapes
            stack += at.places if isinstance(at, ir.Gather) else ()
        else:
            stack += at.children()
    return sorted(found, key=lambda x: (x.axis, x.name))
