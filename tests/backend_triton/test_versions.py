"""Differences between releases of Triton that emitted text and launches allow for."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from tests import programs
from transconv.backend_triton.launch import bound_start
from transconv.backend_triton.launch.triton_kernel import TritonKernel

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".newest"

# A mask combined with a scalar condition, on which Triton 3.9's interpreter fails.
SCALAR_CONDITION = """
import torch, triton
from transconv.backend_triton.launch.triton_kernel import TritonKernel
SOURCE = '''
import triton
import triton.language as tl


@triton.jit
def shifted(x, y):
    at = tl.arange(0, 8)
    for step in tl.range(0, 3, num_stages=2):
        i = step - 1
        got = tl.load(x + at, mask=(at < 6) & (0 <= i), other=7.0)
        tl.store(y + step * 8 + at, got)
'''
x, y = torch.arange(8.0), torch.zeros(24)
TritonKernel(SOURCE, "shifted", None, 1, 4, 2).run([x, y])
some = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 7.0]
assert y.tolist() == [7.0] * 8 + some * 2, y
print(triton.__version__)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("release", ["installed", "newest"])
def test_a_condition_without_lanes_joins_a_mask(release: str) -> None:
    if release == "newest" and not (NEWEST / "ready").exists():
        pytest.skip(
            "the newest Triton is not in .newest (`make .newest/ready`), so its interpreter was not tried"
        )
    places = [str(NEWEST)] if release == "newest" else []
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([*places, str(ROOT)]),
    }
    done = programs.run(["-c", SCALAR_CONDITION], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip() == triton.__version__) == (release == "installed")


class Kernel:
    """The attributes of a compiled kernel that a launch reads."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = 17, "packed"
        self.called: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Any:
        called = self.called
        return lambda *args: called.append(args)


@pytest.mark.usefixtures("own_garbage")
def test_a_kept_kernel_stays_loaded() -> None:
    """From Triton 3.9 on, code is unloaded when the kernel's object goes."""
    kernel = Kernel()
    called = kernel.called
    start = TritonKernel("", "f", None, 5, 4, 2).starting(kernel)
    alive = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert alive() is not None
    start((), (5, ()), ["x", "y"], 99)
    assert called == [(5, 1, 1, 99, 17, "packed", None, None, None, "x", "y")]


def test_a_launch_function_that_is_not_known_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch function is C code that does not check its arguments, and its arguments differ
    between releases."""
    ready = SimpleNamespace(
        run=SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
            launch=lambda *_: None,
        )
    )
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert bound_start.entry(ready, False) is not None
    for version in ("3.7.1", "3.9.0", "3.60.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert bound_start.entry(ready, False) is None
