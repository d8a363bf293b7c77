"""The Gluon emitter: from a warp-specialized kernel to the text of a Gluon kernel.

Gluon is Triton's dialect in which shared memory, barriers and layouts are named. Each role becomes a
function; the kernel itself reserves the rings and starts the roles. As in ``emit_tl`` there is no
algebra here. Names that differ between Triton's versions are looked up once, above the functions.
"""

from __future__ import annotations

from transconv.backend_triton.emitters.arithmetic import ATOM, POSTFIX
from transconv.backend_triton.emitters.gluon_layouts import (
    EIGHT,
    PIECES,
    ROWS,
    bytes_layout,
    first_row,
    reserved,
    rings,
    rows_of_eight,
    seen_as,
    sums_layout,
    turning_layout,
    widest_product,
)
from transconv.backend_triton.emitters.parameters import box_name, parameters
from transconv.backend_triton.emitters.triton import (
    TlEmitter,
    folded,
    multiples_said,
    spelled_lanes,
)
from transconv.backend_triton.emitters.triton_versions import looked_up
from transconv.backend_triton.launch.programmatic_launch import begun, imported
from transconv.ir import (
    ZERO,
    Alloc,
    Barrier,
    Call,
    Cast,
    Const,
    Expr,
    Fetch,
    For,
    FuncCall,
    Kernel,
    Lane,
    Let,
    Node,
    Put,
    Reduce,
    Role,
    Roles,
    Send,
    Shared,
    SlotTile,
    Tensor,
    Var,
    find,
    helpers,
)

IMPORTS = '''
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
'''


class GluonEmitter(TlEmitter):
    """Spells one role. ``sides`` are the lanes of a tile's two dimensions, ``warps`` those of the role,
    ``wide`` the most columns of one matrix instruction, ``both`` whether both operands are transposed."""

    space = "gl"

    def __init__(self, sides: tuple[Lane, ...], warps: int, wide: int, both: bool) -> None:
        super().__init__()
        self.sides, self.warps, self.wide, self.both = sides, warps, wide, both
        self.sums = Var("")  # the accumulator of the asynchronous products

    def spell_Const(self, e: Const) -> tuple[str, int]:
        return (str(e.value), ATOM) if isinstance(e.value, bool) else super().spell_Const(e)

    def spell_SlotTile(self, e: SlotTile) -> tuple[str, int]:
        return self.slot(e, self.lanes(e)), POSTFIX

    def slot(self, piece: SlotTile, lanes: tuple[Lane, ...]) -> str:
        """A slot as a matrix: its dimensions in memory are folded, and transposed if necessary."""
        memory = list(dict.fromkeys(x for w in piece.within for x in self.lanes(w)))
        name, slot = piece.buffer.name, self.text(piece.slot)
        shape = f"[{', '.join(str(x.extent) for x in memory)}]"
        match seen_as(piece):
            case "pile":
                text = f"{name}_{PIECES}.index({slot})"
            case "window":
                each = rows_of_eight(piece.buffer)
                text = (f"pile({name}_{ROWS}.index({slot} * {each} + {first_row(piece) // EIGHT}), "
                        f"{name}_{ROWS}.dtype, {shape}, {name}_{ROWS}.layout)")
            case _:
                text = f"{name}.index({self.place(piece)})"
                if len(piece.buffer.extents) != len(memory):
                    text += f".reshape({shape})"
        return text + (".permute([1, 0])" if list(lanes) != memory else "")

    def place(self, piece: SlotTile) -> str:
        """Of a box among those of all slots."""
        slot, members = self.text(piece.slot), piece.buffer.members
        return slot if members == 1 else f"{slot} * {members} + {self.text(piece.member)}"

    def address(self, tensor: Tensor, offset: Expr, lanes: tuple[Lane, ...]) -> str:
        assert self.lanes(offset) == lanes, "an address in an explicit kernel varies along its lanes"
        return f"{tensor.name} + {self.fit(offset, lanes, 6)}"

    def lines_For(self, s: For) -> list[str]:
        if s.kind == "dealt":
            dealt = f"{self.text(s.start)}, {self.end(s)}, {s.programs}"
            return [f"for {s.var.name} in range({dealt}):", *self.block(s.body)]
        start = "" if s.start is ZERO else f"{self.text(s.start)}, "
        return [f"for {s.var.name} in range({start}{self.end(s)}):", *self.block(s.body)]

    def lines_Alloc(self, s: Alloc) -> list[str]:
        self.scope[s.var] = s.lanes
        if not s.lanes:
            return [f"{s.var.name} = {self.text(s.init)}"]
        shape = ", ".join(str(x.extent) for x in s.lanes)
        return [f"{s.var.name} = gl.full([{shape}], {self.text(s.init)}, {self.type(s.var.type)}, sums)"]

    def lines_Fetch(self, s: Fetch) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        barrier = f"{s.barrier.name}.index({self.text(s.slot)})"
        return [f"fetch_box({box_name(s.tensor.name)}, [{corner}], {barrier}, "
                f"{s.piece.buffer.name}.index({self.place(s.piece)}))"]

    def lines_Let(self, s: Let) -> list[str]:
        """A tile that is read from shared memory comes in the layout of the sums."""
        if isinstance(s.value, SlotTile):
            self.name(s)
            text, _ = self.unboxed(f"{self.text(s.value)}.load(sums)", s.value.buffer.type)
            return [f"{s.var.name} = {text}"]
        return super().lines_Let(s)

    def lines_Put(self, s: Put) -> list[str]:
        lanes = self.lanes(s.value)
        value = self.fit(s.value, lanes)
        if isinstance(s.value, SlotTile):
            along = lanes.index(next(x for x in lanes if x is s.piece.within[-1]))
            value += self.loaded_across(lanes, along, s.value.dtype.bits)
        if isinstance(s.value, SlotTile) or s.piece.buffer.type.boxed is s.piece.buffer.type:
            return [f"{self.slot(s.piece, lanes)}.store({value})"]
        return [f"{self.slot(s.piece, lanes)}.store({self.fit(s.value, lanes, POSTFIX)}"
                f".to({self.type(s.piece.buffer.type.boxed)}))"]

    def loaded_across(self, lanes: tuple[Lane, ...], along: int, bits: int) -> str:
        """How a tile to be transposed is read. If both operands are, the steps of the sum are in another
        order in both: those whose bytes make a word come from four quarters of it."""
        if bits != 8:
            return f".load({turning_layout(lanes, along, self.warps)})"
        read = f".load({bytes_layout(lanes, along, self.warps, self.both)})"
        if not self.both:
            return read
        shape = [x.extent for x in lanes]
        split, order = [*shape], [0, 2, 1] if along else [1, 0, 2]
        split[along:along + 1] = [4, shape[along] // 4]
        return f"{read}.reshape({split}).permute({order}).reshape({shape})"

    def lines_Send(self, s: Send) -> list[str]:
        corner = ", ".join(self.text(c) for c in s.corner)
        piece = f"{s.piece.buffer.name}.index({self.text(s.piece.slot)})"
        return [f"send_box({box_name(s.tensor.name)}, [{corner}], {piece})"]

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
        self.sums = acc
        return [f"{acc.name} = hopper.warpgroup_mma({self.argument(a)}, {self.argument(b)}, "
                f"{acc.name}, is_async=True)"]

    def call_dot_wait(self, s: FuncCall) -> list[str]:
        sums = self.sums.name
        return [f"{sums} = hopper.warpgroup_mma_wait({self.argument(s.args[0])}, deps=[{sums}])"]

    def call_part_wait(self, s: FuncCall) -> list[str]:
        """The whole sum is named too, so that LLVM does not gather the additions of several parts behind
        the last product, which takes the registers of all."""
        pending, part, whole = s.args
        assert isinstance(part, Var) and isinstance(whole, Var)
        both = f"{part.name}, {whole.name}"
        return [f"{both} = hopper.warpgroup_mma_wait({self.argument(pending)}, deps=[{both}])"]

    def call_fence(self, s: FuncCall) -> list[str]:
        return ["hopper.fence_async_shared()"]

    def call_send_wait(self, s: FuncCall) -> list[str]:
        return [f"tma.store_wait({self.argument(s.args[0])})"]

    # ---- a role as a function ----

    def role(self, role: Role, params: list[str], program: Var, said: list[str]) -> list[str]:
        sums: list[str] = []
        if any(a.lanes for a in find(role, Alloc)):
            used = spelled_lanes(role.body)
            (bits,) = {a.dtype.bits for s in find(role, FuncCall) for a in s.args
                       if isinstance(a, SlotTile)}
            sums = [f"sums: gl.constexpr = {sums_layout(self.sides, role.warps, bits, self.wide)}",
                    *(f"{x.name} = gl.arange(0, {x.extent}, gl.SliceLayout({1 - at}, sums))"
                      for at, x in enumerate(self.sides) if x in used)]
        return ["@gluon.jit", f"def {role.name}({', '.join(params)}):", *(f"    {x}" for x in sums),
                *said, f"    {program.name} = gl.program_id(0)", *self.block(role.body)]


def emit(kernel: Kernel, header: tuple[str, ...] = (), first: tuple[str, ...] = ()) -> str:
    """The text of a module with one ``@gluon.jit`` function named like the kernel, and one per role."""
    (roles,) = find(kernel, Roles)
    grid = kernel.body
    assert isinstance(grid, For)
    shared = [s.what for s in find(kernel, Shared)]
    given, sizes = parameters(kernel), kernel.sizes.names if kernel.sizes else ()
    sides = next((a.lanes for a in find(kernel, Alloc) if len(a.lanes) == 2), ())
    wide = widest_product(roles)
    both = sum(isinstance(s.value, SlotTile) for s in find(roles, Put)) == 2
    functions = [*helpers({c.name for c in find(kernel, Call)}, {c.type for c in find(kernel, Cast)},
                          {r.op for r in find(kernel, Reduce)}, "gluon.jit", "gl")[1:]]
    functions += [""] if functions else []
    calls = []
    for role in roles.roles:
        own = [*(p.name for p in given if _mentions(role, p.tensor)), *rings(role, shared),
               *(n for n in sizes if Var(n) in find(role, Var))]
        functions += [*GluonEmitter(sides, role.warps, wide, both).role(
            role, own, grid.var, multiples_said(kernel, own)), "", ""]
        calls.append(f"({role.name}, ({', '.join(own)},))")
    workers = roles.roles[1:]
    memory = list(reserved(shared, kernel))
    lines = [*(f"# {line}" for line in header), *IMPORTS.splitlines(),
             *imported(first), "", *looked_up([*functions, *memory]), "", "",
             *functions, f"@gluon.jit(do_not_specialize={[*sizes]})" if sizes else "@gluon.jit",
             f"def {kernel.name}({', '.join([*(p.name for p in given), *sizes])}):",
             *([f"    # sizes {kernel.sizes}"] if sizes else []), *(f"    # {p}" for p in given), "",
             *memory, *begun(first), "",
             f"    gl.warp_specialize([{calls[0]},",
             *(f"                        {c}," for c in calls[1:-1]),
             f"                        {calls[-1]}],",
             f"                       {[r.warps for r in workers]}, {[r.registers for r in workers]})"]
    return "\n".join(line.rstrip() for line in folded(lines)) + "\n"


def _mentions(role: Role, tensor: Tensor) -> bool:
    return tensor in find(role, Tensor)
