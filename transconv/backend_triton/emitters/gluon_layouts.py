"""Where tiles are in a Gluon kernel: layouts of shared memory and of registers, as Gluon text.

A layout says how a tile's elements are distributed over the registers of warps or over shared memory.
The rings of buffers and the barriers that all roles share are allocated before the roles begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from transconv.backend_triton.emitters.parameters import box_name
from transconv.ir import (
    ZERO,
    Barrier,
    Const,
    Fetch,
    FuncCall,
    Kernel,
    Lane,
    Node,
    Put,
    Role,
    Roles,
    Send,
    SlotTile,
    SmemRing,
    find,
    lanes_of,
    substitute,
)
from transconv.simplify import simplify

DOT_BITS = 256  # of an operand's row per instruction, along K
WARPGROUP = 4  # warps that multiply together, 64 rows at a time
PIECES = "pieces"  # the name of several boxes seen as one operand
ROWS = "rows"  # the name of a ring seen as its rows, ``EIGHT`` by eight: the swizzle repeats then
EIGHT = 8


def sums_layout(sides: tuple[Lane, ...], warps: int, bits: int, wide: int) -> str:
    """The register layout of a product's tile: groups of four warps take 64 rows each; further groups
    divide the columns."""
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
    """The register layout of a tile to be transposed: every thread has one row of the result, along
    dimension ``along``, and neighbouring threads read neighbouring elements. Short tiles are divided
    along the rows too."""
    rows, length = lanes[1 - along].extent, lanes[along].extent
    threads, groups = min(rows, 32), min(warps, max(1, rows // 32))
    own = max(1, length * threads * groups // (32 * warps))
    sizes = [(own, 1), (32 // threads, threads), (warps // groups, groups)]
    spelled = ", ".join(str([x, y] if along == 0 else [y, x]) for x, y in sizes)
    return f"gl.BlockedLayout({spelled}, {[along, 1 - along]})"


def bytes_layout(lanes: tuple[Lane, ...], along: int, warps: int, apart: bool) -> str:
    """The register layout of a tile of bytes to be transposed: a thread has squares of 4 x 4 bytes. It
    reads words of 4 bytes across the sum, and writes words of 4 steps along it, dimension ``along``.
    ``apart``: the 4 steps of a word are quarters of the sum apart, so that the lanes of a warp read rows
    that follow one another and are swizzled differently, which meet in fewer banks."""
    def bits(dim: int) -> list[list[int]]:
        return [[1 << bit if d == dim else 0 for d in range(2)]
                for bit in range(lanes[dim].extent.bit_length() - 1)]

    down, across = bits(along), bits(1 - along)
    word, steps = (down[-2:], down[:-2]) if apart else (down[:2], down[2:])
    ways = steps[:3] + across[2:4] if apart else across[2:4] + steps[:2] + across[4:5]
    rest = [x for x in [*across[2:], *steps] if x not in ways]
    rest = [*rest, *[[0, 0]] * 7]
    few, of_warps = 5 - len(ways), warps.bit_length() - 1
    ways, rest = [*ways, *rest[:few]], rest[few:]
    own = [*across[:2], *word, *(x for x in rest[of_warps:] if any(x))]
    return (f"gl.DistributedLinearLayout({own}, {ways}, {rest[:of_warps]}, [], "
            f"{[x.extent for x in lanes]})")


def seen_as(piece: SlotTile) -> str:
    """How a tile lies in a slot: as its ``box``, one of several or the only one, as a ``pile`` of all of
    them, or as a ``window``, some rows of boxes that lie below one another."""
    box, tile = prod(piece.buffer.extents), prod(x.extent for x in lanes_of(piece))
    if piece.buffer.members == 1 or tile <= box:
        return "box"
    return "pile" if tile == box * piece.buffer.members else "window"


def first_row(piece: SlotTile) -> int:
    """The row of a slot where a window begins."""
    first = substitute(piece, {x: ZERO for x in lanes_of(piece)})
    places = [simplify(x) for x in (first.member, *first.within)]
    assert all(isinstance(x, Const) for x in places), "the rows of a window are known"
    found = 0
    for x, extent in zip(places, (piece.buffer.members, *piece.buffer.extents[:-1]), strict=False):
        found = found * extent + int(x.value) if isinstance(x, Const) else found
    return found


def rows_of_eight(what: SmemRing) -> int:
    """How many times eight rows a slot has."""
    return what.members * prod(what.extents[:-1]) // EIGHT


def rings(role: Role, shared: list[SmemRing | Barrier]) -> Iterator[str]:
    """The names by which a role sees the rings and barriers that it uses."""
    used = {*find(role, SmemRing), *find(role, Barrier)}
    seen = {p.buffer: seen_as(p) for p in _tiles(role)}
    for what in shared:
        if what in used:
            yield what.name + {"pile": f"_{PIECES}", "window": f"_{ROWS}"}.get(
                seen.get(what, "") if isinstance(what, SmemRing) else "", "")


def reserved(shared: list[SmemRing | Barrier], kernel: Kernel) -> Iterator[str]:
    """The lines that allocate rings and barriers and initialise the barriers."""
    copies: list[Fetch | Send] = [*find(kernel, Fetch), *find(kernel, Send)]
    boxed = {x.piece.buffer: box_name(x.tensor.name) for x in copies}
    for what in shared:
        if isinstance(what, Barrier):
            yield (f"    {what.name} = gl.allocate_shared_memory(gl.int64, [{what.slots}, 1], "
                   "mbarrier.MBarrierLayout())")
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
            yield (f"    {what.name}_{ROWS} = pile({what.name}, {box}.dtype, "
                   f"[{what.slots * rows_of_eight(what)}, {EIGHT}, {what.extents[-1]}],")
            yield f"        {shared_layout(what)})"
    barriers = [b for b in shared if isinstance(b, Barrier)]
    for slots in dict.fromkeys(b.slots for b in barriers):
        alike = [b for b in barriers if b.slots == slots]
        if slots == 1:
            yield from (f"    mbarrier.init({b.name}.index(0), count={b.arrivals})" for b in alike)
            continue
        yield f"    for slot in gl.static_range({slots}):"
        for b in alike:
            yield f"        mbarrier.init({b.name}.index(slot), count={b.arrivals})"


def _tiles(node: Node) -> list[SlotTile]:
    """The pieces that are read as tiles."""
    read = [a for s in find(node, FuncCall) for a in s.args if isinstance(a, SlotTile)]
    return read + [s.value for s in find(node, Put) if isinstance(s.value, SlotTile)]


def _transposed(what: SmemRing, box: str) -> Iterator[str]:
    """A ring that no box is copied into: its layout is the matrix unit's."""
    shape = ", ".join(map(str, (what.slots, *what.extents)))
    yield (f"    {what.name} = gl.allocate_shared_memory({box}.dtype, [{shape}], "
           f"{shared_layout(what)})")


def shared_layout(what: SmemRing) -> str:
    """Rows of up to 128 bytes, swizzled so that they can be read across."""
    swizzle = min(128, what.extents[-1] * what.type.bytes)
    return (f"gl.NVMMASharedLayout(swizzle_byte_width={swizzle}, "
            f"element_bitwidth={what.type.bits}, rank=2)")


def _pile(what: SmemRing, box: str) -> Iterator[str]:
    """Boxes as one operand: side by side (64 columns of all rows, then the next 64), or below one
    another."""
    down, across = (what.members, 1) if what.below else (1, what.members)
    rows, columns = prod(what.extents[:-1]) * down, what.extents[-1] * across
    yield (f"    {what.name}_{PIECES} = pile({what.name}, {box}.dtype, "
           f"[{what.slots}, {rows}, {columns}],")
    yield f"        {shared_layout(what)})"

