"""The text of computations: what it says, reads back, and how it is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from transconv.compute import Alone, Compute, execute, one_line, parse
from transconv.conv import ConvProblem, Prop, computes
from transconv.errors import ComputeError
from transconv.ir import f16, f32, f64
from transconv.runtime import Plan, build_compute, plan
from transconv.target import TARGETS, Target
from transconv.verify.computation import after_every_pass

SM90 = TARGETS["sm_90"]
ROOT = Path(__file__).parents[2]
TEXTS = sorted((ROOT / "bench" / "computes").glob("*.txt"))
POOL = """
compute pool                                      # a remark
    tensor x f16 [n=2, c=3, h=9, w=8] nhwc
    axes   n=2 c=3 oh=5 ow=4 | kh=3 kw=3
    read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
    let    most = max(a; kh kw)
    store  y[n, c, oh, ow] = most
"""


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_texts_read_back_and_are_short(path: Path) -> None:
    made = parse(path.read_text())
    assert parse(str(made)) == made
    assert str(parse(str(made))) == str(made)
    assert len(path.read_text().splitlines()) <= 10  # the heading, and at most nine lines


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_a_text_fits_one_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "\n" not in one_line(text) and parse(one_line(text)) == parse(text)


def test_what_a_text_says() -> None:
    made = parse(POOL)
    assert [t.name for t in made.tensors] == ["x", "y"]
    assert made.a.tensor.dtype is f16 and made.c.tensor.dtype is f32
    assert made.c.tensor.shape == (2, 3, 5, 4)  # as far as it is stored
    assert made.kinds == {"n": "M", "c": "M", "oh": "M", "ow": "M", "kh": "K", "kw": "K"}
    assert made.reads[0].fill == float("-inf")
    assert str(made.a.mask()) != "True"  # rows and columns leave the image
    assert str(made.c.mask()) == "True"


@pytest.mark.parametrize(
    "fill",
    [
        "3",
        "-inf",
        "0.5",
        "1e+06",
        "1234567",
        "1234568",
        "16777217.0",
        "0.1234567",
        "0.12345678",
        "-1e-300",
        "2147483648",
    ],
)
def test_every_digit_of_a_fill_is_kept(fill: str) -> None:
    """Plans are kept by their texts: texts that drop a digit give one kernel to two computations."""
    made = parse(POOL.replace("-inf", fill).replace("f16", "f64"))
    again = parse(str(made))
    assert again == made and made.reads[0].fill == again.reads[0].fill == float(fill)


@pytest.mark.parametrize(
    ("type", "right", "wrong"),
    [
        ("f16", "65504 -inf 0.1", "70000 -1e9"),
        ("bf16", "3e38 inf", "3.4e38 1e39"),
        ("f32", "3.4e38 -inf 0.1", "1e39"),
        ("f64", "1e300 inf", ""),
        ("f8e4m3", "448 0.3", "500 -449"),
        ("f8e5m2", "57344", "1e6"),
        ("i8", "-128 127", "128 -129 0.5 inf"),
        ("u8", "0 255", "-1 256"),
        ("i32", "2147483647", "2147483648 -inf"),
        ("boolean", "0 1", "2 0.5"),
    ],
)
def test_a_fill_is_a_number_of_its_tensors_type(type: str, right: str, wrong: str) -> None:
    """Kernels hold it in this type: of another number they and the exact answer would have two."""
    text = (
        POOL.replace("f16", type)
        .replace("let    most = max(a; kh kw)\n    store", "store")
        .replace("= most", "= max(a; kh kw)")
    )
    for fill in right.split():
        assert parse(text.replace("-inf", fill)).reads[0].fill == float(fill)
    for fill in wrong.split():
        with pytest.raises(
            ComputeError,
            match=f"line 5: .*: else {fill} is no number of {type}; expected "
            "one that elements of 'x' may have",
        ):
            parse(text.replace("-inf", fill))


@pytest.mark.parametrize(
    ("type", "fill"),
    [("f16", "0.1"), ("bf16", "1e30"), ("f8e4m3", "0.3"), ("i32", "1234567"), ("f32", "-3")],
)
def test_the_answer_has_the_fill_that_kernels_have(type: str, fill: str) -> None:
    compute = parse(
        f"compute shifted\n tensor X {type} [n=32]\n tensor Y f64 [n=40]\n axes n=40\n"
        f" read x = X[n - 4] else {fill}\n store Y[n] = x"
    )
    made = plan(Alone(compute), SM90, None, False, Plan)
    assert not [found.problem for _, found in after_every_pass(compute, made) if found.problem]


def test_fills_that_differ_have_kernels_that_differ() -> None:
    sources = [
        plan(Alone(parse(POOL.replace("-inf", fill).replace("f16", "f32"))), SM90, None, False, Plan)
        .steps[0]
        .source
        for fill in ("1234567", "1234568")
    ]
    assert ["other=123456" + digit in source for source in sources for digit in "78"] == [
        True,
        False,
        False,
        True,
    ]


def test_kinds_of_products_are_computed() -> None:
    made = parse(
        "compute p\n axes b=2 m=3 n=4 k=5\n read x = X[b, m, k]\n read w = W[b, k, n]\n"
        "let s = sum(x*w; k)\n store Y[b, m, n] = s"
    )
    assert made.kinds == {"b": "B", "m": "M", "n": "N", "k": "K"}
    assert made.factors is not None and made.b is not None
    square = parse("compute p\n axes m=3 k=5\n read x = X[m, k]\nstore Y[m] = sum(x**2; k) / 5")
    assert square.factors is None and square.kinds == {"m": "M", "k": "K"}


def test_a_tensor_without_dimensions() -> None:
    made = parse("compute p\n tensor s f32 []\n axes m=3\n read x = X[m]\n read y = s[]\nstore Y[m] = x*y")
    assert made.reads[1].view.tensor.shape == () and parse(str(made)) == made
    total = parse("compute p\n axes | m=3\n read x = X[m]\n store Y[] = sum(x; m)")
    assert total.c.tensor.shape == () and parse(str(total)) == total


def test_types() -> None:
    double = parse("compute p\n tensor X f64 [3]\n axes m=3\n read x = X[m]\n store Y[m] = x + 1")
    assert double.c.tensor.dtype is f64
    moved = parse(
        "compute p\n tensor X f16 [3]\n tensor Y f16 [3]\n axes m=3\n read x = X[2 - m]\nstore Y[m] = x"
    )
    assert moved.moves and str(moved.writes[0].value) == "x"  # keeps its bits


def test_selections_and_conditions_of_stores_read_back() -> None:
    made = parse(
        "compute p\n axes m=3 n=4\n read x = X[m, n]\n"
        "store Y[m, n] where m <= n and n % 2 == 0 = where(x == 1, x, 2)"
    )
    assert "where m <= n and n % 2 == 0 = where(x == 1" in str(made)
    assert parse(str(made)) == made


@pytest.mark.parametrize("prop", Prop)
def test_convolutions_print_as_texts_that_read_back(prop: Prop) -> None:
    problem = ConvProblem.parse("mb2g2ic8ih9oc8oh5kh3sh2ph1 dt=f16 tag=nhwc")
    for made in computes(problem, prop):
        again = parse(str(made))
        assert isinstance(again, Compute)
        assert again.tensors == made.tensors and again.kinds == made.kinds
        assert str(parse(str(again))) == str(again)


HEAD = "compute p\n axes m=3 k=5\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: a computation begins with 'compute NAME'"),
        ("axes m=3", "line 1: a computation begins"),
        ("compute p\nfoo", "line 2: 'foo' is unknown; expected one of"),
        ("compute p\n axes m", "line 2: axis 'm'; expected name=size"),
        ("compute p\n axes m=3 m=4", "line 2: axis 'm' is named twice"),
        ("compute p\n axes pid=3", "'pid' is a word of generated kernels"),
        ("compute p\n axes m=3", "nothing is stored"),
        (
            HEAD + "read x = X[m, k]\nstore Y[m] = z",
            "store 'Y[m] = z': 'z' is not known; expected one of m k x",
        ),
        (
            HEAD + "read x = X[m, k]\nstore Y[m] = sum(x; q)",
            "'q' in sum(...; q) is no axis; expected some of m k",
        ),
        (HEAD + "read x = X[m, k]\nstore Y[m] = swish(x)", "swish(...) of 1 values is unknown"),
        (HEAD + "read x = X[m, k\nstore Y[m] = x", "expected tensor[coordinates]"),
        (HEAD + "read x = X[m, k] else much\nstore Y[m] = x", "else much; expected a number"),
        (
            HEAD + "read x = X[m, k]\nlet x = 1\nstore Y[m] = x",
            "'x' is an axis, a size or a value already",
        ),
        (HEAD + "read x = X[m / 2]\nstore Y[m] = x", "expected whole numbers"),
        (HEAD + "tensor X f16 [3]\nread x = X[m, k]\nstore Y[m] = x", "X has 1 dimensions, 2 coordinates"),
        (HEAD + "tensor X q9 [3]\nread x = X[m]\nstore Y[m] = x", "'q9' is no type; expected one of i8"),
        (HEAD + "read x = X[m, k]\nstore Y[m] = sum((x; k)", "open parenthesis"),
        ("compute p math=odd\n axes m=3", "'math=odd' is unknown"),
        *(
            (
                f"compute p\n{before}\n sizes M=8 in 1..9",
                "sizes stand in one line, before tensors and axes",
            )
            for before in (" sizes K=8 in 1..9", " tensor X f16 [3]", " axes m=3")
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ComputeError) as error:
        parse(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["True", "False"])
def test_words_of_truth_are_conditions(word: str) -> None:
    """And not numbers: a condition that never holds broke a rule of the IR."""
    made = parse(f"compute never\n axes n=4\n read x = X[n] where {word}\n store Y[n] = x + 1")
    assert after_every_pass(made, build_compute(made, Target.parse("sm_90")))[-1][1].problem == ""
    assert execute(made, {"X": np.ones(4)})["Y"].value.tolist() == [1.0 + (word == "True")] * 4


def drawn(rng: random.Random, depth: int, kind: str = "float") -> str:
    """The text of an expression of x, y (floats), i (integers) and n (a position)."""
    if kind == "truth":
        if depth and rng.random() < 0.4:
            one, two = (drawn(rng, depth - 1, kind) for _ in range(2))
            return rng.choice((f"(not {one})", f"({one} and {two})", f"({one} or {two})"))
        of = rng.choice(("float", "whole"))
        sign = rng.choice(("<", "<=", ">", ">=", "==", "!="))
        return f"({drawn(rng, depth - 1, of)} {sign} {drawn(rng, depth - 1, of)})"
    if depth <= 0:
        return rng.choice(("x", "y", "0.5", "3.0") if kind == "float" else ("i", "n", "2", "3"))
    one, two = (drawn(rng, depth - 1, kind) for _ in range(2))
    if rng.random() < 0.2:
        return f"where({drawn(rng, depth - 1, 'truth')}, {one}, {two})"
    if rng.random() < 0.15:
        return f"({rng.choice(('min', 'max'))}({one}, {two}))"
    sign = rng.choice("+-*" if kind == "float" else ("+", "-", "*", "//", "%"))
    made = f"{one} {sign} {two if sign in '+-*' else rng.choice('235')}"
    return rng.choice((made, f"({made})", f"-({made})", f"-{one}"))


@pytest.mark.slow
def test_drawn_texts_mean_what_python_says() -> None:
    """And print as texts of the same meaning, with as few brackets as they need."""
    x, y = (np.random.default_rng(s).integers(-9, 10, 12) / 4 for s in (1, 2))
    i = np.random.default_rng(3).integers(-7, 8, 12)
    words = {"where": lambda c, a, b: a if c else b, "min": min, "max": max}
    for seed in range(120):
        kind = ("float", "whole", "truth")[seed % 3]
        value = drawn(random.Random(seed), 1 + seed % 4, kind)
        text = (
            "compute d\n tensor I i64 [12]\n tensor Z f64 [12]\n axes n=12\n read x = X[n]\n"
            f" read y = Z[n]\n read i = I[n]\n store Y[n] = {value}\n tensor Y f64 [12]"
        )
        made = parse(text)
        want = [
            float(eval(value, {**words, "x": x[k], "y": y[k], "i": int(i[k]), "n": k})) for k in range(12)
        ]
        for each in (made, parse(str(made))):
            got = execute(each, {"X": x, "Z": y, "I": i})["Y"].value
            np.testing.assert_allclose(got, want, rtol=1e-12, err_msg=value)
        again = parse(str(made))
        assert str(parse(str(again))) == str(again)
