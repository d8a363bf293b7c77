"""Post-ops: words and their meanings, tensors of any mask and type, kernels that end in chains of them."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log1p

import numpy as np
import pytest
import torch

from transconv.__main__ import main
from transconv.compute import in_torch, pointwise, with_error, written
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.errors import ComputeError, ScheduleError
from transconv.ir import Cast, find, i8, u8
from transconv.verify.case import ProblemCase

P = ConvProblem.parse("mb2ic8ih5oc6oh5kh3ph1 dt=f32 tag=nhwc math=ieee")
X = torch.linspace(-6, 6, 97, dtype=torch.float64)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


# oneDNN's documentation, formula by formula.
MEANING = {
    "abs": X.abs(),
    "clip:-2:3": X.clamp(-2, 3),
    "clip_v2:-2:3": X.clamp(-2, 3),
    "elu:-2": torch.where(X > 0, X, -2 * X.expm1()),
    "elu": torch.where(X > 0, X, 0.0),
    "exp": X.exp(),
    "gelu_erf": X * 0.5 * (1 + torch.erf(X * 0.5**0.5)),
    "gelu_tanh": 0.5 * X * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (X + 0.044715 * X**3))),
    "hardsigmoid:-2:3": (X * -2 + 3).clamp(0, 1),
    "hardswish:-2:3": X * (X * -2 + 3).clamp(0, 1),
    "linear:-2:3": X * -2 + 3,
    "log": X.log(),
    "logistic": 1 / (1 + torch.exp(-X)),
    "mish": X * torch.tanh(softplus(X)),
    "pow:1:-1": 1 / X,
    "pow:1:0.5": X.sqrt(),
    "pow:2:1.5": 2 * X**1.5,
    "pow:0.5:0.33": 0.5 * X**0.33,
    "relu": X.relu(),
    "relu:-2": torch.where(X > 0, X, -2 * X),
    "round": X.round(),
    "soft_relu:1": softplus(X),
    "soft_relu:-2": softplus(-2 * X) / -2,
    "sqrt": X.sqrt(),
    "square": X**2,
    "swish:-2": X / (1 + torch.exp(2 * X)),
    "tanh": X.tanh(),
    "tanh:0:0:2.5": 2.5 * X.tanh(),
    "linear:2:0+linear:3:0": 6 * X,
    "relu_dst": X.relu(),
    "exp_dst": X.exp(),
    "sum:1.5:2": X + 1.5 * (X - 2),
    "add:3": X + 3,
    "div:2": X / 2,
    "ge:1": (X >= 1).double(),
    "ne:0": (X != 0).double(),
    "max:1": X.clamp(1),
    "prelu:per_tensor": torch.where(X > 0, X, X * X),
    "select:f32.per_tensor:per_tensor": X,
    "fn(f32:per_tensor|silu(acc+arg0)*arg0)": X * torch.nn.functional.silu(2 * X),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("word", MEANING)
def test_words_mean_what_onednn_says(word: str) -> None:
    made = Epilogue.parse(word)
    given = {name: X for name in made.function.names}
    got = in_torch(made.function, given)
    torch.testing.assert_close(got, MEANING[word], equal_nan=True, rtol=1e-12, atol=1e-12)
    assert Epilogue.parse(str(made)) == made


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("clip:0:6", "relu6"),
        ("swish:1", "silu"),
        ("hardswish:0.166667:0.5", "hardswish"),
        ("linear:1", ""),
        ("logistic:0:0:2.5", "sigmoid+mul:2.5"),
        ("sum", "res"),
        ("sum:1:0:u8", "sum:1:0:u8"),
        ("relu:0", "relu"),
        ("bias:f16", "bias:f16"),
        ("tanh_dst", "tanh"),
        ("add:f32:per_oc:any", "add:f32:per_oc:any"),
    ],
)
def test_one_spelling(word: str, spelled: str) -> None:
    assert str(Epilogue.parse(word)) == spelled


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rely", "has 'rely', expected one of: bias, res, sum"),
        ("abs_dst", "has 'abs_dst'"),
        ("relu:x", "'relu:x' has an argument that is no number"),
        ("relu:nan", "no number"),
        ("relu:1:2:3:4", "has 4 arguments; expected at most 3"),
        ("add", "'add' has no type"),
        ("add:f4", "has the type 'f4'"),
        ("add:tf32", "has the type 'tf32'"),
        ("add:f32:x", "mask 'x'"),
        ("div:0", "divides by 0"),
        ("sum:1:0:f32:2", "expected sum:SCALE:ZERO:TYPE"),
        ("bias+bias", "'bias' twice"),
        ("sum:1:0:s8+sum:1:0:u8", "reads the old result as two types"),
        ("select", "expected select:TYPE"),
        ("fn(|foo(acc))", "foo(...) is unknown"),
        ("fn(|acc+arg0)", "names arg0; expected acc"),
        ("fn(f32|acc > arg0)", "is a condition"),
        ("+".join(["relu"] * 40), "40 operations; expected at most 32"),
    ],
)
def test_refusals_name_the_word(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Epilogue.parse(text)
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        ("common", (1, 1, 1, 1)),
        ("per_oc", (1, 6, 1, 1)),
        ("per_dim_01", (2, 6, 1, 1)),
        ("12", (1, 1, 5, 5)),
        ("per_tensor", (2, 6, 5, 5)),
    ],
)
def test_tensors_have_the_shape_of_their_mask(mask: str, shape: tuple[int, ...]) -> None:
    tensor = ConvWorkload(P, Prop.FWD, Epilogue.parse(f"add:u8:{mask}")).tensors[-1]
    assert (tensor.name, tensor.shape, tensor.dtype) == ("arg0", shape, u8)
    assert tensor.layout.strides()[1] == 1 or shape[1] == 1
    assert Epilogue.parse(f"add:u8:{mask}").kind == ("res" if mask == "per_tensor" else "point")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "relu",
        "bias",
        "bias:f32+relu",
        "sum:0.5+add:f32:per_oc",
        "prelu:per_oc+mul:f32:per_tensor+res",
        "zero:src:per_ic",
        "stochastic",
        "bias+mul:0.5+stochastic",
    ],
)
def test_operands_are_all_that_is_read_but_the_product(words: str) -> None:
    kept = ("s8", "s8") if "zero" in words else ("f16", "f16")
    p = ConvProblem.parse(f"mb2ic8ih5oc6oh5kh3ph1 dt={kept[0]}:{kept[1]}:f16 tag=nhwc")
    work = ConvWorkload(p, Prop.FWD, Epilogue.parse(words))
    read = {r.view.tensor.name for c in work.computations for r in c.reads} - {
        w.view.tensor.name for c in work.computations[:-1] for w in c.writes
    }
    said = {o.name for o in work.epilogue.operands} | {t.name for t in work.epilogue.zeros.tensors(p)}
    assert read == said | {"src", "wei"}
    assert {t.name for t in work.tensors} == read | {"dst"}


def test_masks_and_tags_of_another_rank() -> None:
    for text, reason in (("add:f32:16", "mask 16"), ("add:f32:2:aBcde4b", "arg0")):
        with pytest.raises(ScheduleError, match=reason):
            ConvWorkload(P, Prop.FWD, Epilogue.parse(text)).tensors  # noqa: B018


LONG = "+".join(["linear:0.5:1", "relu:0.5", "add:s8:per_oc", "swish:-0.5"] * 8)
CHAINS = {
    "order": "mul:f32:per_oc+bias:f16+sum:0.5:2:s8+relu:0.5+add:u8:per_dim_01+div:2",
    "prelu": "prelu:per_oc+select:f16.per_tensor:per_dim_0+max:f32:common",
    "long": LONG,
    "blocked": "add:s8:14:aBcd4b+square",
}


@pytest.mark.parametrize("words", CHAINS)
def test_kernels_end_in_chains(words: str) -> None:
    """By the interpreter of the IR, with a split sum, whose second kernel has the epilogue."""
    case = ProblemCase(P, Prop.FWD, CHAINS[words], where="cpu", numpy=True)
    plans = ["mb.oh.ow:16 oc:8 ic:8 | fma"]
    plans += ["mb.oh.ow:16 oc:8 ic:8 | fma | split_k=2"] if words == "order" else []
    for schedule in plans:
        compiled = case.plan(schedule)
        for data in ("exact", "float"):
            found = case.judge(compiled, data, 1)
            assert found.right and found.telling, found.reason


def test_long_chains_have_names_for_their_values() -> None:
    """Thirty-two operations are as many lines, not an expression that doubles with each."""
    source = ProblemCase(P, Prop.FWD, LONG, where="cpu").plan("mb.oh.ow:16 oc:8 ic:8 | fma").source
    lines = [x for x in source.splitlines() if "value_" in x]
    assert len(lines) > 16 and max(map(len, lines)) < 200


@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        ("relu:0.5+bias", "bias+relu:0.5"),
        ("sum:0.5:2", "sum:0.5"),
        ("clip:-4:8", "clip:-4:7"),
        ("add:s8:per_oc", "sub:s8:per_oc"),
        ("ge:s8:per_tensor", "lt:s8:per_tensor"),
    ],
)
def test_wrong_epilogues_are_found(asked: str, computed: str) -> None:
    """Replaces the kernel by one with another chain of post-ops."""
    case = ProblemCase(P, Prop.FWD, asked, where="cpu", numpy=True)
    wrong = ProblemCase(P, Prop.FWD, computed, where="cpu").plan("mb.oh.ow:16 oc:8 ic:8 | fma")
    assert "wrong" in case.judge(wrong, "exact", 1).reason


def test_integers_are_read_as_such() -> None:
    steps = ConvWorkload(P, Prop.FWD, Epilogue.parse("sum:1:0:s8+relu")).computations[0].after
    assert steps[0].view.tensor.dtype is i8
    assert any(c.x is steps[0].var for c in find(steps[-1].value, Cast))


def test_errors_follow_the_function() -> None:
    """Of log(1 + exp(x)) the slope is a sigmoid; a comparison is off where its sides are near."""
    given = {"acc": torch.tensor([2.0], dtype=torch.float64)}
    _, off = with_error(pointwise("softplus(acc)"), given, {"acc": torch.full((1,), 1e-3).double()}, 0.0)
    assert off.item() == pytest.approx(1e-3 / (1 + exp(-2)), rel=1e-2)
    for at, unsure in ((2.0005, 1.0), (2.1, 0.0)):
        step = pointwise(f"where(acc > {at}, 1, 0)")
        _, off = with_error(step, given, {"acc": given["acc"] * 1e-3}, 0.0)
        assert off.item() == unsure
    assert log1p(exp(2)) == pytest.approx(in_torch(pointwise("softplus(acc)"), given).item())
    near = {"acc": torch.zeros(1, dtype=torch.float64), "res": torch.zeros(1, dtype=torch.float64)}
    errors = {"acc": torch.full((1,), 1e-3).double(), "res": torch.full((1,), 1e-2).double()}
    for text, most in (("t = acc + 0; t*t", 1e-6), ("acc*res", 1e-5), ("acc - res", 1.1e-2)):
        assert with_error(pointwise(text), near, errors, 0.0)[1].item() == pytest.approx(most)


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("acc*0.5 + 1.5", True),
        ("acc*0.1", False),
        ("exp(acc)", False),
        ("relu(acc)*4096*4096", True),
        ("acc*4095*4093", False),
        ("where(acc > arg0, acc, arg0*0.25)", True),
    ],
)
def test_exactness(text: str, exact: bool) -> None:
    assert pointwise(text).is_exact is exact


def test_texts_of_functions() -> None:
    made = pointwise("t = acc + res; t*sigmoid(t) - min(t, 2)**2")
    assert pointwise(written(made)) == made and made.names == ("acc", "res")
    for text in ("", "acc +", "a = 1", "max(acc)", "(acc > 0)*2", "where(acc, 1, 2)", "pow(acc, res)"):
        with pytest.raises(ComputeError):
            pointwise(text)


def test_any_size() -> None:
    """The tensors of an epilogue are as large as the result of the call."""
    made = ConvWorkload(
        P, Prop.FWD, Epilogue.parse("add:f32:per_dim_01+sum:0.5"), frozenset({"mb", "ih", "iw"})
    )
    first, second = made.tensors[-2:]
    assert (str(first.extents[0]), len(second.extents)) == ("MB", 4)
    assert replace(made, open=frozenset()).tensors[-2].shape == (2, 6, 1, 1)


@pytest.mark.parametrize("mask", [4, 8, pytest.param(1, marks=pytest.mark.slow), 12])
def test_an_operand_along_an_open_size_of_one(mask: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read as long as the result of the call is, whatever the example has."""
    words = ["--prop", "fwd", "--epilogue", f"add:f32:{mask}", "--sizes", "MB=3,IH=5,IW=4"]
    assert main(["run", "mb1?ic5ih1?oc8oh1kh3ph1", *words]) == 0
    assert "right  MB=3 IH=5 IW=4" in capsys.readouterr().out


def test_bisection_knows_chains() -> None:
    """Tensors of integers, values that are no numbers, and roundings that cancel, at every stage."""
    from transconv.target import Target
    from transconv.verify.bisect.stage_search import NAMES, Stages
    from transconv.verify.bisect.subject import BisectSubject

    chain = "mul:f32:per_oc+sum:0.5:2+relu:0.1+add:u8:per_dim_01+pow:1:0.5+select:bf16.per_oc:per_tensor"
    asked = BisectSubject(ConvWorkload(P, Prop.FWD, Epilogue.parse(chain)), Target.parse("sm_90"))
    (case,) = asked.cases(1)
    stages = [Stages.of(c, s, asked.target, "ieee", {}) for c, s in asked.steps()]
    for stage in (0, len(NAMES) - 1):
        assert case.interpreted(*(s.seen(stage) for s in stages)).problem == ""
    off = case.answers["dst"].value.copy()
    off[tuple(np.argwhere(np.isfinite(off))[0])] += 1
    assert "1 of 300 elements are wrong" in case.judged({"dst": off}).problem
