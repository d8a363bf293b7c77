"""``doctor``: a convolution and a map, generated, run and compared; none starts after three seconds.

Data are small integers: products and sums are exact, so the result of a right kernel equals the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transconv.cli.diagnosis.findings import BAD, NOTE, OK, Finding

SECONDS = 3.0
MAP = "compute doubled\n axes m=16 n=32\n read x = X[m, n]\n store Y[m, n] = x*2 + 1"


def selftest(where: str) -> Iterator[Finding]:
    """Run both on a device, ``cuda`` or ``cpu`` (in Triton's interpreter, which is switched on). A test
    begins only while there is time."""
    spent = 0.0
    for name, run in (("convolution", convolution), ("map", mapped)):
        if spent > SECONDS:
            yield Finding("self-test", NOTE,
                          f"{name}: not tried, what was before took {spent:.1f} s")
            continue
        began = time.perf_counter()
        found = _tried(name, where, run)
        took = time.perf_counter() - began
        spent += took
        on = "the GPU" if where == "cuda" else "Triton's interpreter"
        yield found or Finding("self-test", OK, f"{name}: right on {on}, {took:.1f} s")


def _tried(name: str, where: str, run: Callable[[str], tuple[Any, Any]]) -> Finding | None:
    """The failure of a test, or None."""
    import torch

    try:
        with _all_ours(), torch.no_grad():
            got, wanted = run(where)
    except Exception as error:
        return Finding("self-test", BAD, f"{name}: {type(error).__name__}: {error}",
                       "python -m transconv run mb1ic8ih6oc16oh6kh3ph1 says more")
    wrong = int((got.double().cpu() != wanted).sum())
    if wrong:
        return Finding("self-test", BAD, f"{name}: {wrong} of {wanted.numel()} elements are wrong",
                       "do not use these kernels; python -m transconv check "
                       "mb1ic8ih6oc16oh6kh3ph1 says more")
    return None


def convolution(where: str) -> tuple[Any, Any]:
    """Ours, and torch's in f64 on the CPU: 16-bit and channels last on a GPU, f32 in the interpreter."""
    import torch

    import transconv.torch_ops.functional as ours

    generator = torch.Generator().manual_seed(0)
    channels, size = (32, 16) if where == "cuda" else (8, 6)
    dtype = torch.float16 if where == "cuda" else torch.float32
    x, w = (torch.randint(-2, 3, shape, generator=generator).double()
            for shape in ((1, channels, size, size), (16, channels, 3, 3)))
    here = x.to(where, dtype).contiguous(memory_format=torch.channels_last)
    got = ours.conv2d(here, w.to(where, dtype), padding=1)
    return got, torch.nn.functional.conv2d(x, w, padding=1)


def mapped(where: str) -> tuple[Any, Any]:
    """An elementwise computation, and its answer."""
    import torch

    from transconv.functional.computation import computation

    x = torch.arange(16 * 32, device=where, dtype=torch.float32).view(16, 32)
    return computation(MAP)(x), x.double().cpu() * 2 + 1


@contextmanager
def _all_ours() -> Iterator[None]:
    """Switch off the fallback to torch, and compute CPU tensors in the interpreter."""
    from transconv.calls.settings import settings

    before = settings.fallback, settings.cpu
    settings.fallback, settings.cpu = "error", "interpret"
    try:
        yield
    finally:
        settings.fallback, settings.cpu = before
