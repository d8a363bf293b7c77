"""A newcomer adds an activation, a chip, a lowering of aten and a pass, each by one file: the changes that
the pages of docs/how_to_add show are applied to a copy of the package, and what they add works in it.

The programs that add the same from outside are executed with the pages (test_pages.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.backend_triton.test_emit import CASES, GOLDEN, emitted
from tests.shown import ROOT, blocks
from transconv import passes

PAGES = ROOT / "docs" / "how_to_add"
PROBLEM = "mb2ic32ih12oc32oh12kh3ph1"


def patches(page: str) -> list[str]:
    return [b.body for b in blocks((PAGES / f"{page}.md").read_text("utf-8")) if b.kind == "diff"]


def test_each_page_with_a_change_is_tested() -> None:
    assert {p.stem for p in PAGES.glob("*.md") if patches(p.stem)} == {"activation", "chip", "lowering"}


def copy_with_patch(page: str, folder: Path) -> None:
    """Lay a copy of the package, of links to its files, into a folder, and apply the one change of a page,
    which is of one file."""
    (patch,) = patches(page)
    (file,) = re.findall(r"^\+\+\+ b/(transconv/\S+)$", patch, re.MULTILINE)
    for home, _, names in os.walk(ROOT / "transconv"):
        below = folder / Path(home).relative_to(ROOT)
        if below.name == "__pycache__":
            continue
        below.mkdir(parents=True)
        for name in names:
            if below / name != folder / file:
                (below / name).symlink_to(Path(home) / name)
    if (ROOT / file).exists():
        (folder / file).write_text((ROOT / file).read_text("utf-8"), "utf-8")
    done = subprocess.run(
        ["git", "apply", "--unsafe-paths", "-"],
        cwd=folder,
        input=patch,
        text=True,
        capture_output=True,
        env={**os.environ, "GIT_DIR": os.devnull},
    )
    assert done.returncode == 0, f"the change of {page}.md no longer fits: {done.stderr}"


def run_with(page: str, words: list[str], folder: Path) -> str:
    """What a program prints in the copy of the package, which is checked to be the one that runs."""
    copy_with_patch(page, folder)
    settings = {
        "PYTHONPATH": str(folder),
        "TRITON_INTERPRET": "1",
        "TRANSCONV_CACHE": f"{folder}/cache",
        "TRANSCONV_KEY": f"{folder}/key",
        "TRANSCONV_TUNED": "0",
    }
    done = programs.run(words, cwd=folder, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ACTIVATION = """
import torch, transconv
assert transconv.__file__.startswith({folder!r})
from torch.nn.functional import conv2d, softsign
from transconv.__main__ import main
transconv.config.cpu, transconv.config.fallback = "interpret", "error"
torch.manual_seed(0)
x, w, b, r = torch.randn(1, 16, 4, 4), torch.randn(16, 16, 3, 3), torch.randn(16), torch.randn(1, 16, 4, 4)
given = [t.half().requires_grad_() for t in (x, w, b, r)]
x, w, b, r = given
def results(fused):
    y = fused()
    return y, *torch.autograd.grad(y, given, torch.ones_like(y))
ours = results(lambda: transconv.fused_conv2d(x, w, b, padding=1, activation="softsign", residual=r))
wanted = results(lambda: softsign(conv2d(x, w, b, padding=1) + r))
for mine, theirs in zip(ours, wanted, strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
told = transconv.stats()
assert told.native["fwd"] == 1 and told.native_share == 1, told
model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Softsign()).half()
assert getattr(transconv.fold(model.eval()), "0").activation == "softsign"
raise SystemExit(main(["check", "--epilogue=bias+softsign", "mb1ic3ih5oc4oh5kh3ph1"]))
"""


def test_an_activation(tmp_path: Path) -> None:
    """Fused, forward and backward, beside torch; found by fold; checked from the command line."""
    told = run_with("activation", ["-c", ACTIVATION.format(folder=str(tmp_path))], tmp_path)
    assert "0:PASSED" in told


@pytest.mark.slow
def test_the_estimate_of_a_chip(tmp_path: Path) -> None:
    told = run_with(
        "chip", ["-m", "transconv", "show", PROBLEM, "--target=sm_87", "--stage=schedule"], tmp_path
    )
    assert re.search(r"tiles? on 16 multiprocessors", told), told


@pytest.mark.slow
def test_a_kernel_is_compiled_for_a_chip(tmp_path: Path) -> None:
    told = run_with(
        "chip", ["-m", "transconv", "compile", PROBLEM, "--target=sm_87", "--prop=fwd"], tmp_path
    )
    assert "sm_87" in told and "registers" in told, told


LOWERING = """
import torch, transconv
assert transconv.__file__.startswith({folder!r})
from transconv.graph import report
transconv.config.cpu, transconv.config.fallback = "interpret", "error"

def decibels(x, y):
    return (10 * torch.log10(x * x + 1) * y).sum(1)

for dynamic in (False, True):
    torch._dynamo.reset()
    made = torch.compile(decibels, backend="transconv", dynamic=dynamic)
    for size in (40, 24) if dynamic else (40,):
        x, y = torch.rand(3, size), torch.rand(3, size)
        x.requires_grad_()
        ours, wanted = made(x, y), decibels(x, y)
        torch.testing.assert_close(ours, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x)[0] for t in (ours, wanted)))
    told = report(made)
    assert all(len(graph.kernels) == len(graph.rows) > 0 for graph in told.graphs), told
    print(told)
"""


@pytest.mark.slow
def test_a_lowering(tmp_path: Path) -> None:
    """A graph with it is kernels alone, at fixed and at symbolic sizes, and what torch computes; so is its
    gradient."""
    told = run_with("lowering", ["-c", LOWERING.format(folder=str(tmp_path))], tmp_path)
    assert "log10" in told and "0 regions of torch" in told


# -- a pass: the page's own program, which is one file ------------------------------------------------


@pytest.fixture
def shifts() -> Iterator[str]:
    """The pass of the page's program is registered."""
    page = (PAGES / "pass.md").read_text("utf-8")
    text = next(b.body for b in blocks(page) if b.kind == "python")
    exec(
        compile(text.partition("from transconv.__main__")[0], "shifts.py", "exec"), {"__name__": "shifts"}
    )
    yield "shifts"
    passes.unregister("shifts")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["dense_nhwc", "stride_phase", "depthwise"])
def test_a_pass_that_is_switched_off_changes_no_kernel(
    name: str, shifts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = (GOLDEN / f"{name}.py").read_text("utf-8")
    assert name in CASES and emitted(name) != golden  # it has something to do there
    assert " << " in emitted(name)
    monkeypatch.setenv("TRANSCONV_PASSES", f"-{shifts}")
    assert emitted(name) == golden
