"""Products of factors in blocks as one ``tl.dot_scaled``: the schedule word ``scaled``.

Numbers are compared with the tables of the standard (tests/block_tables.py) in f64. Elements, scales and
sums are such that f32 holds every sum: results are equal, not near.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import transconv
from tests.block_tables import F4E2M1, F8E4M3, F8E8M0, halves
from transconv import ir
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import block_factors, execute, parse
from transconv.passes import lower
from transconv.runtime import build_compute, job_of
from transconv.schedule import Schedule, block_mma, why_not
from transconv.support import ScheduleError, knobs, triton_release
from transconv.target import TARGETS

Array = np.ndarray[Any, Any]
KINDS = {"f8": ("f8e4m3", 1, "f32({})"), "f4": ("u8", 2, "f4e2m1(where(k % 2 == 0, {0} % 16, {0} // 16))")}


@dataclass(frozen=True)
class Product:
    """X [m, k] times W [n, k] of elements ``left`` and ``right``, f8 or f4, and scales ``scale`` (u8: the
    exponents). ``turned``: W and its scales lie with n innermost."""

    left: str = "f8"
    right: str = "f4"
    scale: str = "u8"
    m: int = 20
    n: int = 24
    k: int = 128
    turned: bool = False

    @property
    def size(self) -> int:
        return 32 if self.scale == "u8" else 16

    def text(self) -> str:
        of = "f8e8m0({})" if self.scale == "u8" else "f32({})"
        scales = -(-self.k // self.size)
        lines = ["compute product"]
        for rows, count, name, kind in (("m", self.m, "X", self.left), ("n", self.n, "W", self.right)):
            held, packed, _ = KINDS[kind]
            places = [(name, held, self.k // packed), (f"{name}_s", self.scale, scales)]
            for tensor, dtype, along in places:
                shape = [along, count] if self.turned and rows == "n" else [count, along]
                lines.append(f"    tensor {tensor} {dtype} {shape}")
        lines.append(f"    axes   m={self.m} n={self.n} | k={self.k}")
        for rows, name, kind in (("m", "X", self.left), ("n", "W", self.right)):
            _, packed, value = KINDS[kind]
            at = "k" if packed == 1 else f"k // {packed}"
            pairs = [(rows, at), (rows, f"k // {self.size}")]
            pairs = [p[::-1] for p in pairs] if self.turned and rows == "n" else pairs
            low = name.lower()
            lines.append(f"    read   {low}0 = {name}[{', '.join(pairs[0])}]")
            lines.append(f"    read   {low}1 = {name}_s[{', '.join(pairs[1])}]")
            lines.append(f"    let    {low} = bf16({value.format(low + '0')}*{of.format(low + '1')})")
        return "\n".join([*lines, "    store  Y[m, n] = sum(x*w; k)"])

    def drawn(self) -> tuple[dict[str, Array], Array]:
        """Codes of elements and scales by name, and the result in f64."""
        rng = np.random.default_rng(0)
        small = np.flatnonzero((np.abs(F8E4M3) <= 8) & (F8E4M3 * 2 % 1 == 0))
        scales = (
            np.arange(126, 130)
            if self.scale == "u8"
            else np.flatnonzero(np.isin(F8E4M3, (0.5, 1, 1.5, 3)))
        )
        given, factors = {}, []
        for name, rows, kind in (("X", self.m, self.left), ("W", self.n, self.right)):
            if kind == "f8":
                codes = rng.choice(small, (rows, self.k)).astype(np.uint8)
                values = F8E4M3[codes]
            else:
                codes = rng.integers(0, 256, (rows, self.k // 2)).astype(np.uint8)
                values = F4E2M1[halves(codes)]
            exponents = rng.choice(scales, (rows, -(-self.k // self.size))).astype(np.uint8)
            table = F8E8M0 if self.scale == "u8" else F8E4M3
            factors.append(values * table[exponents].repeat(self.size, 1)[:, : self.k])
            turned = self.turned and name == "W"
            given |= {
                name: codes.T if turned else codes,
                f"{name}_s": exponents.T if turned else exponents,
            }
        return given, factors[0] @ factors[1].T

    def real(self, given: dict[str, Array]) -> dict[str, Array]:
        """What the interpreters of the IR and of computations hold of the codes."""
        floats = {"X": self.left == "f8", "W": self.right == "f8", "X_s": self.scale != "u8"}
        floats["W_s"] = floats["X_s"]
        return {n: F8E4M3[x].astype(np.float32) if floats[n] else x for n, x in given.items()}


PRODUCTS = [
    Product(),
    Product("f4", "f4"),
    Product("f8", "f8", k=96),
    Product("f4", "f8", turned=True),
    Product("f4", "f4", "f8e4m3"),
    Product("f4", "f4", "f8e4m3", k=80, turned=True),
    Product("f8", "f8", m=130, n=16, k=72),
]


def stages_of(text: str, words: str, chip: str) -> list[tuple[str, ir.Kernel]]:
    return lower(parse(text), Schedule.parse(words), TARGETS[chip], "product")


def run(kernel: ir.Kernel, held: dict[str, Array], want: Array) -> Array:
    flat = {n: x.ravel() for n, x in held.items()} | {"Y": np.zeros(want.size, np.float32)}
    found: Array = ir.run(kernel, flat, ["Y"]).buffers["Y"]
    return found.reshape(want.shape)


@pytest.mark.parametrize("more", ["", "swap=1", "programs=1"])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_after_every_pass_numbers_are_those_of_the_tables(product: Product, more: str) -> None:
    given, want = product.drawn()
    held = product.real(given)
    np.testing.assert_array_equal(execute(parse(product.text()), held)["Y"].value, want)
    made = stages_of(product.text(), f"m:128 n:128 k:64 | mma | scaled=1 {more}", "sm_100")
    products = [s for s in ir.find(made[-1][1], ir.FuncCall) if s.func.multiplies]
    assert [s.func.name for s in products] == ["dot_scaled"] and not ir.find(made[-1][1], ir.Call)
    for stage, kernel in made:
        np.testing.assert_array_equal(run(kernel, held, want), want, err_msg=stage)


@pytest.mark.parametrize("passes", ["-lets", "-simplify-hoist-cse", "-reuse-unroll"])
def test_without_a_pass_they_are_the_same(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_PASSES", ",".join(f"-{name}" for name in passes.split("-") if name))
    product = Product("f4", "f4", k=192)
    given, want = product.drawn()
    made = stages_of(product.text(), "m:16 n:16 k:64 | mma | scaled=1", "sm_120")
    np.testing.assert_array_equal(run(made[-1][1], product.real(given), want), want)


WINDOW = """compute window
    tensor X f8e4m3 [9, 64]
    tensor R u8 [9, 2]
    tensor W u8 [17, 3, 32]
    tensor S u8 [17, 3, 2]
    axes   o=9 n=17 | t=3 c=64
    read   a = X[o + t - 1, c]
    read   r = R[o + t - 1, c // 32]
    read   p = W[n, t, c // 2]
    read   s = S[n, t, c // 32]
    let    x = bf16(a*f8e8m0(r))
    let    w = bf16(f8e8m0(s)*f4e2m1(where(c % 2 == 0, p % 16, p // 16)))
    store  Y[o, n] = sum(x*w; t c)
"""


@pytest.mark.parametrize("blocks", ["c:64", "c:32", "t.c:128", "t:2 c:32"])
def test_blocks_of_a_window(blocks: str) -> None:
    """Rows beyond the image are zeros, whatever scale would be there."""
    rng = np.random.default_rng(1)
    x, r = rng.integers(-4, 5, (9, 64)).astype(float), rng.integers(126, 130, (9, 2))
    p, s = rng.integers(0, 256, (17, 3, 32)), rng.integers(126, 130, (17, 3, 2))
    rows = np.pad(x * F8E8M0[r].repeat(32, 1), ((1, 1), (0, 0)))
    w = F4E2M1[halves(p)] * F8E8M0[s].repeat(32, 2)
    want = sum(rows[t : t + 9] @ w[:, t].T for t in range(3))
    held = {
        "X": x.astype(np.float32),
        "R": r.astype(np.uint8),
        "W": p.astype(np.uint8),
        "S": s.astype(np.uint8),
    }
    made = stages_of(WINDOW, f"o:128 n:32 {blocks} | mma | scaled=1", "sm_100")
    for stage, kernel in made:
        np.testing.assert_array_equal(run(kernel, held, want), want, err_msg=stage)


REFUSED = [
    (
        Product(),
        "m:128 n:64 k:64 | mma",
        "sm_90",
        "the matrix unit of sm_90 does not multiply f8e4m3 by f4e2m1",
    ),
    (
        Product(),
        "m:128 n:64 k:64 | mma",
        "sm_120",
        "at best tl.dot_scaled makes 16-bit floats of both there",
    ),
    (Product("f4", "f4", "f8e4m3"), "m:64 n:64 k:64 | mma", "gfx950", "with scales of f8e4m3 for 16"),
    (Product(), "m:64 n:64 k:64 | mma", "sm_100", "take a tile of 128x16x32 or more"),
    (Product("f4", "f4"), "m:128 n:64 k:32 | mma", "sm_100", "take a tile of 128x16x64 or more"),
    (
        Product(),
        "m:128 n:64 k:16 | mma",
        "sm_100",
        "expected a multiple of 32 of it as the innermost block",
    ),
    (Product(), "m:128 n:64 k:64 | mma | warps=2", "sm_100", "4 warps multiply blocks together, not 2"),
    (Product(), "m:128 n:64 k:64 | fma", "sm_100", "tl has products in blocks, of whole tiles"),
]


@pytest.mark.parametrize(("product", "words", "chip", "reason"), REFUSED)
def test_why_not(product: Product, words: str, chip: str, reason: str) -> None:
    said = why_not(Schedule.parse(f"{words} scaled=1"), parse(product.text()), TARGETS[chip])
    assert said is not None and said.startswith("scaled=1: ") and reason in said


NONE = [
    ("bf16(f32(x0)*f8e8m0(x1))", "f16(f32(x0)*f8e8m0(x1))", "x is rounded to f16"),
    ("bf16(f32(x0)*f8e8m0(x1))", "bf16(f32(x0)*x1)", "x is no product of elements of 8 or 4 bits"),
    ("bf16(f32(x0)*f8e8m0(x1))", "bf16(f32(x0)*f8e8m0(x1) + 1)", "x is no product of elements"),
    ("w0 % 16, w0 // 16", "w0 // 16, w0 % 16", "w is no product of elements"),
    ("X_s[m, k // 32]", "X_s[m, k // 32 + 0*m] else 255", "x is no product of elements"),
    ("X_s[m, k // 32]", "X_s[m, (k + 1) // 33]", "x is no product of elements"),
    (
        "X_s[m, k // 32]",
        "X_s[m, k // 64]",
        "64 neighbours along k share a scale (f8e8m0) in one factor, 32",
    ),
]


@pytest.mark.parametrize(("old", "new", "reason"), NONE)
def test_what_is_not_in_blocks(old: str, new: str, reason: str) -> None:
    text = Product().text()
    assert old in text
    if "f16(" in new and "bf16" not in new:  # factors of a product have one type
        text = text.replace("bf16(", "f16(")
    found = block_factors(parse(text.replace(old, new)))
    assert isinstance(found, str) and reason in found


def test_sizes_of_rows_may_be_arguments() -> None:
    text = (
        Product("f8", "f8", m=40)
        .text()
        .replace("compute product", "compute product\n    sizes  M=40 in 1..4096")
    )
    text = text.replace("f8e4m3 [40, 128]", "f8e4m3 [M, 128]").replace("u8 [40, 4]", "u8 [M, 4]")
    product = Product("f8", "f8", m=40)
    made = stages_of(text.replace("m=40", "m=M"), "m:128 n:32 k:64 | mma | scaled=1", "sm_120")
    given, want = product.drawn()
    kernel = made[-1][1].at({"M": 40})
    np.testing.assert_array_equal(run(kernel, product.real(given), want), want)


def test_chips_that_take_scales_choose_them() -> None:
    for chip, chooses in (("sm_90", False), ("sm_100", True), ("sm_120", True), ("gfx950", True)):
        plan = build_compute(parse(Product("f8", "f8", m=512, n=512, k=512).text()), TARGETS[chip])
        assert ("tl.dot_scaled" in plan.source) is chooses


SEEN = [
    ("sm_100", Product("f8", "f8"), "ptx", r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale"),
    ("sm_100", Product("f8", "f4"), "ptx", r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale"),
    ("sm_100", Product("f4", "f4"), "ptx", r"tcgen05\.mma\S*kind::mxf4\.block_scale"),
    ("sm_100", Product("f4", "f4", "f8e4m3"), "ptx", r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale"),
    ("sm_120", Product("f8", "f8"), "ptx", r"mma\.sync\S*kind::mxf8f6f4\.block_scale\S*ue8m0"),
    ("sm_120", Product("f4", "f4"), "ptx", r"mma\.sync\S*kind::mxf4nvf4\.block_scale\S*ue8m0"),
    ("sm_120", Product("f4", "f4", "f8e4m3"), "ptx", r"mma\.sync\S*kind::mxf4nvf4\.block_scale\S*ue4m3"),
    ("gfx950", Product("f8", "f8"), "amdgcn", r"v_mfma_scale_f32_\w+_f8f6f4"),
    ("gfx950", Product("f8", "f4"), "amdgcn", r"v_mfma_scale_f32_\w+_f8f6f4"),
    ("gfx950", Product("f4", "f4"), "amdgcn", r"v_mfma_scale_f32_\w+_f8f6f4"),
]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_instruction_is_in_the_machine_code(whole: bool) -> None:
    """At the smallest tiles that the rule allows, and at larger ones."""
    jobs, wanted = [], []
    for chip, product, kept, instruction in SEEN if whole else SEEN[::4]:
        compute = parse(replace(product, m=256, n=256, k=512).text())
        unit = block_mma(compute, TARGETS[chip])
        assert unit is not None
        for m, n, k in (*unit.least, *[(128, 128, 128)] * whole):
            words = Schedule.parse(f"m:{m} n:{n} k:{k} | mma | scaled=1")
            plan = build_compute(compute, TARGETS[chip], words)
            jobs.append(job_of(plan.steps[0], TARGETS[chip], kept, words=False))
            wanted.append(instruction)
    for found, instruction in zip(compile_offline(jobs), wanted, strict=True):
        assert isinstance(found, Resources), found
        (text,) = found.texts.values()
        assert re.search(instruction, text), (found, instruction)


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_in_tritons_interpreter() -> None:
    """That of 3.6 has no dot_scaled, which is said; that of 3.9 has."""
    product = Product(m=32, n=48)
    words = "m:16 n:16 k:64 | mma | scaled=1"
    if triton_release() < (3, 9):
        with pytest.raises(ScheduleError, match=r"no products in blocks on interpreter, 3\.9 has"):
            transconv.compile(product.text(), "interpreter", words)
        return
    given, want = product.drawn()
    y = torch.empty(product.m, product.n)
    held = {n: torch.from_numpy(x) for n, x in given.items()}
    held["X"] = held["X"].view(torch.float8_e4m3fn)
    transconv.compile(product.text(), "interpreter", words).launch(**held, Y=y)
    np.testing.assert_array_equal(y.numpy(), want)
