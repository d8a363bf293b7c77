"""What a warm call of ``transconv.functional`` costs the host, and what generating a kernel takes.

On a GPU calls are whole. On a CPU the launch itself is left out (a function that does nothing stands for
it) and torch computes tiny tensors: what is left of ours is looking a call up and allocating its results.

``generate`` is the time from a text to a kernel's source: choosing schedules, passes, emission;
Triton's own compile comes on top, once per machine. It is the processor's time, so that other programs
do not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import transconv.functional as ours
from transconv import config
from transconv.calls.guard import current_device
from transconv.compute import parse
from transconv.functional.calls import route
from transconv.runtime import Launch, build_compute
from transconv.target import Target

Call = Callable[[], object]

SHAPE = (4, 64)
MODES = ("no grad", "grad", "forward+backward")
# name -> what is called on an input, a weight and a bias of its last axis, ours and the framework's, and
# how many of them are read
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "softmax": (lambda x, w, b: ours.softmax(x, 1), lambda x, w, b: F.softmax(x, 1), 1),
    "layer_norm": (
        lambda x, w, b: ours.layer_norm(x, SHAPE[1:], w, b),
        lambda x, w, b: F.layer_norm(x, SHAPE[1:], w, b),
        3,
    ),
    "rms_norm": (
        lambda x, w, b: ours.rms_norm(x, SHAPE[1:], w),
        lambda x, w, b: F.rms_norm(x, SHAPE[1:], w),
        2,
    ),
    "sum": (lambda x, w, b: ours.sum(x, 1), lambda x, w, b: torch.sum(x, 1), 1),
}
GENERATED = {  # texts of the sizes that networks have
    "softmax 8192x4096": """compute softmax
        tensor X bf16 [8192, 4096]
        tensor Y bf16 [8192, 4096]
        axes   n=8192 | k=4096
        read   x = X[n, k]
        let    top = max(x; k)
        let    e = exp(x - top)
        store  Y[n, k] = e / sum(e; k)""",
    "layer norm 8192x4096": """compute layer_norm
        tensor X bf16 [8192, 4096]
        tensor W bf16 [4096]
        tensor Y bf16 [8192, 4096]
        axes   n=8192 | k=4096
        read   x = X[n, k]
        let    d = x - sum(x; k) / 4096
        let    v = sum(d*d; k) / 4096
        read   w = W[k]
        store  Y[n, k] = d * rsqrt(v + 0.00001) * w""",
    "sum 8192x4096": """compute rows
        tensor X bf16 [8192, 4096]
        axes   n=8192 | k=4096
        read   x = X[n, k]
        store  Y[n] = sum(x; k)""",
    "add relu 32x256x56x56": """compute chain
        tensor X bf16 [32, 256, 56, 56] nhwc
        tensor Z bf16 [32, 256, 56, 56] nhwc
        tensor Y bf16 [32, 256, 56, 56] nhwc
        axes   n=32 c=256 h=56 w=56
        read   x = X[n, c, h, w]
        read   z = Z[n, c, h, w]
        store  Y[n, c, h, w] = relu(x + z)""",
}


def sides(name: str, device: str, mode: str) -> dict[str, Call]:
    """The calls of one function in one mode, ours warm. ``grad``: with gradients to come;
    ``forward+backward``: with gradients of all tensors that the function reads."""
    given = [torch.randn(s, device=device) for s in (SHAPE, SHAPE[1:], SHAPE[1:])]
    if mode != "no grad":
        given = [t.requires_grad_() for t in given]
    mine, theirs, reads = CASES[name]
    g = torch.randn_like(theirs(*given))

    def call(f: Callable[..., Any]) -> Call:
        def run() -> object:
            with torch.set_grad_enabled(mode != "no grad"):
                made = f(*given)
                return torch.autograd.grad(made, given[:reads], g) if mode == MODES[2] else made

        return run

    for _ in range(3):  # the first calls make entries
        call(mine)()
    return {"torch": call(theirs), "transconv": call(mine)}


@contextmanager
def launched(device: str) -> Iterator[None]:
    """Calls made inside are looked up and launched; on a CPU by a function that does nothing."""
    if device == "cuda":
        yield
        return
    before, empty, start = config.cpu, route._empty, Launch.start

    def begin(self: Launch, tensors: Any) -> None:
        self.begin, self.device = (lambda *given: None), current_device()

    interpreted = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # without it torch would compute
    config.cpu = "interpret"
    route._empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    Launch.start = begin
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
        config.cpu = before
        route._empty = empty
        Launch.start = start


def generated(name: str, chip: str = "sm_90", times: int = 5) -> float:
    """Microseconds of the processor from a text to the source of its kernels, in the median of as many
    texts that differ in a name, so that nothing is known of them."""
    found = []
    for number in range(times):
        text = GENERATED[name].replace("compute ", f"compute t{number}_", 1)
        start = time.process_time()
        assert build_compute(parse(text), Target.parse(chip)).source
        found.append((time.process_time() - start) * 1e6)
    return median(found)
