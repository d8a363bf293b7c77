"""``transconv kernel``, ``show``, ``explain`` and machine code for a chip that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.cases import product, softmax
from transconv.__main__ import main
from transconv.errors import KernelError
from transconv.kernel import Group
from transconv.kernel.launch.arguments import tensors_of

EXAMPLE = str(Path(__file__).parents[2] / "docs/examples/softmax_kernel.py")
CALL = ("--group", "64", "--shape", "1", "--args", "f32[64,1000]", "f32[64,1000]", "--target", "sm_90")


def test_the_verb_explains_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", f"{EXAMPLE}:softmax", *CALL]) == 0
    told = capsys.readouterr().out
    assert "groups     64 = 64 programs" in told
    assert "tl.store(Y + program * 1000 + col1024, e / sum" in told


def test_a_file_with_one_kernel_needs_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", EXAMPLE, *CALL]) == 0
    assert capsys.readouterr().out.startswith("kernel     softmax")


@pytest.mark.slow
def test_the_verb_shows_a_stage_and_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", f"{EXAMPLE}:softmax", *CALL, "--stage", "written", "--compile"]) == 0
    told = capsys.readouterr().out
    assert " until X_d0 grid:" in told and "registers" in told and "LDG.128" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py:f", *CALL], "there is no file"),
        ([f"{EXAMPLE}:f", *CALL], "it has: softmax"),
        ([f"{EXAMPLE}:softmax", "--group", "a"], "--group 'a'; expected sizes"),
        ([f"{EXAMPLE}:softmax", "--group", "1", "--args", "f99[3]"], "unknown type"),
        ([f"{EXAMPLE}:softmax", "--group", "1", "--args", "X"], "is no argument"),
    ],
)
def test_a_wrong_command(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def meta(*shape: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_products_are_calls_of_the_matrix_unit() -> None:
    given = meta(256, 512), meta(512, 256), meta(256, 256, dtype=torch.float32)
    text = product.show(Group((256, 256), (128, 128)), *given, target="sm_90")
    assert text.count("acc = tl.dot(a, b, acc)") == 1 and "mask=" not in text


def test_explain_says_what_was_hinted() -> None:
    x = np.zeros((3, 20), np.float32)
    told = softmax.explain(Group(3, 1, subgroup_size_hint=64), x, x.copy(), target="sm_90")
    assert "group      1 (as hinted)" in told and "64 (as hinted; the chip's warps have 32)" in told


def test_an_unknown_stage() -> None:
    x = np.zeros((3, 20), np.float32)
    with pytest.raises(KernelError, match="expected one of written unroll reuse simplify"):
        softmax.show(Group(3, 1), x, x.copy(), stage="optimise", target="sm_90")


def test_operands_of_products_have_all_their_dimensions() -> None:
    """Also those of an array with one row in memory, which is loaded once."""
    given = meta(1, 512).expand(64, 512), meta(512, 64), meta(64, 64, dtype=torch.float32)
    text = product.show(Group((64, 64), (64, 64)), *given, target="sm_90")
    assert "tl.broadcast_to(a[None, :], (64, 16))" in text


def test_a_number_and_a_truth_value_are_not_one_kernel() -> None:
    assert tensors_of({"n": 1}).key != tensors_of({"n": True}).key
    assert tensors_of({"a": 0.5}).key == tensors_of({"a": 2.0}).key  # floats are read at run time
