"""``@kernel.func(inline=False)``: a function of element-wise operations as a function of Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transconv.backend_triton import spelled_lines
from transconv.ir import Call, DType, Expr, Let, Load, Reduce, Var, f32, find, i32, walk
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.functions import cast
from transconv.kernel.reference_semantics import meaning_of
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.elementwise import aligned
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import broadcast
from transconv.kernel.tiles.masks import joined
from transconv.kernel.tiles.values import Tile, tile_of
from transconv.kernel.user_rows import TEXT, row

if TYPE_CHECKING:
    from transconv.kernel.frontend.inlining import Calls

DIVISIONS = ("FloorDiv", "Mod")


def own_function(at: Calls, callee: DeviceFunction, given: dict[str, Any]) -> Tile:
    """A call of a function of its own. Refuses bodies that are more than expressions of elements."""
    tiles = {n: v for n, v in given.items() if isinstance(v, Tile)}
    if not tiles:
        raise Refusal(f"a call of {callee.source.name} without tiles, which is a function of its own",
                      "@kernel.func, whose body is read in the place of the call")
    kinds = {n: _held(t.dtype, at.chip.target.upcast16) for n, t in tiles.items()}
    params = {n: Tile((), Var(f"x{i}", kinds[n])) for i, n in enumerate(tiles)}
    outer, at.b = at.b, Building(tuple(f"x{i}" for i in range(len(params))))
    at.b.elements = callee.source.name
    try:
        made = at.read(callee, {**given, **params})
        lets, result = _expression(callee, at.b, made)
    finally:
        at.b = outer
    whole = aligned(at.b, list(tiles.values()))
    lines = "\n".join(f"    {line}" for line in spelled_lines(lets, result))
    meaning = meaning_of(callee) if len(tiles) == len(given) else None
    needs = sorted({c.name for e in (result, *(s.value for s in lets)) for c in find(e, Call)})
    name = row(callee.source.name, TEXT, list(kinds.values()), result.dtype, meaning, tuple(needs),
               body=lines)
    at.b.taken.add(name)
    args = tuple(cast(t.expr, kind) for t, kind in zip(whole, kinds.values(), strict=True))
    value = Call(name, args)
    narrow = next((t.dtype for t in whole if t.dtype.bits == 16), None)
    wide = narrow is None or result.dtype is not f32 or not at.chip.target.upcast16
    gives = result.dtype if wide or narrow is None else narrow
    return Tile(broadcast(*(t.shape for t in whole)), cast(value, gives), joined(*(t.mask for t in whole)),
                any(t.vector for t in whole), max(t.items for t in whole))


def _held(dtype: DType, upcast16: bool) -> DType:
    if dtype.kind == "index":
        return i32
    return f32 if upcast16 and dtype.kind == "float" and dtype.bits <= 16 else dtype


def _expression(callee: DeviceFunction, b: Building, made: Any) -> tuple[list[Let], Expr]:
    """The names and the value of a body."""
    name = callee.source.name
    tile = tile_of(made) if made is not None else None
    lets = [s for s in b.stmts if isinstance(s, Let)]
    if tile is None or tile.shape or tile.mask or len(lets) < len(b.stmts):
        raise Refusal(f"{name}, a function of its own that does more than compute a value of elements",
                      "operators and functions; @kernel.func for loops, loads and reductions")
    for e in [tile.expr, *(s.value for s in lets)]:
        if any(isinstance(x, (Load, Reduce)) for x in walk(e)) or any(
                type(x).__name__ in DIVISIONS and x.dtype.is_integer for x in find(e, Expr)):
            raise Refusal(f"{name}, a function of its own with a load, a reduction or a whole division",
                          "@kernel.func, whose body is read in the place of the call")
    return lets, tile.expr
