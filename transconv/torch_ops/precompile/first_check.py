"""What the first check of a result waits for, done before it.

CUDA loads each of torch's kernels when it is first launched, cuBLAS its own, and the check of a first
result (conv/spotcheck.py) launches some forty of them. Where kernels are compiled in the background, the
first one that is taken over would wait for that in the middle of a program: it is done when a model is
converted, or when the first call is refused, at the start, where torch loads what the model needs.
"""

from __future__ import annotations

import functools

import torch

from transconv.conv import ConvProblem, Epilogue, Prop, examine
from transconv.torch_ops.calls import lower_call

# Short sums, whose points are checked one by one, and sums so long that rows and columns are gathered.
CHECKS = (("mb2ic16ih8oc16oh8kh3ph1", Prop.BWD_D), ("mb1ic2048ih8oc16oh8kh3ph1", Prop.FWD))


def expect(device: torch.device, dtype: torch.dtype) -> None:
    """Load what checks of results of a type need on a GPU, once. Does nothing while a CUDA graph is
    captured."""
    if device.type == "cuda" and dtype in lower_call.DTYPES and not lower_call.capturing(device):
        load(device, dtype)


@functools.cache
def load(device: torch.device, dtype: torch.dtype) -> None:
    """``expect`` outside of a capture."""
    try:
        with torch.cuda.device(device):
            check(device, dtype)
    except Exception as error:  # such as no memory; the first check meets it if it is about that
        lower_call.log.debug("the first check was not prepared: %s", error, exc_info=True)


def check(device: torch.device, dtype: torch.dtype) -> list[int]:
    """Check zeros against sums of zeros; how many elements each check saw."""
    seen = []
    for text, prop in CHECKS:
        problem = ConvProblem.parse(f"{text} dt={lower_call.DTYPES[dtype]}")
        tensors = {name: torch.zeros(shape, dtype=dtype, device=device)
                   for name, shape in problem.shapes.items()}
        tensors[prop.result].fill_(float("nan")).zero_()
        seen.append(examine(problem, prop, Epilogue(), tensors, tensors[prop.result]).checked)
    return seen
