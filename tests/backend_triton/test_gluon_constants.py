"""Constants of every type in the text of a Gluon kernel: they compile, and machine code stores the numbers
that the interpreter of the IR does. Nothing interprets Gluon: what LLVM folds is read from its text. It
folds no conversion to 8-bit floats, which machine instructions make."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from tests import constants
from transconv import ir
from transconv.backend_triton import CompileJob, Resources, compile_offline
from transconv.backend_triton.emitters import gluon
from transconv.ir import Call, Cast, DType, Expr, Kernel, Load, Reduce, Select, Stmt, find, helpers, walk

pytest.importorskip("triton.experimental.gluon")

LAYOUT = "gl.BlockedLayout([1], [32], [4], [0])"
STORED = re.compile(r'asm sideeffect "[^"]*st\.global[^"]*", "[^"]*"\((i\d+|<\d+ x i\d+>) (\S+), ptr')


def text(kernel: Kernel) -> str:
    """The module of a kernel without roles: one function, whose tiles have the layout of sums."""
    assert isinstance(kernel.body, ir.For)
    emitter = gluon.GluonEmitter((), 4, 0, False)
    own = helpers(
        {c.name for c in find(kernel, Call)},
        {c.type for c in find(kernel, Cast)},
        {r.op for r in find(kernel, Reduce)},
        "gluon.jit",
        "gl",
    )[1:]
    return "\n".join(
        [
            *gluon.IMPORTS.splitlines(),
            *own,
            "",
            "@gluon.jit",
            f"def {kernel.name}({', '.join(p.name for p in kernel.params)}):",
            f"    sums: gl.constexpr = {LAYOUT}",
            f"    m = gl.arange(0, {constants.LANES}, sums)",
            "    pid = gl.program_id(0)",
            *emitter.block(kernel.body.body),
            "",
        ]
    )


def compiled(kernel: Kernel, arch: int) -> str:
    """LLVM's text of a kernel."""
    params = tuple((p.dtype.name, ()) for p in kernel.params)
    job = CompileJob(
        text(kernel),
        kernel.name,
        params,
        f"sm_{arch}",
        "cuda",
        arch,
        32,
        keep=("llir",),
        explicit=True,
        words=False,
    )
    (found,) = compile_offline([job])
    assert isinstance(found, Resources), found
    return found.texts["llir"]


def is_known(before: tuple[Stmt, ...], value: Expr) -> bool:
    """Whether a case is the same in every lane, and computed of constants by what LLVM folds."""
    nodes = [n for part in (*before, value) for n in walk(part)]
    return not any(
        isinstance(n, (Load, Call, Reduce))
        or (isinstance(n, Select) and constants.LANE in set(walk(n.cond)))
        for n in nodes
    )


def known_cases(of: DType) -> tuple[Kernel, list[str]]:
    """A kernel that stores what is known when it is compiled, and a line for each store."""
    arithmetic, stmts = constants.is_computed(of, "cuda"), list[Stmt]()
    names = list[str]()
    for i, c in enumerate(constants.constants(of)):
        for j in range(len(list(constants.cases(c, arithmetic)))):
            before, value = list(constants.cases(c, arithmetic, f"{i}_{j}"))[j]
            if is_known(before, value):
                at = constants.LANE + len(names) * constants.LANES
                stmts += [*before, ir.store(constants.tensor("out", of, 1 << 16), at, value)]
                names.append("; ".join(map(str, (*before, value))))
    return Kernel(
        "known", (constants.tensor("out", of, 1 << 16),), ir.For(constants.PID, 1, ir.seq(*stmts), "grid")
    ), names


@functools.cache
def wanted(of: DType) -> np.ndarray:
    """The numbers that the interpreter stores, in the type that it computes in."""
    made, names = known_cases(of)
    out = np.zeros(1 << 16, of.numpy)
    with np.errstate(all="ignore"):
        ir.run(made, {"out": out})
    return out[: len(names) * constants.LANES : constants.LANES]


def bits(values: np.ndarray, of: DType) -> np.ndarray:
    """What memory of a type holds of these numbers; a truth takes a byte."""
    import torch

    held = torch.from_numpy(values.copy()).to(getattr(torch, of.torch))
    return held.view(getattr(torch, f"uint{max(8, of.bits)}")).numpy()


def numbers(found: np.ndarray, of: DType) -> np.ndarray:
    """What bits in memory mean; NaNs of all kinds are one."""
    import torch

    whole = torch.from_numpy(found).view(getattr(torch, of.torch))
    return (whole.double() if of.kind == "float" else whole).numpy()


@pytest.mark.every(8)
@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", [t for t in constants.TYPES if not t.is_short], ids=str)
def test_constants_keep_their_type_and_their_number(of: DType, arch: int) -> None:
    made, names = known_cases(of)
    ir.verify(made)
    stored = STORED.findall(compiled(made, arch))
    assert len(stored) == len(names) >= 10
    width = max(8, of.bits)
    assert {kind for kind, _ in stored} == {f"i{width}"}, "all are stored in their own type"
    assert [x for _, x in stored if x.startswith("%")] == [], "all are known to the compiler"
    got = np.array([int(x) & ((1 << width) - 1) for _, x in stored], f"uint{width}")
    want = bits(wanted(of), of)
    a, b = numbers(got, of), numbers(want, of)
    wrong = [
        f"{n}: {x} instead of {y}"
        for n, x, y, p, q in zip(names, a, b, got, want, strict=True)
        if p != q and not (x != x and y != y)
    ]
    assert wrong == []


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "of",
    [
        t if t in (ir.bf16, ir.f64, ir.u8) else pytest.param(t, marks=pytest.mark.slow)
        for t in constants.TYPES
    ],
    ids=str,
)
def test_constants_compile_in_every_place(of: DType) -> None:
    """Beside tiles that come from memory, in loads, reductions and functions too."""
    made, _ = constants.kernel(of, "cuda")
    assert "st.global" in compiled(made, 90)
