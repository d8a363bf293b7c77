"""``transconv prepare``: what it asks for, what it says, and its manners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import transconv
from tests.runtime.test_ready import Processes
from transconv.__main__ import main
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.cli.arguments.options import each_described
from transconv.conv import compiler
from transconv.ir import f16, f32
from transconv.runtime import collecting
from transconv.runtime.compilation import async_compile

TEXT = (
    "compute double\n  tensor X f16 [n=64]\n  tensor Y f16 [n=64]\n  axes n=64\n"
    "  read x = X[n]\n  store Y[n] = x + x\n"
)


class AtOnce(Processes):
    asked: list[str] = []  # noqa: RUF012

    def submit(self, job, done) -> None:  # type: ignore[no-untyped-def]
        found = []
        for one in job.get("batch", [job]):
            self.asked.append(f"{one['problem'].split()[0]} {one['direction']}".strip())
            found.append({"reason": "ptxas died"} if "ic7" in one["problem"] else {"kernels": 1})
        done({"each": found} if "batch" in job else found[0])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", AtOnce)
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: False)
    monkeypatch.setattr(AtOnce, "asked", [])
    compiler.forget()
    return AtOnce.asked


def test_lists_problems_and_texts(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, text = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    first.write_text("mb1ic8ih5oc8oh5kh1ph0\n")
    second.write_text("--dir=FWD_D\nmb1ic7ih5oc8oh5kh1ph0\n")
    text.write_text(TEXT)
    report = tmp_path / "report.json"
    lists = [str(first), str(second), "--target", "sm_90", "--dtype", "bf16", "--workers", "3"]
    assert main(["prepare", *lists, "--json", str(report)]) == 1
    assert asked == [
        *(f"mb1ic8ih5oc8oh5kh1 {w}" for w in ("fwd", "bwd_d", "bwd_w")),
        "mb1ic7ih5oc8oh5kh1 fwd",
    ]
    found = json.loads(report.read_text())
    assert found["kernels"] == 3 and found["failures"][0][1] == "ptxas died"
    asked.clear()
    assert main(["prepare", "mb1ic8ih5oc8oh5kh1ph0", "dt=f16", "--prop", "fwd", "--target", "sm_90"]) == 0
    assert main(["prepare", str(text), "--target", "sm_90"]) == 0
    assert asked == ["mb1ic8ih5oc8oh5kh1 fwd", "compute"]
    assert "1 kernels compiled" in capsys.readouterr().out


def test_several_problems_each_with_words_of_its_own(asked: list[str]) -> None:
    several = ["mb1ic8ih5oc8oh5kh1ph0", "dt=f16", "tag=nhwc", "mb2ic8ih5oc8oh5kh1ph0"]
    assert main(["prepare", *several, "--prop", "fwd", "--target", "sm_90"]) == 0
    assert asked == ["mb1ic8ih5oc8oh5kh1 fwd", "ic8ih5oc8oh5kh1 fwd"]
    first, second = each_described(several)
    assert (first.src.dtype, second.src.dtype) == (f16, f32) and "tag=nhwc" in str(first)


def test_there_has_to_be_a_chip(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["prepare", "mb1ic8ih5oc8oh5kh1ph0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no GPU to compile for; expected --target with a chip" in line and not asked


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["no/such/file"],
        ["mb1ic8ih5oc8oh5kh1ph0", "--target", "sm_1"],
        ["mb1ic8ih5oc8oh5kh1ph0", "--workers", "0"],
        ["mb1ic8ih5oc8oh5kh1ph0", "--epilogue", "x"],
        ["mb1ic8ih5oc8oh5kh1ph0", "--json", "/dev/null/x"],
    ],
)
def test_odd_command_lines(words: list[str], asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["prepare", *words]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not asked


def test_kernels_for_any_size_of_a_layer(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes of a layer are one set of kernels: the one that calls in place of torch's ask for."""
    monkeypatch.setenv("TRANSCONV_SIZES", "any")
    problems = tmp_path / "layer.txt"
    problems.write_text("mb1ic8ih5oc16oh5kh1ph0\nmb4ic8ih9iw7oc16oh9ow7kh1kw1\n")
    assert (
        main(
            [
                "prepare",
                str(problems),
                "--prop",
                "fwd",
                "--target",
                "sm_90",
                "--dtype",
                "f16",
                "--layout",
                "nhwc",
            ]
        )
        == 0
    )
    wanted = [
        f"{text} dt=f16 tag=nhwc"
        for text in ("mb8?ic8ih56?oc16oh56kh1", "mb1?ic8ih14?oc16oh14kh1", "mb16?ic8ih224?oc16oh224kh1")
    ]
    assert asked == [f"{text.split()[0]} fwd" for text in wanted]
    transconv.config.cpu, transconv.config.sizes = "interpret", "any"
    try:
        with collecting() as questions:
            x, w = (
                torch.randn(shape).half().to(memory_format=torch.channels_last)
                for shape in ((3, 8, 6, 5), (16, 8, 1, 1))
            )
            transconv.conv2d(x, w)
    finally:
        transconv.config.cpu, transconv.config.sizes = "fallback", "exact"
    assert [q.workload.text.removesuffix(" math=ieee") for q in questions] == wanted
