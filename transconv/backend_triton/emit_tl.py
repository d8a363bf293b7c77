"""Stage 10. In: a lanewise kernel. Out: the text of a Triton (``tl``) kernel that a person can read.

Emission is one-to-one: there is no algebra here. A let becomes an assignment, a loop a ``for``, a
lane ``tl.arange``, a load ``tl.load`` with its mask, a dot ``tl.dot``. An operand that lacks some
lanes of its neighbour is given them as ``[:, None]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf, isnan

from transconv.ir import (
    TRUE,
    Add,
    Alloc,
    And,
    Binary,
    BoxLoad,
    BoxStore,
    Call,
    Cast,
    Comment,
    Const,
    Div,
    DType,
    Eq,
    Expr,
    Fetch,
    FloorDiv,
    For,
    FuncCall,
    If,
    Kernel,
    Lane,
    Le,
    Let,
    Load,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Ne,
    Neg,
    Node,
    Not,
    Or,
    Piece,
    Put,
    Reduce,
    Select,
    Send,
    Seq,
    Shl,
    Shr,
    Spread,
    Stmt,
    Store,
    Sub,
    Tensor,
    Update,
    Var,
    Xor,
    f32,
    find,
    lanes_of,
)

# Python's precedence, weakest first. `&` binds tighter than `<`, so comparisons get parentheses.
LEVEL = {Lt: 1, Le: 1, Eq: 1, Ne: 1, Or: 2, Xor: 3, And: 4, Shl: 5, Shr: 5, Add: 6, Sub: 6,
         Mul: 7, Div: 7, FloorDiv: 7, Mod: 7}
SIGN = {Lt: "<", Le: "<=", Eq: "==", Ne: "!=", Or: "|", Xor: "^", And: "&", Shl: "<<", Shr: ">>",
        Add: "+", Sub: "-", Mul: "*", Div: "/", FloorDiv: "//", Mod: "%"}
ATOM, POSTFIX, PREFIX = 10, 9, 8

CALLS = {"exp": "exp", "log": "log", "sqrt": "sqrt", "abs": "abs", "erf": "math.erf",
         "sigmoid": "sigmoid", "fma": "fma", "floor": "floor"}

WIDTH = 100


class TlEmitter:
    """Spells one kernel. ``scope`` holds the lanes of every variable in sight; ``space`` is the name
    that Triton's functions are found under."""

    space = "tl"

    def __init__(self) -> None:
        self.scope: dict[Var, tuple[Lane, ...]] = {}

    # ---- expressions: (text, precedence level), in the expression's own lanes ----

    def spell(self, e: Expr) -> tuple[str, int]:
        method = getattr(self, f"spell_{type(e).__name__}", None)
        if method is not None:
            return method(e)  # type: ignore[no-any-return]
        assert isinstance(e, Binary) and type(e) in LEVEL, f"no spelling for {type(e).__name__}"
        level, lanes = LEVEL[type(e)], self.lanes(e)
        left = self.fit(e.a, lanes, level + (1 if level == 1 else 0))
        right = self.fit(e.b, lanes, level + 1)
        return f"{left} {SIGN[type(e)]} {right}", level

    def lanes(self, e: Expr) -> tuple[Lane, ...]:
        return lanes_of(e, self.scope)

    def fit(self, e: Expr, lanes: tuple[Lane, ...], level: int = 0) -> str:
        """The text of ``e`` where dimensions are ``lanes``, in parentheses if it binds weaker."""
        own = self.lanes(e)
        text, strength = self.spell(e)
        if own and own != lanes:
            if strength < POSTFIX:
                text = f"({text})"
            index = ", ".join(":" if x in own else "None" for x in lanes)
            return f"{text}[{index}]"
        return f"({text})" if strength < level else text

    def text(self, e: Expr) -> str:
        return self.spell(e)[0]

    def spell_Const(self, e: Const) -> tuple[str, int]:
        if isinstance(e.value, float) and (isinf(e.value) or isnan(e.value)):
            return f'float("{e.value}")', ATOM
        negative = not isinstance(e.value, bool) and e.value < 0
        return repr(e.value), PREFIX if negative else ATOM

    def type(self, t: DType) -> str:
        return f"{self.space}.{t.triton}"

    def spell_Var(self, e: Var) -> tuple[str, int]:
        return e.name, ATOM

    def spell_Lane(self, e: Lane) -> tuple[str, int]:
        return e.name, ATOM

    def spell_Neg(self, e: Neg) -> tuple[str, int]:
        return f"-{self.fit(e.x, self.lanes(e), PREFIX)}", PREFIX

    def spell_Not(self, e: Not) -> tuple[str, int]:
        return f"~{self.fit(e.x, self.lanes(e), PREFIX)}", PREFIX

    def spell_Min(self, e: Min) -> tuple[str, int]:
        return self.extremum("minimum", e)

    def spell_Max(self, e: Max) -> tuple[str, int]:
        return self.extremum("maximum", e)

    def extremum(self, name: str, e: Min | Max) -> tuple[str, int]:
        """A NaN operand makes the result NaN, as in torch; Triton wants that asked for."""
        text, level = self.function(name, (e.a, e.b), e)
        if e.dtype.kind == "float":
            text = f"{text[:-1]}, propagate_nan=tl.PropagateNan.ALL)"
        return text, level

    def spell_Select(self, e: Select) -> tuple[str, int]:
        return self.function("where", (e.cond, e.yes, e.no), e)

    def spell_Call(self, e: Call) -> tuple[str, int]:
        return self.function(CALLS[e.name], e.args, e)

    def spell_Cast(self, e: Cast) -> tuple[str, int]:
        if isinstance(e.x, Const):
            return f"{self.space}.full((), {e.x.value!r}, {self.type(e.type)})", ATOM
        return f"{self.fit(e.x, self.lanes(e), POSTFIX)}.to({self.type(e.type)})", POSTFIX

    def spell_Reduce(self, e: Reduce) -> tuple[str, int]:
        lanes = self.lanes(e.x)
        if e.lane not in lanes:  # nothing varies along the lane: the sum is a product
            return f"{self.fit(e.x, lanes, 8)} * {e.lane.extent}", 7
        text = self.text(self.not_a_dot(e.x, lanes))
        return f"{self.space}.{e.op}({text}, axis={lanes.index(e.lane)})", POSTFIX

    def not_a_dot(self, x: Expr, lanes: tuple[Lane, ...]) -> Expr:
        """The same product, rows after columns: Triton (3.6) takes the sum of ``a[:, :, None] *
        b[None, :, :]`` for a matrix product in tf32, also where it is too short along K for the
        matrix unit, which then is wrong; the factors the other way round it leaves alone."""
        if isinstance(x, Mul) and lanes[-1] not in self.lanes(x.a) and lanes[0] not in self.lanes(x.b):
            return Mul(x.b, x.a)
        return x

    def spell_Spread(self, e: Spread) -> tuple[str, int]:
        if self.lanes(e.x) == e.lanes:
            return self.spell(e.x)
        shape = ", ".join(str(x.extent) for x in e.lanes)
        return f"{self.space}.broadcast_to({self.fit(e.x, e.lanes)}, ({shape}))", POSTFIX

    def spell_Load(self, e: Load) -> tuple[str, int]:
        lanes = self.lanes(e)
        address = self.address(e.tensor, e.offset, lanes)
        if e.mask is TRUE:
            return f"{self.space}.load({address})", POSTFIX
        other = "0.0" if e.dtype.kind == "float" else "0"
        return f"{self.space}.load({address}, mask={self.fit(e.mask, lanes)}, other={other})", POSTFIX

    def spell_BoxLoad(self, e: BoxLoad) -> tuple[str, int]:
        """The descriptor gives the box in the order of memory; its lanes are put in their order."""
        lanes, memory = self.lanes(e), self.memory_lanes(e)
        text = f"{e.tensor.name}_box.load([{self.corner(e)}])"
        if len(e.extents) != len(memory):
            text += f".reshape({', '.join(str(x.extent) for x in memory)})"
        return text + (".T" if list(lanes) != memory else ""), POSTFIX

    def memory_lanes(self, box: BoxLoad | BoxStore) -> list[Lane]:
        return list(dict.fromkeys(x for w in box.within for x in self.lanes(w)))

    def corner(self, box: BoxLoad | BoxStore) -> str:
        return ", ".join(self.text(c) for c in box.corner)

    def function(self, name: str, args: tuple[Expr, ...], e: Expr) -> tuple[str, int]:
        lanes = self.lanes(e)
        return f"{self.space}.{name}({', '.join(self.fit(a, lanes) for a in args)})", POSTFIX

    def address(self, tensor: Tensor, offset: Expr, lanes: tuple[Lane, ...]) -> str:
        """``tensor + offset``, with every lane of ``lanes`` even if the offset does not vary along it."""
        own = self.lanes(offset)
        text = f"{tensor.name} + {self.fit(offset, lanes, 7 if not isinstance(offset, Add) else 6)}"
        if own != lanes:
            shape = ", ".join(str(x.extent) for x in lanes)
            text += f" + tl.zeros(({shape},), tl.int32)"
        return text

    # ---- statements: lines ----

    def lines(self, s: Stmt) -> list[str]:
        return list(getattr(self, f"lines_{type(s).__name__}")(s))

    def block(self, s: Stmt) -> list[str]:
        return ["    " + line for line in self.lines(s)] or ["    pass"]

    def lines_Seq(self, s: Seq) -> Iterator[str]:
        for before, part in zip((None, *s.stmts), s.stmts, strict=False):
            if isinstance(part, For) or isinstance(before, For):
                yield ""
            yield from self.lines(part)

    def lines_Let(self, s: Let) -> list[str]:
        self.scope[s.var] = self.lanes(s.value)
        return [f"{s.var.name} = {self.text(s.value)}"]

    def lines_For(self, s: For) -> list[str]:
        if s.programs:
            dealt = f"tl.program_id(0), {s.stop}, {s.programs}, flatten=True"
            return [f"for {s.var.name} in tl.range({dealt}):", *self.block(s.body)]
        if s.kind == "grid":
            return [f"{s.var.name} = {self.space}.program_id(0)", *self.lines(s.body)]
        stages = f", num_stages={s.stages}" if s.stages else ""
        return [f"for {s.var.name} in tl.range(0, {s.stop}{stages}):", *self.block(s.body)]

    def lines_If(self, s: If) -> list[str]:
        out = [f"if {self.text(s.cond)}:", *self.block(s.then)]
        return out if s.other is None else [*out, "else:", *self.block(s.other)]

    def lines_Alloc(self, s: Alloc) -> list[str]:
        self.scope[s.var] = s.lanes
        shape = "".join(f"{x.extent}, " for x in s.lanes).rstrip()
        shape = shape.removesuffix(",") if len(s.lanes) > 1 else shape
        return [f"{s.var.name} = tl.full(({shape}), {self.text(s.init)}, {self.type(s.var.type)})"]

    def lines_Update(self, s: Update) -> list[str]:
        return [f"{s.var.name} = {self.fit(s.value, self.scope[s.var])}"]

    def lines_Store(self, s: Store) -> list[str]:
        return [f"{self.space}.store({self.write(s.tensor, s.offset, s.value, s.mask)})"]

    def write(self, tensor: Tensor, offset: Expr, value: Expr, mask: Expr) -> str:
        lanes = tuple(sorted({*self.lanes(offset), *self.lanes(value), *self.lanes(mask)},
                             key=lambda x: (x.axis, x.name)))
        text = f"{self.address(tensor, offset, lanes)}, {self.fit(value, lanes)}"
        return text if mask is TRUE else f"{text}, mask={self.fit(mask, lanes)}"

    def lines_BoxStore(self, s: BoxStore) -> list[str]:
        lanes, memory = self.lanes(s.value), self.memory_lanes(s)
        value = self.fit(s.value, lanes, POSTFIX)
        value += ".T" if list(lanes) != memory else ""
        if len(s.extents) != len(memory):
            value += f".reshape({', '.join(map(str, s.extents))})"
        return [f"{s.tensor.name}_box.store([{self.corner(s)}], {value})"]

    def lines_FuncCall(self, s: FuncCall) -> list[str]:
        return list(getattr(self, f"call_{s.func.name}")(s))

    def call_dot(self, s: FuncCall) -> list[str]:
        acc, a, b = s.args
        assert isinstance(acc, Var) and isinstance(a, Expr) and isinstance(b, Expr)
        precision = f', input_precision="{s.func.attr("precision")}"' if a.dtype is f32 else ""
        return [f"{acc.name} = tl.dot({self.text(a)}, {self.text(b)}, {acc.name}{precision})"]

    def call_atomic_add(self, s: FuncCall) -> list[str]:
        tensor, offset, value, mask = s.args
        assert isinstance(tensor, Tensor) and isinstance(offset, Expr)
        assert isinstance(value, Expr) and isinstance(mask, Expr)
        return [f'{self.space}.atomic_add({self.write(tensor, offset, value, mask)}, sem="relaxed")']

    def call_assume(self, s: FuncCall) -> list[str]:
        assert isinstance(s.args[0], Expr)
        return [f"{self.space}.assume({self.text(s.args[0])})"]

    def lines_Comment(self, s: Comment) -> list[str]:
        return [f"# {line}" for line in s.text.splitlines()]


def emit(kernel: Kernel, header: tuple[str, ...] = ()) -> str:
    """The text of a module with one ``@triton.jit`` function named like the kernel."""
    lanes = [f"    {x.name} = tl.arange(0, {x.extent})" for x in spelled_lanes(kernel.body)]
    body = [*lanes, *TlEmitter().block(kernel.body)]
    boxed = boxes(kernel)
    params = ", ".join(f"{p.name}_box" if p.name in boxed else p.name for p in kernel.params)
    about = [f"# {line}" for line in (*header, *kernel.notes)]
    tensors = [f"    # {p}" + (f" in boxes of {list(boxed[p.name])}" if p.name in boxed else "")
               for p in kernel.params]
    lines = [*about, "", "import triton", "import triton.language as tl", "", "",
             "@triton.jit", f"def {kernel.name}({params}):", *tensors, "",
             *folded(body)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def folded(lines: list[str]) -> list[str]:
    """Break a long call before its keyword arguments, aligned with its first argument."""
    out: list[str] = []
    for line in lines:
        opening = line.find("(") + 1
        cut = line.find(", mask=")
        if len(line) > WIDTH and 0 < opening < cut:
            out += [line[:cut + 1], " " * opening + line[cut + 2:]]
        else:
            out.append(line)
    return out


def spelled_lanes(root: Stmt) -> list[Lane]:
    """The lanes that the text mentions, in the order of a tile's dimensions; what lies within a box
    is not spelled."""
    found: set[Lane] = set()
    stack: list[Node] = [root]
    while stack:
        at = stack.pop()
        if isinstance(at, Lane):
            found.add(at)
        elif isinstance(at, (BoxLoad, BoxStore, Fetch, Send)):
            stack += [*at.corner, *([at.value] if isinstance(at, BoxStore) else [])]
        elif isinstance(at, (Piece, Put)):
            stack += [at.value] if isinstance(at, Put) else []
        elif isinstance(at, (Alloc, Spread, Reduce)):  # their lanes are shapes
            stack += [at.init if isinstance(at, Alloc) else at.x]
        else:
            stack += at.children()
    return sorted(found, key=lambda x: (x.axis, x.name))


def boxes(kernel: Kernel) -> dict[str, tuple[int, ...]]:
    """The tensors that are moved in boxes, and the extents of the box of each."""
    found: list[BoxLoad | BoxStore] = [*find(kernel, BoxLoad), *find(kernel, BoxStore)]
    return {x.tensor.name: x.extents for x in found}
