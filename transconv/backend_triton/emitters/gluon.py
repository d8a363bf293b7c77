"""The Gluon emitter: from a warp-specialized kernel to the text of a Gluon kernel.

Gluon is Triton's dialect in which shared memory, barriers and layouts are named. Each role becomes a
function; the kernel itself reserves the rings and starts the roles. As in ``emit_tl`` there is no
algebra here. Names that differ between Triton's versions are looked up once, above the functions.

A layout says how a tile's elements are distributed over the registers of warps or over shared memory. The
rings of buffers and the barriers that all roles share are allocated before the roles begin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from transconv import ir
from transconv.backend_triton.emitters.arithmetic import ATOM, LEVEL, POSTFIX
from transconv.backend_triton.emitters.triton import (
    TlEmitter,
    box_name,
    folded,
    multiples_said,
    parameters,
    spelled_lanes,
)
from transconv.backend_triton.launch.bound_start import begun, imported
from transconv.simplify import simplify

LOOKED_UP = {
    "fetch_box": """
fetch_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
""",
    "pile": """
pile = gl.shared_memory_descriptor.reinterpret if hasattr(
    gl.shared_memory_descriptor, "reinterpret") else gl.shared_memory_descriptor._reinterpret
""",
    "send_box": """
send_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
""",
}


def looked_up(lines: Sequence[str]) -> Iterator[str]:
    """The assignments of the names that the lines call."""
    yield "# The same functions under the names of this version of Triton."
    for name, text in LOOKED_UP.items():
        if any(re.search(rf"(?<![\w.]){name}\(", line) for line in lines):
            yield from text.strip().splitlines()


IMPORTS = """
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
"""


class GluonEmitter(TlEmitter):
    """The emitter of one role. ``sides`` are the lanes of a tile's two dimensions, ``warps`` those of the
    role, ``wide`` the most columns of one matrix instruction, ``both`` whether both operands are
    transposed."""

    space = "gl"

    def __init__(self, sides: tuple[ir.Lane, ...], warps: int, wide: int, both: bool) -> None:
        super().__init__()
        self.sides, self.warps, self.wide, self.both = sides, warps, wide, both
        self.sums = ir.Var("")  # the accumulator of the asynchronous products

    def spell_Const(self, e: ir.Const) -> tuple[str, int]:
        return (str(e.value), ATOM) if isinstance(e.value, bool) else super().spell_Const(e)

    def spell_SlotTile(self, e: ir.SlotTile) -> tuple[str, int]:
        return self.slot(e, self.lanes(e)), POSTFIX

    def slot(self, piece: ir.SlotTile, lanes: tuple[ir.Lane, ...]) -> str:
        """A slot as a matrix: its dimensions in memory are folded, and transposed if necessary."""
        memory = list(dict.fromkeys(x for w in piece.within for x in self.lanes(w)))
        name, slot = piece.buffer.name, self.text(piece.slot)
        shape = f"[{', '.join(str(x.extent) for x in memory)}]"
        match seen_as(piece):
            case "pile":
                text = f"{name}_{PIECES}.index({slot})"
            case "window":
                each = rows_of_eight(piece.buffer)
                text = (
                    f"pile({name}_{ROWS}.index({slot} * {each} + {first_row(piece) // EIGHT}), "
                    f"{name}_{ROWS}.dtype, {shape}, {name}_{ROWS}.layout)"
                )
            case _:
                text = f"{name}.index({self.place(piece)})"
                if len(piece.buffer.extents) != len(memory):
                    text += f".reshape({shape})"
        return text + (".permute([1, 0])" if list(lanes) != memory else "")

    def place(self, piece: ir.SlotTile) -> str:
        """Of a box among those of all slots."""
        slot, members = self.text(piece.slot), piece.buffer.members
        return slot if members == 1 else f"{slot} * {members} + {self.text(piece.member)}"

    def address(self, tensor: ir.Tensor, offset: ir.Expr, lanes: tuple[ir.Lane, ...]) -> str:
        assert self.lanes(offset) == lanes, "an address in an explicit kernel varies along its lanes"
        return f"{tensor.name} + {self.fit(offset, lanes, LEVEL[ir.Add])}"

    def lines_For(self, s: ir.For) -> list[str]:
        if s.kind == "dealt":
            dealt = f"{self.text(s.start)}, {self.end(s)}, {s.programs}"
            return [f"for {s.var.name} in range({dealt}):", *self.block(s.body)]
        start = "" if s.start is ir.ZERO else f"{self.text(s.start)}, "
        return [f"for {s.var.name} in range({start}{self.end(s)}):", *self.block(s.body)]

    def lines_Alloc(self, s: ir.Alloc) -> list[str]:
        self.scope[s.var] = s.lanes
        if not s.lanes and s.var.type.kind == "index":
            return [f"{s.var.name} = {self.text(s.init)}"]
        if not s.lanes:  # Triton makes 32 bits of a number of Python
            return [f"{s.var.name} = gl.full((), {self.text(s.init)}, {self.type(s.var.type)})"]
        shape = ", ".join(str(x.extent) for x in s.lanes)
        return [f"{s.var.name} = gl.full([{shape}], {self.text(s.init)}, {self.type(s.var.type)}, sums)"]

    def lines_Fetch(self, s: ir.Fetch) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        barrier = f"{s.barrier.name}.index({self.text(s.slot)})"
        return [
            f"fetch_box({box_name(s.tensor.name)}, [{corner}], {barrier}, "
            f"{s.piece.buffer.name}.index({self.place(s.piece)}))"
        ]

    def lines_Let(self, s: ir.Let) -> list[str]:
        """A tile that is read from shared memory comes in the layout of the sums."""
        if isinstance(s.value, ir.SlotTile):
            self.name(s)
            text, _ = self.unboxed(f"{self.text(s.value)}.load(sums)", s.value.buffer.type)
            return [f"{s.var.name} = {text}"]
        return super().lines_Let(s)

    def lines_Put(self, s: ir.Put) -> list[str]:
        lanes = self.lanes(s.value)
        value = self.fit(s.value, lanes)
        if isinstance(s.value, ir.SlotTile):
            along = lanes.index(next(x for x in lanes if x is s.piece.within[-1]))
            value += self.loaded_across(lanes, along, s.value.dtype.bits)
        if isinstance(s.value, ir.SlotTile) or s.piece.buffer.type.boxed is s.piece.buffer.type:
            return [f"{self.slot(s.piece, lanes)}.store({value})"]
        return [
            f"{self.slot(s.piece, lanes)}.store({self.fit(s.value, lanes, POSTFIX)}"
            f".to({self.type(s.piece.buffer.type.boxed)}))"
        ]

    def loaded_across(self, lanes: tuple[ir.Lane, ...], along: int, bits: int) -> str:
        """How a tile to be transposed is read. If both operands are, the steps of the sum are in another
        order in both: those whose bytes make a word come from four quarters of it."""
        if bits != 8:
            return f".load({turning_layout(lanes, along, self.warps)})"
        read = f".load({bytes_layout(lanes, along, self.warps, self.both)})"
        if not self.both:
            return read
        shape = [x.extent for x in lanes]
        split, order = [*shape], [0, 2, 1] if along else [1, 0, 2]
        split[along : along + 1] = [4, shape[along] // 4]
        return f"{read}.reshape({split}).permute({order}).reshape({shape})"

    def lines_Send(self, s: ir.Send) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        piece = f"{s.piece.buffer.name}.index({self.text(s.piece.slot)})"
        return [f"send_box({box_name(s.tensor.name)}, [{corner}], {piece})"]

    def call_wait(self, s: ir.FuncCall) -> list[str]:
        _, _, phase = s.args
        return [f"mbarrier.wait({self.gate(s)}, {self.argument(phase)})"]

    def call_expect(self, s: ir.FuncCall) -> list[str]:
        return [f"mbarrier.expect({self.gate(s)}, {self.argument(s.args[2])})"]

    def call_arrive(self, s: ir.FuncCall) -> list[str]:
        when = self.argument(s.args[2])
        return [
            f"mbarrier.arrive({self.gate(s)}, count=1" + ("" if when == "True" else f", pred={when}") + ")"
        ]

    def gate(self, s: ir.FuncCall) -> str:
        barrier = s.args[0]
        assert isinstance(barrier, ir.Barrier)
        return f"{barrier.name}.index({self.argument(s.args[1])})"

    def argument(self, arg: ir.Node) -> str:
        assert isinstance(arg, ir.Expr)
        return self.text(arg)

    def call_dot_async(self, s: ir.FuncCall) -> list[str]:
        acc, a, b = s.args
        assert isinstance(acc, ir.Var)
        self.sums = acc
        return [
            f"{acc.name} = hopper.warpgroup_mma({self.argument(a)}, {self.argument(b)}, "
            f"{acc.name}, is_async=True)"
        ]

    def call_dot_wait(self, s: ir.FuncCall) -> list[str]:
        sums = self.sums.name
        return [f"{sums} = hopper.warpgroup_mma_wait({self.argument(s.args[0])}, deps=[{sums}])"]

    def call_part_wait(self, s: ir.FuncCall) -> list[str]:
        """The whole sum is named too, so that LLVM does not gather the additions of several parts behind
        the last product, which takes the registers of all."""
        pending, part, whole = s.args
        assert isinstance(part, ir.Var) and isinstance(whole, ir.Var)
        both = f"{part.name}, {whole.name}"
        return [f"{both} = hopper.warpgroup_mma_wait({self.argument(pending)}, deps=[{both}])"]

    def call_fence(self, s: ir.FuncCall) -> list[str]:
        return ["hopper.fence_async_shared()"]

    def call_send_wait(self, s: ir.FuncCall) -> list[str]:
        return [f"tma.store_wait({self.argument(s.args[0])})"]

    # ---- a role as a function ----

    def role(self, role: ir.Role, params: list[str], program: ir.Var, said: list[str]) -> list[str]:
        sums: list[str] = []
        if any(a.lanes for a in ir.find(role, ir.Alloc)):
            used = spelled_lanes(role.body)
            (bits,) = {
                a.dtype.bits
                for s in ir.find(role, ir.FuncCall)
                for a in s.args
                if isinstance(a, ir.SlotTile)
            }
            sums = [
                f"sums: gl.constexpr = {sums_layout(self.sides, role.warps, bits, self.wide)}",
                *(
                    f"{x.name} = gl.arange(0, {x.extent}, gl.SliceLayout({1 - at}, sums))"
                    for at, x in enumerate(self.sides)
                    if x in used
                ),
            ]
        return [
            "@gluon.jit",
            f"def {role.name}({', '.join(params)}):",
            *(f"    {x}" for x in sums),
            *said,
            f"    {program.name} = gl.program_id(0)",
            *self.block(role.body),
        ]


def emit(kernel: ir.Kernel, header: tuple[str, ...] = (), first: tuple[str, ...] = ()) -> str:
    """The text of a module with one ``@gluon.jit`` function named like the kernel, and one per role."""
    (roles,) = ir.find(kernel, ir.Roles)
    grid = kernel.body
    assert isinstance(grid, ir.For)
    shared = [s.what for s in ir.find(kernel, ir.Shared)]
    given, sizes = parameters(kernel), kernel.sizes.names if kernel.sizes else ()
    sides = next((a.lanes for a in ir.find(kernel, ir.Alloc) if len(a.lanes) == 2), ())
    wide = widest_product(roles)
    both = sum(isinstance(s.value, ir.SlotTile) for s in ir.find(roles, ir.Put)) == 2
    functions = [
        *ir.helpers(
            {c.name for c in ir.find(kernel, ir.Call)},
            {c.type for c in ir.find(kernel, ir.Cast)},
            {r.op for r in ir.find(kernel, ir.Reduce)},
            "gluon.jit",
            "gl",
        )[1:]
    ]
    functions += [""] if functions else []
    calls = []
    for role in roles.roles:
        own = [
            *(p.name for p in given if p.tensor in ir.find(role, ir.Tensor)),
            *rings(role, shared),
            *(n for n in sizes if ir.Var(n) in ir.find(role, ir.Var)),
        ]
        functions += [
            *GluonEmitter(sides, role.warps, wide, both).role(
                role, own, grid.var, multiples_said(kernel, own)
            ),
            "",
            "",
        ]
        calls.append(f"({role.name}, ({', '.join(own)},))")
    workers = roles.roles[1:]
    memory = list(reserved(shared, kernel))
    lines = [
        *(f"# {line}" for line in header),
        *IMPORTS.splitlines(),
        *imported(first),
        "",
        *looked_up([*functions, *memory]),
        "",
        "",
        *functions,
        f"@gluon.jit(do_not_specialize={[*sizes]})" if sizes else "@gluon.jit",
        f"def {kernel.name}({', '.join([*(p.name for p in given), *sizes])}):",
        *([f"    # sizes {kernel.sizes}"] if sizes else []),
        *(f"    # {p}" for p in given),
        "",
        *memory,
        *begun(first),
        "",
        f"    gl.warp_specialize([{calls[0]},",
        *(f"                        {c}," for c in calls[1:-1]),
        f"                        {calls[-1]}],",
        f"                       {[r.warps for r in workers]}, {[r.registers for r in workers]})",
    ]
    return "\n".join(line.rstrip() for line in folded(lines)) + "\n"


DOT_BITS = 256  # of an operand's row per instruction, along K
WARPGROUP = 4  # warps that multiply together, 64 rows at a time
PIECES = "pieces"  # the name of several boxes seen as one operand
ROWS = "rows"  # the name of a ring seen as its rows, ``EIGHT`` by eight: the swizzle repeats then
EIGHT = 8


def sums_layout(sides: tuple[ir.Lane, ...], warps: int, bits: int, wide: int) -> str:
    """The register layout of a product's tile: groups of four warps take 64 rows each; further groups
    divide the columns."""
    left, right = (x.extent for x in sides)
    down = min(warps // WARPGROUP, left // 64) * WARPGROUP
    across = warps // down
    return (
        f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[{down}, {across}], "
        f"instr_shape=[16, {min(right // across, wide)}, {DOT_BITS // bits}])"
    )


def widest_product(roles: ir.Roles) -> int:
    """The most columns of one instruction: 256, whose sums are 128 registers of a thread. A program of
    more than 12 warps (three groups) starts with 128 each, which ptxas refuses to fill with them."""
    groups = sum(-(-r.warps // WARPGROUP) for r in roles.roles)
    return 256 if groups <= 3 else 128


def turning_layout(lanes: tuple[ir.Lane, ...], along: int, warps: int) -> str:
    """The register layout of a tile to be transposed: every thread has one row of the result, along
    dimension ``along``, and neighbouring threads read neighbouring elements. Short tiles are divided
    along the rows too."""
    rows, length = lanes[1 - along].extent, lanes[along].extent
    threads, groups = min(rows, 32), min(warps, max(1, rows // 32))
    own = max(1, length * threads * groups // (32 * warps))
    sizes = [(own, 1), (32 // threads, threads), (warps // groups, groups)]
    spelled = ", ".join(str([x, y] if along == 0 else [y, x]) for x, y in sizes)
    return f"gl.BlockedLayout({spelled}, {[along, 1 - along]})"


def bytes_layout(lanes: tuple[ir.Lane, ...], along: int, warps: int, apart: bool) -> str:
    """The register layout of a tile of bytes to be transposed: a thread has squares of 4 x 4 bytes. It
    reads words of 4 bytes across the sum, and writes words of 4 steps along it, dimension ``along``.
    ``apart``: the 4 steps of a word are quarters of the sum apart, so that the lanes of a warp read rows
    that follow one another and are swizzled differently, which meet in fewer banks."""

    def bits(dim: int) -> list[list[int]]:
        return [
            [1 << bit if d == dim else 0 for d in range(2)]
            for bit in range(lanes[dim].extent.bit_length() - 1)
        ]

    down, across = bits(along), bits(1 - along)
    word, steps = (down[-2:], down[:-2]) if apart else (down[:2], down[2:])
    ways = steps[:3] + across[2:4] if apart else across[2:4] + steps[:2] + across[4:5]
    rest = [x for x in [*across[2:], *steps] if x not in ways]
    rest = [*rest, *[[0, 0]] * 7]
    few, of_warps = 5 - len(ways), warps.bit_length() - 1
    ways, rest = [*ways, *rest[:few]], rest[few:]
    own = [*across[:2], *word, *(x for x in rest[of_warps:] if any(x))]
    return f"gl.DistributedLinearLayout({own}, {ways}, {rest[:of_warps]}, [], {[x.extent for x in lanes]})"


def seen_as(piece: ir.SlotTile) -> str:
    """How a tile lies in a slot: as its ``box``, one of several or the only one, as a ``pile`` of all of
    them, or as a ``window``, some rows of boxes that lie below one another."""
    box, tile = prod(piece.buffer.extents), prod(x.extent for x in ir.lanes_of(piece))
    if piece.buffer.members == 1 or tile <= box:
        return "box"
    return "pile" if tile == box * piece.buffer.members else "window"


def first_row(piece: ir.SlotTile) -> int:
    """The row of a slot where a window begins."""
    first = ir.substitute(piece, {x: ir.ZERO for x in ir.lanes_of(piece)})
    places = [simplify(x) for x in (first.member, *first.within)]
    assert all(isinstance(x, ir.Const) for x in places), "the rows of a window are known"
    found = 0
    for x, extent in zip(places, (piece.buffer.members, *piece.buffer.extents[:-1]), strict=False):
        found = found * extent + int(x.value) if isinstance(x, ir.Const) else found
    return found


def rows_of_eight(what: ir.SmemRing) -> int:
    """How many times eight rows a slot has."""
    return what.members * prod(what.extents[:-1]) // EIGHT


def rings(role: ir.Role, shared: list[ir.SmemRing | ir.Barrier]) -> Iterator[str]:
    """The names by which a role sees the rings and barriers that it uses."""
    used = {*ir.find(role, ir.SmemRing), *ir.find(role, ir.Barrier)}
    seen = {p.buffer: seen_as(p) for p in _tiles(role)}
    for what in shared:
        if what in used:
            yield what.name + {"pile": f"_{PIECES}", "window": f"_{ROWS}"}.get(
                seen.get(what, "") if isinstance(what, ir.SmemRing) else "", ""
            )


def reserved(shared: list[ir.SmemRing | ir.Barrier], kernel: ir.Kernel) -> Iterator[str]:
    """The lines that allocate rings and barriers and initialise the barriers."""
    copies: list[ir.Fetch | ir.Send] = [*ir.find(kernel, ir.Fetch), *ir.find(kernel, ir.Send)]
    boxed = {x.piece.buffer: box_name(x.tensor.name) for x in copies}
    for what in shared:
        if isinstance(what, ir.Barrier):
            yield (
                f"    {what.name} = gl.allocate_shared_memory(gl.int64, [{what.slots}, 1], "
                "mbarrier.MBarrierLayout())"
            )
            continue
        box = boxed.get(what)
        if box is None:
            yield from _transposed(what, next(n for b, n in boxed.items() if b.type is what.type))
            continue
        shape = ", ".join(map(str, (what.slots * what.members, *what.extents)))
        yield f"    {what.name} = gl.allocate_shared_memory({box}.dtype, [{shape}], {box}.layout)"
        if (seen := {seen_as(p) for p in _tiles(kernel) if p.buffer is what}) == {"pile"}:
            yield from _pile(what, box)
        elif "window" in seen:
            yield (
                f"    {what.name}_{ROWS} = pile({what.name}, {box}.dtype, "
                f"[{what.slots * rows_of_eight(what)}, {EIGHT}, {what.extents[-1]}],"
            )
            yield f"        {shared_layout(what)})"
    barriers = [b for b in shared if isinstance(b, ir.Barrier)]
    for slots in dict.fromkeys(b.slots for b in barriers):
        alike = [b for b in barriers if b.slots == slots]
        if slots == 1:
            yield from (f"    mbarrier.init({b.name}.index(0), count={b.arrivals})" for b in alike)
            continue
        yield f"    for slot in gl.static_range({slots}):"
        for b in alike:
            yield f"        mbarrier.init({b.name}.index(slot), count={b.arrivals})"


def _tiles(node: ir.Node) -> list[ir.SlotTile]:
    """The pieces that are read as tiles."""
    read = [a for s in ir.find(node, ir.FuncCall) for a in s.args if isinstance(a, ir.SlotTile)]
    return read + [s.value for s in ir.find(node, ir.Put) if isinstance(s.value, ir.SlotTile)]


def _transposed(what: ir.SmemRing, box: str) -> Iterator[str]:
    """A ring that no box is copied into: its layout is the matrix unit's."""
    shape = ", ".join(map(str, (what.slots, *what.extents)))
    yield (f"    {what.name} = gl.allocate_shared_memory({box}.dtype, [{shape}], {shared_layout(what)})")


def shared_layout(what: ir.SmemRing) -> str:
    """Rows of up to 128 bytes, swizzled so that they can be read across."""
    swizzle = min(128, what.extents[-1] * what.type.bytes)
    return f"gl.NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={what.type.bits}, rank=2)"


def _pile(what: ir.SmemRing, box: str) -> Iterator[str]:
    """Boxes as one operand: side by side (64 columns of all rows, then the next 64), or below one
    another."""
    down, across = (what.members, 1) if what.below else (1, what.members)
    rows, columns = prod(what.extents[:-1]) * down, what.extents[-1] * across
    yield (f"    {what.name}_{PIECES} = pile({what.name}, {box}.dtype, [{what.slots}, {rows}, {columns}],")
    yield f"        {shared_layout(what)})"
