"""Products of bytes, four at a time: answers, the words of a row, chips that multiply one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.stages import SM90
from transconv.compute import parse
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.ir import CALLS, Call, Let, find, i8, u8
from transconv.ir.functions.packed_bytes import BYTES, PRODUCTS, SHIFTED
from transconv.passes import lower
from transconv.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify import computation
from transconv.verify.case import ProblemCase

SCALED = "mul:f32:per_oc+add:s32:common"
CASES = [  # problem, direction, schedule, products of words in a step of the sum
    (
        "g16mb2ic16ih6iw20oc16oh6ow20kh7kw7ph3pw3 dt=s8:s8:s8 tag=nhwc",
        "fwd",
        "mb.oh:2 ow:10 kw:7 g:16 | regs=ow.kw pack=b",
        20,
    ),
    (
        "g16mb2ic16ih9iw9oc16oh9ow9kh3kw3ph1pw1 dt=u8:s8:s8 tag=nhwc",
        "fwd",
        "mb.oh:2 ow:4 kh:3 kw:3 g:16 | regs=ow.kh.kw pack=b",
        12,
    ),
    (
        "g16mb2ic16ih9iw9oc16oh9ow9kh3kw3ph1pw1 dt=s32:u8:s8 tag=nhwc",
        "bwd_d",
        "mb.ih:2 iw:4 kw:3 g:16 | regs=iw.kw pack=b",
        4,
    ),
    (
        "g16mb2ic16ih11iw11oc16oh5ow5kh5kw5sh2sw2ph1pw1 dt=u8:u8:s32 tag=nhwc",
        "fwd",
        "mb.oh:2 ow:5 kw:5 g:16 | regs=ow.kw pack=b",
        8,
    ),
    (
        "g18mb3ic18iw40oc18ow40kw9pw4 dt=s8:s8:s8 tag=nwc",
        "fwd",
        "mb:2 ow:8 kw:9 g:16 | regs=ow.kw pack=b",
        24,
    ),
    (
        "g16mb2ic16ih9iw9oc16oh5ow5kh3kw3sh2sw2ph1pw1 dt=s8:s8:s8 tag=nhwc",
        "fwd",
        "mb.oh.ow:8 g:16 | unroll=1",
        3,
    ),
    ("g16mb2ic16iw20oc16ow20kw7pw3 dt=s8:s8:s8 tag=nwc", "fwd", "mb:4 ow:4 kw:7 g:2 | regs=ow.kw", 0),
    (
        "g16mb2ic16ih6iw9oc16oh6ow9kh2kw2pw1 dt=s8:s8:s8 tag=nhwc",
        "fwd",
        "mb.oh:2 ow:4 kw:2 g:16 | regs=ow.kw pack=b",
        0,
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "prop", "schedule", "products"), CASES)
def test_the_answer_is_right(text: str, prop: str, schedule: str, products: int) -> None:
    p = ConvProblem.parse(text)
    epilogue = SCALED if text.split()[1].endswith("s8") and prop == "fwd" else ""
    case = ProblemCase(p, Prop(prop), epilogue, where="cpu", target=SM90, numpy=True)
    blocks, words = schedule.split("|")
    plan = case.plan(f"{blocks}| fma | stages=1 warps=4 {words}")
    found = case.judge(plan, "exact")
    assert found.right, found.reason
    (kernel,) = (s.lowered().kernel for s in plan.steps if s.does == "compute")
    names = [c.name for c in find(kernel, Call)]
    assert sum(n in PRODUCTS.values() for n in names) == products


def test_a_window_takes_most_words_from_others() -> None:
    """Of 16 elements of a row 4 words are made of bytes, and one of the window."""
    p = ConvProblem.parse("g16mb2ic16iw20oc16ow20kw7pw3 dt=s8:s8:s32 tag=nwc")
    plan = ProblemCase(p, Prop.FWD, "", where="cpu", target=SM90, numpy=True).plan(
        "mb:2 ow:10 kw:7 g:16 | fma | regs=ow.kw pack=b stages=1 warps=4"
    )
    (kernel,) = (s.lowered().kernel for s in plan.steps if s.does == "compute")
    names = [c.name for c in find(kernel, Call)]
    assert sum(n in BYTES.values() for n in names) == 4 + 2
    assert sum(n in SHIFTED.values() for n in names) == 10


def test_names_of_words_are_no_names_of_values() -> None:
    """A value that is named as words are: its elements are word_0, word_1 and so on."""
    compute = parse("""compute named_word
        tensor x s8 [n=2, g=16, w=20] nwc
        tensor y s8 [g=16, c=1, k=7] nwc
        tensor z s32 [n=2, g=16, w=20] nwc
        axes g=16 n=2 w=20 | k=7
        read a = x[n, g, w + k - 3]
        read word = y[g, 0, k]
        store z[n, g, w] = sum(a*word; k)""")
    words = "n:2 w:4 k:7 g:16 | fma | a=gather b=gather | regs=w.k stages=1 warps=4"
    kernel = lower(compute, Schedule.parse(words), SM90, "named")[-1][1]
    names = [let.var.name for let in find(kernel, Let)]
    assert "word_0" in names and len(names) == len({*names})
    assert sum(c.name in PRODUCTS.values() for c in find(kernel, Call)) == 8
    assert not computation.ComputationCase(compute).interpreted(kernel).problem


def test_rows_in_numpy_are_those_of_the_instructions() -> None:
    rng = np.random.default_rng(3)
    for (x, y), name in PRODUCTS.items():
        low, high = {i8: (-128, 128), u8: (0, 256)}[x], {i8: (-128, 128), u8: (0, 256)}[y]
        a, b = rng.integers(*low, (4, 5)).astype(x.numpy), rng.integers(*high, (4, 5)).astype(y.numpy)
        words = [CALLS[BYTES[4]].numpy(*v) for v in (a, b)]
        found = CALLS[name].numpy(*words, np.full(5, 7, np.int32))
        assert found.tolist() == ((a.astype(int) * b.astype(int)).sum(0) + 7).tolist()
    bytes_ = rng.integers(-128, 128, (8, 3)).astype(np.int8)
    first, second = (CALLS[BYTES[4]].numpy(*bytes_[i : i + 4]) for i in (0, 4))
    for n, name in SHIFTED.items():
        assert (CALLS[name].numpy(first, second) == CALLS[BYTES[4]].numpy(*bytes_[n : n + 4])).all()


@pytest.mark.slow
def test_chips_without_the_instruction_multiply_one_by_one() -> None:
    p = ConvProblem.parse(CASES[0][0])
    ((compute, schedule),) = [
        s for s in compiler.plan_steps(p, Prop.FWD, SM90, None, Epilogue()) if s[0].does == "compute"
    ]
    counts = []
    for target in (SM90, replace(SM90, upcast16=True), TARGETS["gfx942"]):
        kernel = lower(compute, schedule, target, "it")[-1][1]
        counts.append(sum(c.name in PRODUCTS.values() for c in find(kernel, Call)))
    assert counts[0] > 0 == counts[1] == counts[2]
