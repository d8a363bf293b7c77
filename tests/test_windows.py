"""A system as Windows is to the package: without Triton, a C++ compiler, locks of files, users and forks.
Imports are clean, torch computes what is called, with one reason, and kernels are written as text."""

from __future__ import annotations

import pytest

from tests import programs

WINDOWS = """
import os, sys, warnings
os.environ["PATH"] = ""
sys.modules["triton"] = None
import torch, torch._dynamo, torch._functorch.aot_autograd
for name in ("fcntl", "grp", "pwd", "resource"):
    sys.modules[name] = None
for name in ("fork", "getuid", "geteuid", "getgid", "sched_getaffinity", "O_NOFOLLOW"):
    delattr(os, name)
import transconv
"""
CALLS = """
x, w = torch.randn(1, 8, 6, 6, requires_grad=True), torch.randn(16, 8, 3, 3)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        y = transconv.conv2d(x, w, padding=1)
assert torch.equal(y, torch.conv2d(x, w, padding=1))
y.sum().backward()
assert x.grad.shape == x.shape
(told,) = seen
print(told.message)
print(transconv.explain(x, w, padding=1))
print(transconv.stats())
"""
MODELS = """
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU()).eval()
x = torch.randn(1, 3, 8, 8)
compiled = torch.compile(model, backend="transconv")
for made in (transconv.optimize(model, x), compiled, transconv.fold(model)):
    torch.testing.assert_close(made(x), model(x))
transconv.convert_(model)
torch.testing.assert_close(model(x), made(x))
a = torch.randn(4, 8)
torch.testing.assert_close(transconv.functional.softmax(a, 1), a.softmax(1))
"""
TEXTS = """
from transconv.__main__ import main
words = "show mb1ic8ih6oc8oh6kh3ph1 --target sm_90 --stage emit --prop fwd"
raise SystemExit(main(words.split()))
"""


def ran(program: str) -> str:
    done = programs.run(["-c", WINDOWS + program])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_calls_are_torch_s_and_say_why_once() -> None:
    told = ran(CALLS)
    assert told.startswith("transconv hands convolutions to torch (device:cpu)") and "0.0% native" in told


@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [(MODELS, "it stays eager"), (TEXTS, "@triton.jit")])
def test_models_run_and_kernels_are_written(program: str, said: str) -> None:
    assert said in ran(program)
