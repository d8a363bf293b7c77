"""What the maps behind a sum read, fetched by the producer (``behind=box``): right after every pass and in
any order of the roles, with the barriers that it needs, and refused in a sentence where it cannot be."""

from __future__ import annotations

import pytest

from tests.stages import SM90
from transconv import ir
from transconv.compute import parse
from transconv.ir.interp.memory import InterpError
from transconv.passes import pipeline
from transconv.runtime import build_compute
from transconv.schedule import Schedule, told_behind, why_not
from transconv.verify.computation import Case, after_every_pass

GLUON = "mma | a=box b=box via=gluon behind=box"
RESIDUAL = "    read   r = R[n, o, h, w]\n    let    y = s + f32(r)\n"
GATED = ("    read   r = R[n, o, h, w]\n    read   g = G[n, o, h, w]\n    read   b = B[o]\n"
         "    let    y = where(f32(g) > 0.0, s + f32(r) + f32(b), 0.0)\n")


def layer(n: int, c: int, o: int, h: int, w: int, behind: str = RESIDUAL, order: str = "acdb",
          types: str = "f16 f16 f16", kernel: int = 3) -> str:
    """A convolution with what follows its sum; ``types``: those of R, G and Y."""
    of_r, of_g, of_y = types.split()
    shape = f"[n={n}, o={o}, h={h}, w={w}] {order}"
    read = [f"    tensor {name} {dtype} {shape}\n" for name, dtype in (("R", of_r), ("G", of_g))
            if f"{name}[" in behind]
    vector = f"    tensor B f16 [o={o}]\n" if "B[" in behind else ""
    pad = kernel // 2
    return (f"compute conv\n    tensor X f16 [n={n}, c={c}, h={h}, w={w}] acdb\n"
            f"    tensor W f16 [o={o}, c={c}, kh={kernel}, kw={kernel}] acdb\n{''.join(read)}{vector}"
            f"    tensor Y {of_y} {shape}\n"
            f"    axes   n={n} h={h} w={w} o={o} | kh={kernel} kw={kernel} c={c}\n"
            f"    read   x = X[n, c, h + kh - {pad}, w + kw - {pad}]\n    read   k = W[o, c, kh, kw]\n"
            f"    let    s = sum(x*k; kh kw c)\n{behind}    store  Y[n, o, h, w] = y\n")


CASES = {
    "one tile": (layer(2, 16, 64, 8, 8), f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 stages=2"),
    "persistent": (layer(2, 16, 72, 7, 9), f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 programs=3"),
    "in turns": (layer(3, 16, 72, 9, 9, GATED),
                 f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 programs=2 consumers=2"),
    "one step": (layer(3, 16, 40, 9, 9, GATED, kernel=1),
                 f"h:8 w:8 o:16 c:16 | {GLUON} c=box programs=3 consumers=2 stages=4"),
    "another type": (layer(3, 16, 40, 9, 9, types="f32 f16 f16"),
                     f"h:8 w:8 o:16 c:16 | {GLUON} c=box programs=4"),
    "stored apart": (layer(3, 16, 40, 9, 9, GATED),
                     f"h:8 w:8 o:16 c:16 | {GLUON} programs=5 consumers=2"),
    "positions innermost": (layer(2, 16, 64, 8, 16, order="abcd"),
                            f"h:4 w:16 o:64 c:16 | {GLUON} c=box programs=3"),
}


def kernel(text: str, schedule: str) -> ir.Kernel:
    return pipeline.lower(parse(text), Schedule.parse(schedule), SM90, "conv", "ieee")[-1][1]


def fetched(made: ir.Kernel) -> dict[str, str]:
    """The buffers that tensors are fetched to."""
    return {f.tensor.name: f.piece.buffer.name for f in ir.find(made, ir.Fetch)}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_every_pass_gives_the_answer(name: str) -> None:
    text, schedule = CASES[name]
    compute = parse(text)
    found = after_every_pass(compute, build_compute(compute, SM90, Schedule.parse(schedule)))
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]
    assert found[-1][0] == "roles"


def test_the_result_takes_the_place_of_the_first_that_is_alike() -> None:
    assert fetched(kernel(*CASES["in turns"])) == {
        "X": "X_ring", "W": "W_ring", "R": "Y_tile", "G": "G_tile"}
    assert fetched(kernel(*CASES["another type"]))["R"] == "R_tile"
    assert fetched(kernel(*CASES["stored apart"]))["R"] == "R_tile"


@pytest.mark.parametrize("name", ["in turns", "stored apart", "one step"])
def test_only_vectors_are_still_loaded(name: str) -> None:
    made = kernel(*CASES[name])
    assert {x.tensor.name for x in ir.find(made, ir.Load)} == {"B"}
    barriers = {b.name: b.slots for b in ir.find(made, ir.Barrier)}
    assert barriers["brought"] == barriers["emptied"] == 2


class _Without(ir.Mutator):
    """A kernel without the calls that a test takes away."""

    def __init__(self, func: str, barrier: str = "") -> None:
        self.func, self.barrier = func, barrier

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt | None:
        named = at.args[0].name if at.args and isinstance(at.args[0], ir.Barrier) else ""
        return None if at.func.name == self.func and named == self.barrier else at


@pytest.mark.parametrize(("name", "func", "barrier", "says"), [
    ("one step", "wait", "emptied", "is written"), ("one step", "wait", "brought", "is used|is written"),
    ("one step", "send_wait", "", "is written"), ("one step", "fence", "", "fenced")])
def test_the_interpreter_finds_what_is_missing(name: str, func: str, barrier: str, says: str) -> None:
    text, schedule = CASES[name]
    made = _Without(func, barrier).mutate(kernel(text, schedule))
    case = Case(parse(text))
    with pytest.raises(InterpError, match=says):
        for _ in range(3):
            case.interpreted(made)


def reason(text: str, schedule: str) -> str:
    return why_not(Schedule.parse(schedule), parse(text), SM90) or ""


@pytest.mark.parametrize(("behind", "change", "says"), [
    (RESIDUAL, "split_k=3 c=gather", "no tile has its whole sum"),
    (RESIDUAL, "via=tl", "only explicit kernels"),
    ("    let    y = max(s, 0.0)\n", "", "nothing is read behind the sum"),
    ("    read   b = B[o]\n    let    y = s + f32(b)\n", "", "no dimension moves along block h:4"),
    (RESIDUAL.replace("let", "read   q = R[n, o, h, w]\n    let").replace("(r)", "(r*q)"), "",
     "R is read or stored elsewhere, too"),
    (RESIDUAL.replace("h, w", "h, -w + 7"), "", "a box steps by 1"),
    (RESIDUAL.replace("h, w]", "h + 1, w] else 1"), "", "a box is 0 outside of R, 1 is asked for"),
])
def test_why_not(behind: str, change: str, says: str) -> None:
    schedule = Schedule.parse(f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1")
    changed = schedule.with_words(**{w.split("=")[0]: Schedule.parse(w).word(w.split("=")[0])
                                     for w in change.split()})
    assert says in (why_not(changed, parse(layer(2, 16, 64, 8, 8, behind)), SM90) or "")


def test_tiles_of_their_own_take_shared_memory() -> None:
    """Three operands of 128 x 128 for two consumers; the first takes that of the result."""
    text = layer(1, 64, 128, 128, 128, GATED)
    schedule = f"w:128 o:128 c:64 | {GLUON} c=box swap=1 programs=64 consumers=2 stages="
    assert not reason(text, schedule + "3")
    assert "65536 bytes of what is read behind the sum" in reason(text, schedule + "4")
    assert not reason(text, (schedule + "5").replace("behind=box", "behind=gather"))


def test_a_vector_is_told_apart() -> None:
    compute = parse(CASES["in turns"][0])
    told = told_behind(Schedule.parse(CASES["in turns"][1]), compute)
    assert {v.tensor.name: x if isinstance(x, str) else x.extents for v, x in told.items()} == {
        "R": (1, 4, 8, 64), "G": (1, 4, 8, 64), "B": "B: no dimension moves along block h:4"}
