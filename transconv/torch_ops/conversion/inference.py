"""``inference``: frozen models whose weights are copied once into the order that kernels read.

    handle = transconv.inference(model)     begins; the handle reports the memory of the copies
    handle.refresh()                        drops the copies, after writes that torch does not count
    handle.end()                            ends it: every call copies; leaving a `with` block does so, too
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from transconv.torch_ops import modules
from transconv.torch_ops.conversion import prepacked_weights

Tensor = torch.Tensor


class Inference:
    """The weights of a model that are copied once, and the memory of the copies. ``skipped``: the other
    convolutions, with reasons."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.skipped: dict[str, str] = {}
        self._weights: dict[int, Tensor] = {}
        self._collect()
        self._watch()

    def refresh(self) -> None:
        """Drop every copy and look for the weights anew: after writes that no version counter sees
        (through `.data`, by a kernel, by FSDP), and after a weight was assigned. ValueError as from
        `inference`."""
        before, self._weights = self._weights, {}
        try:
            self._collect()
        finally:
            for weight in before.values():
                prepacked_weights.leave(weight)
        self._watch()

    def end(self) -> None:
        """Copy at every call again, and free the copies."""
        for weight in self._weights.values():
            prepacked_weights.leave(weight)
        self._weights.clear()

    def __enter__(self) -> Inference:  # noqa: PYI034  (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def bytes(self) -> int:
        """The memory of all copies so far, in addition to the weights: the first calls make the copies."""
        return sum(prepacked_weights.copied(w)[1] for w in self._weights.values())

    def __str__(self) -> str:
        each = [prepacked_weights.copied(w)[0] for w in self._weights.values()]
        size = sum(w.nbytes for w in self._weights.values())
        head = (f"{len(each)} weights ({size} bytes), {sum(map(bool, each))} of them copied once in "
                f"another order ({self.bytes} bytes more), {len(self.skipped)} left")
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.skipped.items())])

    __repr__ = __str__

    def _collect(self) -> None:
        self.skipped = {}
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                weight: Any = module._parameters.get("weight")
                if why := _why_not(weight):
                    self.skipped[name] = why
                elif weight.requires_grad:
                    raise ValueError(
                        f"transconv.inference: the weight of '{name}' requires a gradient, expected a "
                        "frozen model; call model.requires_grad_(False) before")
                else:
                    self._weights[id(weight)] = weight

    def _watch(self) -> None:
        names = {id(p): name for name, p in _named(self.model)}
        for weight in self._weights.values():
            prepacked_weights.watch(weight, names.get(id(weight), "weight"))


def _named(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)


def _why_not(weight: Any) -> str:
    """Why a weight cannot be watched; empty if it can."""
    if weight is None:
        return "its weight is computed at every call"
    if is_lazy(weight):
        return "it has no weight before its first call"
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}"
    if weight.is_inference():
        return "its weight was made under torch.inference_mode, where torch counts no writes"
    return ""


def inference(model: torch.nn.Module) -> Inference:
    """Let the convolutions of a frozen model copy their weights once, not at every call.

    Some kernels, mainly those for channels first, read a copy of the weight in another memory order. The
    first eager call of each kind of input makes the copy, and later calls in any thread use it, as long as
    torch has counted no write to the weight and its address is the same. So `load_state_dict`, writes in
    place, `.to()`, an assigned weight and `requires_grad_()` never give old results. After writes that
    torch does not count, call `refresh()`. In a captured CUDA graph weights are copied at every replay.
    The model does not change: its state dict, copies and pickles do not contain the copies. Raises
    ValueError if a weight requires a gradient, TypeError for what is no module.
    """
    modules.expect_module(model, "inference")
    return Inference(model)
