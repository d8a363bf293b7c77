"""What the first check of a result waits for, done before it.

CUDA loads each of torch's kernels when it is first launched, cuBLAS its own, and the check of a first
result (conv/spotcheck.py) launches some forty of them. Where kernels are compiled in the background, the
first one that is made ready would wait for that: it is done when a model is converted, or when the first
call is refused, by the thread that makes kernels ready.
"""

from __future__ import annotations

import functools

import torch

from transconv.conv import ConvProblem, Epilogue, Prop, examine
from transconv.runtime import hand_over
from transconv.torch_ops.calls import lower_call

# Short sums, whose points are checked one by one, and sums so long that rows and columns are gathered.
CHECKS = (("mb2ic16ih8oc16oh8kh3ph1", Prop.BWD_D), ("mb1ic2048ih8oc16oh8kh3ph1", Prop.FWD))


@functools.cache
def expect(device: torch.device, dtype: torch.dtype) -> None:
    """Have what checks of results of a type need loaded on a GPU, once."""
    if device.type == "cuda" and dtype in lower_call.DTYPES:
        hand_over.thread.add(device, functools.partial(check, device, dtype))


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
