"""Batch files: the state machine, and every list that the project has."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
import torch

from transconv.conv import SCHEMA, from_json
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.problem_lists import iter_problems, read_problems
from transconv.errors import ProblemError

ROOT = Path(__file__).parents[2]
SUITE = Path(os.environ.get("TRANSCONV_SUITE", ROOT / "../shared/suite")) / "benchdnn"
OWN = sorted((ROOT / "bench/problems").glob("*.txt"))
A, B = "mb3ic4ih5oc4oh3kh3", "ic4iw5oc4ow3kw3"


def run(*lines: str) -> list[str]:
    return [f"{p} {prop}" for p, prop in iter_problems(lines)]


def test_comments_blank_lines_and_several_tokens_a_line() -> None:
    assert run("# nothing", "", f"  {A}  {B} # the rest {A}", "#" + A) == [f"{A} None", f"{B} None"]


def test_options_hold_for_what_follows_until_reset() -> None:
    assert run(A, "--dir=BWD_W --dt=f16", A, "--reset", A) == [
        f"{A} None",
        f"{A} dt=f16 bwd_w",
        f"{A} None",
    ]


def test_lists_multiply_and_the_empty_alternative_is_the_default() -> None:
    assert run("--dir=FWD_I,BWD_D --mb=,7", A) == [
        f"{A} fwd",
        f"{A.replace('mb3', 'mb7')} fwd",
        f"{A} bwd_d",
        f"{A.replace('mb3', 'mb7')} bwd_d",
    ]
    assert run("--dt=,f16:f16:f32", A) == [f"{A} None", f"{A} dt=f16:f16:f32 None"]
    assert run("--mb=0", A) == [f"{A} None"]


def test_tags_of_each_tensor() -> None:
    assert run("--stag=axb --dtag=axb --wtag=any,axb", A) == [
        f"{A} tag=nhwc:oihw:nhwc None",
        f"{A} tag=nhwc None",
    ]
    assert run("--wtag=goihw,abxc", "g2ic4ih6oc8oh4kh3") == [
        "g2ic4ih6oc8oh4kh3 None",
        "g2ic4ih6oc8oh4kh3 tag=nchw:ohwi:nchw None",
    ]


def test_backslash_glues_the_next_token_on() -> None:
    assert run("--dt=f16,\\", "bf16 " + A) == [f"{A} dt=f16 None", f"{A} dt=bf16 None"]
    assert run("--dt=f16 \\", A)[0] == f"{A} dt=f16 None"


def test_nested_files_lie_beside_and_share_the_state(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text(f"{A}\n--dt=f16\n")
    (tmp_path / "outer").write_text(f"--dir=BWD_D\n--batch=inner\n{B}\n")
    expected = [(ConvProblem.parse(A), Prop.BWD_D), (ConvProblem.parse(B + " dt=f16"), Prop.BWD_D)]
    assert list(iter_problems(tmp_path / "outer")) == expected
    assert read_problems(str(tmp_path / "outer")) == [p for p, _ in expected]
    assert read_problems(tmp_path / "outer", prop=Prop.FWD) == []


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("\nic3ih8oc4kh\n")
    (tmp_path / "outer").write_text("--batch=inner\n")
    (tmp_path / "cycle").write_text("--batch=cycle\n")
    with pytest.raises(ProblemError, match=re.escape(f"{tmp_path / 'inner'}:2: problem 'ic3ih8")):
        read_problems(tmp_path / "outer")
    with pytest.raises(ProblemError, match="no cycle"):
        read_problems(tmp_path / "cycle")
    with pytest.raises(ProblemError, match=r"list:1: option '--fast' is unknown; expected one of"):
        run("--fast=1")
    with pytest.raises(ProblemError, match="direction 'UP' is unknown; expected one of FWD_D"):
        run("--dir=UP")
    with pytest.raises(ProblemError, match="minibatch 'many' is no number"):
        run("--mb=many")


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.stem)
def test_own_lists_are_distinct_named_and_canonical(path: Path) -> None:
    problems = read_problems(path)
    assert problems
    assert all(p.name for p in problems)
    assert len({p.name for p in problems}) == len(problems)
    assert all(ConvProblem.parse(str(p)) == p for p in problems)
    assert len(set(problems)) == len(problems)


@pytest.mark.parametrize(
    ("network", "macs"),
    [("resnet50", 4.09e9), ("mobilenet_v3", 0.217e9), ("convnext_t", 4.45e9), ("vgg16", 15.35e9)],
)
def test_lists_have_the_published_cost(network: str, macs: float) -> None:
    """Multiply-adds of one image, padding counted, as the papers and model zoos state them."""
    total = 0
    for p in read_problems(ROOT / f"bench/problems/{network}.txt"):
        times = re.search(r"\*(\d+)$", p.name)
        total += p.macs_padded // p.mb * (int(times.group(1)) if times else 1)
    assert total == pytest.approx(macs, rel=0.01)


@pytest.mark.skipif(not SUITE.is_dir(), reason="TRANSCONV_SUITE has no benchdnn folder")
def test_every_descriptor_of_the_suite_parses() -> None:
    for path in sorted(p for p in SUITE.iterdir() if p.is_file()):
        lines = path.read_text().splitlines()
        if any(word in line for word in ("--attr-", "--skip-impl") for line in lines):
            with pytest.raises(ProblemError, match=rf"{path.name}:\d+: option '--(attr|skip)-"):
                read_problems(path)
            continue
        written = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        problems = read_problems(path)
        assert len(problems) == len(written), path.name
        assert all(ConvProblem.parse(str(p)) == p for p in problems), path.name


def test_a_backslash_that_stands_alone_joins_lines() -> None:
    lines = ["--dt=f16, \\", "    bf16,\\", "  f32  # three", "ic4ih8oc4oh6kh3"]
    assert [p.dtypes[0].name for p in read_problems(lines)] == ["f16", "bf16", "f32"]


def test_layers_of_a_file_have_the_sizes_that_torch_gives_them() -> None:
    """Drawn layers in JSON, forward and transposed: images as torch's modules make them."""
    rng = random.Random(4)
    for at in range(60):
        n = rng.randint(1, 3)
        kernel, stride, dilation = ([rng.randint(1, 3) for _ in range(n)] for _ in range(3))
        pad = [rng.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)]
        size = [(k - 1) * d + rng.randint(1, 5) for k, d in zip(kernel, dilation, strict=True)]
        extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        transposed, groups = rng.random() < 0.5, rng.choice([1, 2])
        row = {
            "name": f"layer_{at}",
            "n": 2,
            "groups": groups,
            "cin": 4,
            "cout": 6,
            "in_size": size,
            "kernel": kernel,
            "stride": stride,
            "dilation": dilation,
            "pad": pad,
            "transposed": transposed,
            **({"output_padding": extra} if transposed else {}),
        }
        (layer,) = from_json({"schema": SCHEMA, "layers": [row]})
        words = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups}
        module = (
            getattr(torch.nn, f"ConvTranspose{n}d")(4, 6, kernel, output_padding=extra, **words)
            if transposed
            else getattr(torch.nn, f"Conv{n}d")(4, 6, kernel, **words)
        )
        made = module(torch.zeros(2, 4, *size)).shape[2:]
        p = layer.shape
        ends = [tuple(size), tuple(made)]
        assert [p.i, p.o] == (ends[::-1] if transposed else ends), row
        assert (p.ic, p.oc) == ((6, 4) if transposed else (4, 6)) and layer.transposed == transposed
