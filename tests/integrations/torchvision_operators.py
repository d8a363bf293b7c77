"""PyPI's torchvision holds operators compiled for CUDA's torch alone, and beside a CPU's torch it cannot
even be imported. There the one that models need is defined in Python; others stay.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch

Tensor = torch.Tensor
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: list[torch.library.Library] = []  # what it defines lasts as long as it does


def define() -> None:
    """Define ``torchvision::nms`` where torchvision's own file of operators does not load."""
    found = importlib.util.find_spec("torchvision")
    if _library or found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(next(Path(found.origin).parent.glob("_C*.so")))
    except (OSError, StopIteration):
        _library.append(torch.library.Library("torchvision", "DEF"))
        _library[0].define(f"nms{SCHEMA}")
        _library[0].define(f"qnms{SCHEMA}")  # of integers, which nothing here calls
        _library[0].impl("nms", kept, "CPU")
        importlib.import_module("torchvision.extension")._has_ops = lambda: True


def kept(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes, best first, that overlap no better one by more than the threshold."""
    areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    order, made = scores.argsort(descending=True, stable=True), []
    while len(order):
        best, order = order[0], order[1:]
        made.append(best)
        low, high = (
            torch.maximum(dets[best, :2], dets[order, :2]),
            torch.minimum(dets[best, 2:], dets[order, 2:]),
        )
        both = (high - low).clamp(min=0).prod(1)
        order = order[both / (areas[best] + areas[order] - both) <= iou_threshold]
    return torch.stack(made) if made else scores.new_empty(0, dtype=torch.long)
