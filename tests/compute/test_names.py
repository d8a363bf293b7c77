"""Names, characters and depth of texts: one rule for all that is read, and one error of the room's own."""

from __future__ import annotations

import importlib.util
import keyword
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import transconv
from transconv.backend_triton.emitters import triton
from transconv.compute import OPS, parse
from transconv.compute.analysis.pointwise import pointwise
from transconv.conv import ConvProblem
from transconv.conv.epilogue import post_op
from transconv.errors import ComputeError, KernelError, TransconvError
from transconv.ir import LAUNCH, Layout, f32, why_not_name
from transconv.ir.reader import parse_kernel
from transconv.kernel import Group
from transconv.schedule import Schedule

BOUNDS = ("lt", "le", "gt", "ge", "eq", "ne")
TEXT = """compute {title}
    tensor {tensor} f32 [{dim}=6]
    axes   {axis}=6
    read   {value} = {tensor}[{axis}]
    read   ab = I[{axis}]
    tensor I i32 [6]
    store  {out}[{axis}] = {value} - ab"""
PLAIN = {"title": "c", "tensor": "X", "dim": "d", "axis": "n", "value": "a", "out": "Y"}
IR = """kernel {title}({tensor}: f32, Y: f32):
    # {tensor}: 4a [n=4]
    # Y: 4a [n=4]
    lanes l[0:4 axis=0]
    for {axis} in 0..1 grid:
        let {value} = load({tensor}, {axis} + l[0:4])
        store(Y, {axis} + l[0:4], {value} + 1.0)"""
FAR = [
    "aｂ",
    "tｌ",
    "x²",
    "xª",
    "__debug__",
    "é",
    "ß",
    "ﬁt",
    "µ",
    "x\u0301",
    "x\u200b",
    "x\x00",
    "x" * 161,
    "__class__",
    "1x",
    "",
    "x y",
    "x-y",
    "x.y",
    "ａ",
    "８",
]


def drawn(count: int, seed: int) -> list[str]:
    """Names of letters of all alphabets and of reserved words."""
    rng = random.Random(seed)
    letters = [chr(c) for c in range(0x21, 0x3000) if unicodedata.category(chr(c))[0] in "LN"]
    letters += [chr(c) for c in range(0xFF01, 0xFF5F)] + list("abcxyz_019") * 40
    words = [
        *keyword.kwlist,
        *keyword.softkwlist,
        *LAUNCH,
        "tl",
        "triton",
        "float",
        "range",
        "inf",
        "nan",
        "tanh",
        "print",
        "int",
        "self",
        "_",
        "l",
    ]
    found = [*FAR, *words]
    while len(found) < count:
        found.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 4))))
    return found


@pytest.mark.parametrize("role", sorted(PLAIN))
def test_a_name_of_a_text_is_plain_or_refused(role: str) -> None:
    """What is read has exactly the name that the text has, by the one rule."""
    for name in drawn(200, 1):
        text = TEXT.format(**PLAIN | {role: name})
        try:
            made = parse(text)
        except ComputeError as error:
            assert "line " in str(error) and "\n" not in str(error), name
            continue
        held = {
            made.name,
            *(t.name for t in made.tensors),
            *(x.name for x in made.axes),
            *(s.var.name for s in made.steps if hasattr(s, "name")),
            *(d for t in made.tensors for d in t.dims),
        }
        assert name in held or role == "dim", name
        assert not why_not_name(name) or (role == "dim" and name.isascii()), name


@pytest.mark.parametrize("role", ["title", "tensor", "axis", "value"])
def test_a_name_of_a_kernel_is_plain_or_refused(role: str) -> None:
    for name in drawn(150, 2):
        text = IR.format(**{"title": "k", "tensor": "X", "axis": "p", "value": "v"} | {role: name})
        try:
            made = parse_kernel(text)
        except KernelError as error:
            assert "line " in str(error), name
            continue
        assert not why_not_name(name), name
        assert parse_kernel(str(made)) == made
        compile(triton.emit(made), "text", "exec")


@pytest.mark.parametrize("role", ["title", "tensor", "value", "axis", "out"])
def test_reserved_names_give_the_right_numbers(role: str) -> None:
    """Also those that Triton's launches have, in every place of a text."""
    transconv.config.cpu = "interpret"
    x, i = torch.randn(6), torch.arange(6, dtype=torch.int32)
    for name in ("num_warps", "num_stages", "options", "debug", "_", "tanh"):
        run = transconv.computation(TEXT.format(**PLAIN | {role: name}))
        transconv.stats(reset=True)
        torch.testing.assert_close(run(x, i), x - i)
        assert transconv.stats().native and not transconv.stats().fallback


def test_parameters_are_not_called_as_what_launches_pass() -> None:
    for name in sorted(LAUNCH):
        plan = transconv.compile(parse(TEXT.format(**PLAIN | {"tensor": name})), target="sm_90")
        head = next(line for line in plan.source.splitlines() if line.startswith("def c"))
        assert f"({name}," not in head and f" {name}," not in head and f" {name})" not in head


@pytest.mark.parametrize("name", sorted(LAUNCH & {"num_warps", "options", "grid"}))
def test_sizes_are_not_called_so(name: str) -> None:
    with pytest.raises(ComputeError, match=r"line 2: .*Triton's launches"):
        parse(f"compute c\n sizes {name}=8 in 1..64\n axes n={name}\n read x = X[n]\n store Y[n] = x")


BAD = [
    "a // 2",
    "a % 2",
    "a // i",
    "not a",
    "a and a",
    "a or i",
    "~a",
    "~i",
    "not i",
    "i and i",
    "where(a, a, a)",
    "where(i, a, a)",
    "7 // 2.0",
    "inf // 2",
    "i + 3000000000",
    "a if a else a",
    "(lambda: a)()",
    "a[0]",
    "a.real",
    "'a'",
    "1j",
    "a @ a",
    "f'{a}'",
    "a := 1",
    "*a",
    "\x00a",
    "a\x0b+a",
]
BAD += [
    "a+" * 3000 + "a",
    "a+" * 300 + "a",
    "-" * 500 + "a",
    "(" * 3000 + "a" + ")" * 3000,
    "abs(" * 150 + "a" + ")" * 150,
    "a>0 and (" * 150 + "a>0" + ")" * 150,
    "aｂ - ab",
    "ａ",
    "(" * 11 + "a" + "**8)" * 11,
    "not " * 400 + "(a>0)",
]


@pytest.mark.parametrize("value", BAD, ids=lambda v: v[:12])
def test_what_no_text_means_is_refused_with_its_line(value: str) -> None:
    text = "compute c\n axes n=6\n tensor I i32 [6]\n read a = X[n]\n read i = I[n]\n store Y[n] = "
    text += value
    with pytest.raises(ComputeError, match=r"^line \d"):
        parse(text)


@pytest.mark.parametrize("value", ["a+" * 90 + "a", "(" * 60 + "a" + ")" * 60, "-" * 80 + "a"])
def test_what_is_deep_but_read_is_computed(value: str) -> None:
    """No pass behind the reader runs out of calls, not even far from the bottom of the stack."""
    transconv.config.cpu = "interpret"
    text = f"compute c\n axes n=6\n read a = X[n]\n store Y[n] = {value}"
    run = transconv.computation(text)
    x = torch.arange(6.0)
    want = x * 91 if "+" in value else x

    def deep(calls: int) -> torch.Tensor:
        return deep(calls - 1) if calls else run(x)

    torch.testing.assert_close(deep(200), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_operations_of_integers_are_exact(dtype: torch.dtype) -> None:
    """Every operation by its name, where f32 has no such numbers."""
    transconv.config.cpu = "interpret"
    end, bits = torch.iinfo(dtype).max, torch.iinfo(dtype).bits
    x = torch.tensor([end, -end, 2**24 + 1, 5, 0, -3], dtype=dtype)
    y = torch.tensor([end - 1, -end, 2**24, 7, 0, 3], dtype=dtype)
    theirs = {"max": torch.maximum, "min": torch.minimum, "relu6": torch.nn.functional.relu6}
    ops = [o for o in OPS.values() if o.exact and o.arity < 3 and not o.numbers]
    types = ["boolean" if o.name in BOUNDS else f"i{bits}" for o in ops]
    lines = ["compute c", f"tensor X i{bits} [6]", f"tensor Y i{bits} [6]", "axes n=6"]
    lines += [f"tensor Z{i} {t} [6]" for i, t in enumerate(types)] + ["read a = X[n]", "read b = Y[n]"]
    lines += [f"store Z{i}[n] = {o.name}({', '.join('ab'[: o.arity])})" for i, o in enumerate(ops)]
    made = transconv.computation("\n".join(lines))(x, y)
    assert len(ops) == len(made) > 12
    for op, got in zip(ops, made, strict=True):
        want = (theirs.get(op.name) or getattr(torch, op.name))(*(x, y)[: op.arity])
        assert torch.equal(got, want), op.name


def test_lines_of_a_kernel_are_not_too_deep() -> None:
    for value in ("(" * 3000 + "v" + ")" * 3000, "~" * 3000 + "v", "-" * 3000 + "v"):
        with pytest.raises(KernelError, match="line 6: found more than"):
            parse_kernel(
                IR.format(title="k", tensor="X", axis="p", value="v").replace("load(X, p + l[0:4])", value)
            )
    blocks = "".join(f"{'    ' * n}if True:\n" for n in range(1, 300))
    with pytest.raises(KernelError, match="a block inside"):
        parse_kernel("kernel k():\n" + blocks)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (ConvProblem.parse, "mb８ic64ih28oc64oh28kh3ph1"),
        (ConvProblem.parse, "mb8ic64ih28oc64kh3 tag=nｈwc"),
        (Schedule.parse, "m:６4 oc:64"),
        (Schedule.parse, "mb.oｈ:64"),
        (Schedule.parse, "m:64 | stages=３"),
        (post_op, "relu:０.5"),
        (post_op, "prelu:per_ｏc"),
        (lambda t: Layout.parse(t, f32, (8, 4)), "８a4b"),
        (pointwise, "accｂ + 1"),
        (pointwise, "acc+" * 3000 + "acc"),
        (pointwise, "acc\x00"),
    ],
)
def test_other_alphabets_are_refused_in_every_text(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(TransconvError):
        read(text)


KERNEL = """import numpy as np
from transconv.kernel import kernel

@kernel
def fun(group, {name}, out):
    i, = group.work_offset()
    {local} = np.tanh(group.load({name}[i:], shape=8))
    group.store(out[i:], {local}{more})
"""


def compiled(path: Path, **words: str) -> object:
    """A kernel of a file of its own."""
    path.write_text(KERNEL.format(**{"name": "x", "local": "y", "more": ""} | words), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fun


@pytest.mark.parametrize(
    "name", ["ｂ", "xª", "num_warps", "options", "grid", "tl", "float", "tanh", "self"]
)
def test_arguments_of_kernels_may_be_called_like_what_kernels_call(name: str, tmp_path: Path) -> None:
    """Python itself makes plain letters of those that look like them."""
    transconv.config.cpu = "interpret"
    x, out = torch.linspace(-2, 2, 16), torch.zeros(16)
    compiled(tmp_path / f"named_{ord(name[-1])}_{len(name)}.py", name=name)(Group(16, 8), x, out)  # type: ignore[operator]
    torch.testing.assert_close(out, torch.tanh(x))


@pytest.mark.parametrize(
    "words",
    [
        {"name": "é"},
        {"name": "inf"},
        {"name": "__x__"},
        {"name": "x" * 161},
        {"local": "ß"},
        {"local": "y" * 161},
        {"more": " + 1.0" * 300},
        {"more": " + 1.0" * 5000},
    ],
    ids=lambda w: str(w)[:16],
)
def test_other_names_and_depths_of_kernels_are_refused_with_the_line(
    words: dict[str, str], tmp_path: Path
) -> None:
    transconv.config.cpu = "interpret"
    try:
        made = compiled(tmp_path / "refused.py", **words)
    except (RecursionError, KernelError):  # Python's own, where it cannot read the file
        return
    with pytest.raises(KernelError, match=r"refused.py:\d+"):
        made(Group(16, 8), torch.zeros(16), torch.zeros(16))  # type: ignore[operator]
