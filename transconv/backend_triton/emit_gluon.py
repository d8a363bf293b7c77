"""Stage 10, the explicit spelling. In: a kernel with roles. Out: the text of a Gluon kernel.

Gluon is Triton's dialect in which shared memory, barriers and layouts are named. Each role becomes a
function; the kernel itself reserves the rings and starts the roles. As in ``emit_tl`` there is no
algebra here. Names that differ between Triton's versions are looked up once, above the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from transconv.backend_triton.early import begun, imported
from transconv.backend_triton.emit_expr import ATOM, POSTFIX
from transconv.backend_triton.emit_tl import TlEmitter, folded, spelled_lanes
from transconv.backend_triton.versions import looked_up
from transconv.ir import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    Const,
    Expr,
    Fetch,
    For,
    FuncCall,
    Kernel,
    Lane,
    Node,
    Piece,
    Put,
    Role,
    Roles,
    Send,
    Shared,
    Tensor,
    Var,
    find,
)

IMPORTS = '''
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
'''
DOT_BITS = 256  # of an operand's row that one instruction takes along K
WARPGROUP = 4  # warps that multiply together, 64 rows at a time
PIECES = "pieces"  # what a pile of boxes is called when it is seen as one operand


class GluonEmitter(TlEmitter):
    """Spells one role. ``sides`` are the lanes of a tile's two dimensions, ``warps`` those of the role,
    ``wide`` the most columns that one of its products has."""

    space = "gl"

    def __init__(self, sides: tuple[Lane, ...], warps: int, wide: int) -> None:
        super().__init__()
        self.sides, self.warps, self.wide = sides, warps, wide

    def spell_Call(self, e: Call) -> tuple[str, int]:
        match e.name:
            case "sigmoid":
                (x,) = e.args
                return f"1.0 / (1.0 + gl.exp(-{self.fit(x, self.lanes(e), POSTFIX)}))", 7
            case "erf":
                return self.function("erf", e.args, e)
        return super().spell_Call(e)

    def spell_Const(self, e: Const) -> tuple[str, int]:
        return (str(e.value), ATOM) if isinstance(e.value, bool) else super().spell_Const(e)

    def spell_Piece(self, e: Piece) -> tuple[str, int]:
        """A slot as a matrix: its dimensions in memory are folded, and turned round if need be."""
        lanes = self.lanes(e)
        memory = list(dict.fromkeys(x for w in e.within for x in self.lanes(w)))
        shape = ", ".join(str(x.extent) for x in memory)
        slot = self.text(e.slot)
        if e.buffer.members > 1:
            text = f"{e.buffer.name}_{PIECES}.index({slot})"
        else:
            text = f"{e.buffer.name}.index({slot})"
            if len(e.buffer.extents) != len(memory):
                text += f".reshape([{shape}])"
        return text + (".permute([1, 0])" if list(lanes) != memory else ""), POSTFIX

    def address(self, tensor: Tensor, offset: Expr, lanes: tuple[Lane, ...]) -> str:
        assert self.lanes(offset) == lanes, "an address in an explicit kernel varies along its lanes"
        return f"{tensor.name} + {self.fit(offset, lanes, 6)}"

    def lines_For(self, s: For) -> list[str]:
        if s.kind == "dealt":
            dealt = f"{self.text(s.start)}, {s.stop}, {s.programs}"
            return [f"for {s.var.name} in range({dealt}):", *self.block(s.body)]
        stop = s.stop if s.until is None else self.text(s.until)
        return [f"for {s.var.name} in range({stop}):", *self.block(s.body)]

    def lines_Alloc(self, s: Alloc) -> list[str]:
        self.scope[s.var] = s.lanes
        if not s.lanes:
            return [f"{s.var.name} = {self.text(s.init)}"]
        shape = ", ".join(str(x.extent) for x in s.lanes)
        return [f"{s.var.name} = gl.full([{shape}], {self.text(s.init)}, {self.type(s.var.type)}, sums)"]

    def lines_Fetch(self, s: Fetch) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        place = self.text(s.piece.slot)
        if s.piece.buffer.members > 1:
            place = f"{place} * {s.piece.buffer.members} + {self.text(s.piece.member)}"
        barrier = f"{s.barrier.name}.index({self.text(s.slot)})"
        return [f"fetch_box({s.tensor.name}_box, [{corner}], {barrier}, "
                f"{s.piece.buffer.name}.index({place}))"]

    def lines_Put(self, s: Put) -> list[str]:
        lanes = self.lanes(s.value)
        memory = list(dict.fromkeys(x for w in s.piece.within for x in self.lanes(w)))
        text = f"{s.piece.buffer.name}.index({self.text(s.piece.slot)})"
        if len(s.piece.buffer.extents) != len(memory):
            text += f".reshape([{', '.join(str(x.extent) for x in memory)}])"
        text += ".permute([1, 0])" if list(lanes) != memory else ""
        value = self.fit(s.value, lanes)
        if isinstance(s.value, Piece):
            along = lanes.index(next(x for x in lanes if x is s.piece.within[-1]))
            value += f".load({turning_layout(lanes, along, self.warps)})"
        return [f"{text}.store({value})"]

    def lines_Send(self, s: Send) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        piece = f"{s.piece.buffer.name}.index({self.text(s.piece.slot)})"
        return [f"send_box({s.tensor.name}_box, [{corner}], {piece})"]

    def call_wait(self, s: FuncCall) -> list[str]:
        barrier, _, phase = s.args
        return [f"mbarrier.wait({self.gate(s)}, {self.argument(phase)})"]

    def call_expect(self, s: FuncCall) -> list[str]:
        return [f"mbarrier.expect({self.gate(s)}, {self.argument(s.args[2])})"]

    def call_arrive(self, s: FuncCall) -> list[str]:
        when = self.argument(s.args[2])
        return [f"mbarrier.arrive({self.gate(s)}, count=1" + ("" if when == "True" else f", pred={when}")
                + ")"]

    def gate(self, s: FuncCall) -> str:
        barrier = s.args[0]
        assert isinstance(barrier, Barrier)
        return f"{barrier.name}.index({self.argument(s.args[1])})"

    def argument(self, arg: Node) -> str:
        assert isinstance(arg, Expr)
        return self.text(arg)

    def call_dot_async(self, s: FuncCall) -> list[str]:
        acc, a, b = s.args
        assert isinstance(acc, Var)
        return [f"{acc.name} = hopper.warpgroup_mma({self.argument(a)}, {self.argument(b)}, "
                f"{acc.name}, is_async=True)"]

    def call_dot_wait(self, s: FuncCall) -> list[str]:
        return [f"acc = hopper.warpgroup_mma_wait({self.argument(s.args[0])}, deps=[acc])"]

    def call_fence(self, s: FuncCall) -> list[str]:
        return ["hopper.fence_async_shared()"]

    def call_send_wait(self, s: FuncCall) -> list[str]:
        return [f"tma.store_wait({self.argument(s.args[0])})"]

    # ---- a role as a function ----

    def role(self, role: Role, params: list[str], program: Var) -> list[str]:
        sums: list[str] = []
        if any(a.lanes for a in find(role, Alloc)):
            used = spelled_lanes(role.body)
            (bits,) = {a.dtype.bits for s in find(role, FuncCall) for a in s.args
                       if isinstance(a, Piece)}
            sums = [f"sums: gl.constexpr = {sums_layout(self.sides, role.warps, bits, self.wide)}",
                    *(f"{x.name} = gl.arange(0, {x.extent}, gl.SliceLayout({1 - at}, sums))"
                      for at, x in enumerate(self.sides) if x in used)]
        return ["@gluon.jit", f"def {role.name}({', '.join(params)}):", *(f"    {x}" for x in sums),
                f"    {program.name} = gl.program_id(0)", *self.block(role.body)]


def sums_layout(sides: tuple[Lane, ...], warps: int, bits: int, wide: int) -> str:
    """How the tile of a product lies in registers: groups of four warps take 64 rows each, and
    share the columns when there are more groups than rows for them."""
    left, right = (x.extent for x in sides)
    down = min(warps // WARPGROUP, left // 64) * WARPGROUP
    across = warps // down
    return (f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[{down}, {across}], "
            f"instr_shape=[16, {min(right // across, wide)}, {DOT_BITS // bits}])")


def widest_product(roles: Roles) -> int:
    """The most columns of one instruction: 256, whose sums are 128 registers of a thread. A program of
    more than 12 warps (three groups) starts with 128 each, which ptxas refuses to fill with them."""
    groups = sum(-(-r.warps // WARPGROUP) for r in roles.roles)
    return 256 if groups <= 3 else 128


def turning_layout(lanes: tuple[Lane, ...], along: int, warps: int) -> str:
    """How a tile that is turned lies in registers: every thread has one row of what is written,
    which lies along dimension ``along``, and its neighbours are neighbours in what is read. Short
    tiles are dealt out along the rows too."""
    rows, length = lanes[1 - along].extent, lanes[along].extent
    threads, groups = min(rows, 32), min(warps, max(1, rows // 32))
    own = max(1, length * threads * groups // (32 * warps))
    sizes = [(own, 1), (32 // threads, threads), (warps // groups, groups)]
    spelled = ", ".join(str([x, y] if along == 0 else [y, x]) for x, y in sizes)
    return f"gl.BlockedLayout({spelled}, {[along, 1 - along]})"


def emit(kernel: Kernel, header: tuple[str, ...] = (), first: tuple[str, ...] = ()) -> str:
    """The text of a module with one ``@gluon.jit`` function named like the kernel, and one per role."""
    (roles,) = find(kernel, Roles)
    grid = kernel.body
    assert isinstance(grid, For)
    shared = [s.what for s in find(kernel, Shared)]
    boxed = boxes(kernel)
    params = [f"{p.name}_box" if p.name in boxed else p.name for p in kernel.params]
    sides = next((a.lanes for a in find(kernel, Alloc) if len(a.lanes) == 2), ())
    wide = widest_product(roles)
    functions: list[str] = []
    calls = []
    for role in roles.roles:
        own = [*(p for p, t in zip(params, kernel.params, strict=True) if _mentions(role, t)),
               *_rings(role, shared)]
        functions += [*GluonEmitter(sides, role.warps, wide).role(role, own, grid.var), "", ""]
        calls.append(f"({role.name}, ({', '.join(own)},))")
    workers = roles.roles[1:]
    reserved = list(_reserve(shared, kernel))
    lines = [*(f"# {line}" for line in header), *IMPORTS.splitlines(),
             *imported(first), "", *looked_up([*functions, *reserved]), "", "",
             *functions, "@gluon.jit", f"def {kernel.name}({', '.join(params)}):",
             *(f"    # {p}" + (f" in boxes of {list(boxed[p.name])}" if p.name in boxed else "")
               for p in kernel.params), "", *reserved, *begun(first), "",
             f"    gl.warp_specialize([{calls[0]},",
             *(f"                        {c}," for c in calls[1:-1]),
             f"                        {calls[-1]}],",
             f"                       {[r.warps for r in workers]}, {[r.registers for r in workers]})"]
    return "\n".join(line.rstrip() for line in folded(lines)) + "\n"


def _mentions(role: Role, tensor: Tensor) -> bool:
    return tensor in find(role, Tensor)


def _rings(role: Role, shared: list[Buffer | Barrier]) -> Iterator[str]:
    used = {*find(role, Buffer), *find(role, Barrier)}
    read = {a.buffer for s in find(role, FuncCall) for a in s.args if isinstance(a, Piece)}
    read |= {s.value.buffer for s in find(role, Put) if isinstance(s.value, Piece)}
    for what in shared:
        if what in used:
            piled = isinstance(what, Buffer) and what.members > 1 and what in read
            yield f"{what.name}_{PIECES}" if piled else what.name


def _reserve(shared: list[Buffer | Barrier], kernel: Kernel) -> Iterator[str]:
    copies: list[Fetch | Send] = [*find(kernel, Fetch), *find(kernel, Send)]
    boxed = {x.piece.buffer: f"{x.tensor.name}_box" for x in copies}
    for what in shared:
        if isinstance(what, Barrier):
            yield (f"    {what.name} = gl.allocate_shared_memory(gl.int64, [{what.slots}, 1], "
                   "mbarrier.MBarrierLayout())")
            continue
        box = boxed.get(what)
        if box is None:
            yield from _turned(what, next(iter(boxed.values())))
            continue
        shape = ", ".join(map(str, (what.slots * what.members, *what.extents)))
        yield f"    {what.name} = gl.allocate_shared_memory({box}.dtype, [{shape}], {box}.layout)"
        if what.members > 1:
            yield from _pile(what, box)
    barriers = [b for b in shared if isinstance(b, Barrier)]
    for slots in dict.fromkeys(b.slots for b in barriers):
        alike = [b for b in barriers if b.slots == slots]
        if slots == 1:
            yield from (f"    mbarrier.init({b.name}.index(0), count={b.arrivals})" for b in alike)
            continue
        yield f"    for slot in gl.static_range({slots}):"
        for b in alike:
            yield f"        mbarrier.init({b.name}.index(slot), count={b.arrivals})"


def _turned(what: Buffer, box: str) -> Iterator[str]:
    """A ring that no box lands in: it lies as the matrix unit likes it."""
    shape = ", ".join(map(str, (what.slots, *what.extents)))
    yield (f"    {what.name} = gl.allocate_shared_memory({box}.dtype, [{shape}], "
           f"{shared_layout(what)})")


def shared_layout(what: Buffer) -> str:
    """Rows of up to 128 bytes, swizzled so that they can be read across."""
    swizzle = min(128, what.extents[-1] * what.type.bytes)
    return (f"gl.NVMMASharedLayout(swizzle_byte_width={swizzle}, "
            f"element_bitwidth={what.type.bits}, rank=2)")


def _pile(what: Buffer, box: str) -> Iterator[str]:
    """Boxes side by side are one wide operand: 64 channels of all rows, then the next 64."""
    rows = prod(what.extents[:-1]) * what.below
    columns = what.extents[-1] * what.members // what.below
    yield (f"    {what.name}_{PIECES} = pile({what.name}, {box}.dtype, "
           f"[{what.slots}, {rows}, {columns}],")
    yield f"        {shared_layout(what)})"


def boxes(kernel: Kernel) -> dict[str, tuple[int, ...]]:
    """The tensors that are moved in boxes, and the extents of the box of each."""
    copies: list[Fetch | Send] = [*find(kernel, Fetch), *find(kernel, Send)]
    return {x.tensor.name: x.piece.buffer.extents for x in copies}
