"""torch's internals: all of them are in the torch that is installed, and one file alone names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.shown import ROOT
from transconv.backend_triton import torch_internals

WITH_CUDA = {"raw_stream", "device_number"}


@pytest.mark.parametrize("name", torch_internals.INTERNALS)
def test_this_torch_has_it(name: str) -> None:
    if name in WITH_CUDA and torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(AttributeError):
            getattr(torch_internals, name)
    else:
        assert getattr(torch_internals, name) is not None


def test_what_is_not_listed_is_not_found() -> None:
    with pytest.raises(AttributeError, match="has no attribute meaning"):
        torch_internals.meaning  # noqa: B018


@pytest.mark.slow
def test_a_compiler_that_read_its_backends_before_learns_of_this_one() -> None:
    code = (
        "import torch, torch._dynamo.backends.registry as registry; registry.list_backends(); "
        "registry._BACKENDS.pop('transconv', None); import transconv; "
        "print(registry.lookup_backend('transconv').__module__)"
    )
    done = programs.run(["-c", code], cwd=ROOT, check=True)
    assert done.stdout.strip().startswith("transconv.graph")


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys; from transconv.runtime import torch_internals; "
        "print('torch' in sys.modules, torch_internals.backends(), torch_internals.compiled_code()); "
        "torch_internals.deterministic; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False {} ()", "False"]


WITHOUT_A_GPU = """
import torch

def asked(*given):
    raise RuntimeError("No CUDA GPUs are available")

torch._C._cuda_getDevice = torch._C._cuda_getCurrentRawStream = asked  # as in a build with CUDA
import transconv
from transconv import functional, quantized

transconv.config.cpu, transconv.config.fallback = "interpret", "error"
x, w = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(3, 4, 3, 3, requires_grad=True)

def same(made, want):
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)

for sizes, heights in (("exact", (5,)), ("any", (5, 7))):
    transconv.config.sizes = sizes
    for height in heights:
        x = torch.randn(2, 4, height, 6, requires_grad=True)
        made, want = transconv.conv2d(x, w), torch.nn.functional.conv2d(x, w)
        same(made, want)
        g = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(made, (x, w), g), torch.autograd.grad(want, (x, w), g)):
            same(a, b)
        same(transconv.fused_conv2d(x.detach(), w.detach(), activation="relu"), want.relu().detach())
        soft = functional.softmax(x, 1)
        same(soft, x.softmax(1))
        same(*(torch.autograd.grad(y, x, x.detach())[0] for y in (soft, x.softmax(1))))
    same(quantized.conv2d(torch.ones(1, 4, 4, 4).char(), torch.ones(2, 4, 3, 3).char()),
         torch.full((1, 2, 2, 2), 36.0))
model = torch.nn.Sequential(torch.nn.Conv2d(4, 3, 3), torch.nn.SiLU())
fast = torch.compile(model, backend="transconv", options={"rest": "eager"})
for height in (5, 7):
    x = torch.randn(2, 4, height, 6)
    same(fast(x), model(x))

found = transconv.stats()
assert {"fwd", "softmax", "graph"} <= set(found.native) and not found.fallback, found
print("done")
"""


@pytest.mark.slow
def test_a_build_with_cuda_asks_for_no_gpu_on_a_machine_without(tmp_path: Path) -> None:
    """Calls on a CPU: torch's functions of the current GPU raise there."""
    done = programs.run(
        ["-c", WITHOUT_A_GPU],
        cwd=tmp_path,
        timeout=200,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "TRANSCONV_VERIFY": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "TRANSCONV_CACHE": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr
