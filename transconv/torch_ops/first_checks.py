"""What the first check of a result waits for, begun before it.

CUDA loads each of torch's kernels when it is first launched, and cuBLAS its own; the check of a first result
(conv/spotcheck.py) uses some forty of them. A program whose kernels are compiled in the background would wait
for them in the middle of a step: a thread runs a check beforehand, on a stream of its own. The driver works
without Python's lock.
"""

from __future__ import annotations

import threading

import torch

from transconv.conv import ConvProblem, Epilogue, Prop, examine
from transconv.torch_ops import execute

# Short sums, whose points are checked one by one, and sums so long that rows and columns are gathered.
PROBLEMS = ("mb2ic16ih8oc16oh8kh3ph1", "mb1ic2048ih8oc16oh8kh3ph1")
_begun: set[tuple[torch.device, torch.dtype]] = set()


def expect(device: torch.device, dtype: torch.dtype) -> None:
    """Begin to load what checks of results of a type need on a GPU, once."""
    if device.type == "cuda" and dtype in execute.DTYPES and (device, dtype) not in _begun:
        _begun.add((device, dtype))
        threading.Thread(target=_on_gpu, args=(device, dtype), daemon=True, name="transconv-checks").start()


def _on_gpu(device: torch.device, dtype: torch.dtype) -> None:
    try:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            check(device, dtype)
    except Exception as error:  # such as no memory; the first check meets it if it is about that
        execute.log.debug("the first check was not prepared: %s", error, exc_info=True)


def check(device: torch.device, dtype: torch.dtype) -> list[int]:
    """Check zeros against sums of zeros; how many elements were seen in each direction of each problem."""
    seen = []
    for text in PROBLEMS:
        problem = ConvProblem.parse(f"{text} dt={execute.DTYPES[dtype]}")
        tensors = {name: torch.zeros(shape, dtype=dtype, device=device)
                   for name, shape in problem.shapes.items()}
        seen += [examine(problem, prop, Epilogue(), tensors, tensors[prop.result]).checked for prop in Prop]
    return seen
