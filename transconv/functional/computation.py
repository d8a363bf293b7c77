"""``transconv.computation(text)``: the text of a computation as a function of tensors."""

from __future__ import annotations

from typing import Any

import torch

from transconv.compute import (
    Compute,
    Reduction,
    one_line,
    parse,
    why_not_all_stored,
    why_not_stored,
)
from transconv.errors import ComputeError, TensorError
from transconv.functional.calls import torch_operators
from transconv.functional.calls.compiled_launch import Program, TensorMemory, program

Tensor = torch.Tensor


class Computation:
    """A function of the tensors that a text reads, in the order of its reads or by their names; its result
    is the tensor that is stored, or a tuple of them in the order of the stores."""

    def __init__(self, text: str) -> None:
        self.text, self._line = text, one_line(text)
        self.program: Program = program(text)
        # Points may share places that they add to. Of several kernels, which reduce over axes of their
        # own, each is asked when it is made.
        adds = any(w.op for w in self.compute.writes)
        several = len({frozenset(s.axes) for s in self.compute.steps if isinstance(s, Reduction)}) > 1
        why = None if adds or several else why_not_stored(self.compute)
        if why := why or why_not_all_stored(self.compute):
            raise ComputeError(f"{self.compute.name}: {why}")

    @property
    def compute(self) -> Compute:
        """The parsed text."""
        return self.program.compute

    def __call__(self, /, *given: Tensor, **named: Any) -> Any:
        """``device``: where the result of a text that reads no tensor shall be, such as ``"cuda"``. Raises
        TensorError, one line, for a tensor that is missing or unlike the text's; TypeError for one that
        the text does not read. A tensor with other strides than the text's is copied."""
        known = self.program.given
        if not known:
            return _one_or_all(self._of_nothing(given, **named))
        if len(given) > len(known):
            raise TypeError(f"{self.compute.name} reads {len(known)} tensors ({', '.join(known)}), "
                            f"got {len(given)}")
        found = dict(zip(known, given, strict=False))
        for name in named:
            if name not in known or name in found:
                why = "was given already" if name in found else f"is not read; expected {', '.join(known)}"
                raise TypeError(f"{self.compute.name}: {name} {why}")
        found |= named
        read = [self._checked(found, name, m) for name, m in known.items()]
        made = torch_operators.compute(self._line, read)
        return _one_or_all(made)

    def _of_nothing(self, given: tuple[Any, ...], device: Any = None, **named: Any) -> list[Tensor]:
        if given or named:
            raise TypeError(f"{self.compute.name} reads no tensor; expected device= alone")
        if device is None:
            raise TensorError(f"{self.compute.name} reads no tensor, and none says where its result shall "
                              "be; expected device=, such as device=\"cuda\"")
        made: list[Tensor] = torch_operators.of_nothing(self.text, torch.device(device))
        return made

    def _checked(self, found: dict[str, Any], name: str, m: TensorMemory) -> Tensor:
        t = found.get(name)
        if not isinstance(t, Tensor):
            raise TensorError(f"{self.compute.name}: {name}: expected a tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_nested:
            form = "a nested tensor" if t.is_nested else f"one of layout {t.layout}"
            raise TensorError(f"{self.compute.name}: {name}: expected a strided tensor, got {form}")
        if t.dtype is not m.dtype or tuple(t.shape) != m.shape:
            raise TensorError(f"{self.compute.name}: {name}: expected {m.dtype} of shape {m.shape}, "
                              f"got {t.dtype} of shape {tuple(t.shape)}")
        return t

    def __repr__(self) -> str:
        return f"transconv.computation({self.compute.name}: {', '.join(self.program.given)} -> " \
               f"{', '.join(self.program.stored)})"


def _one_or_all(made: list[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)


def computation(text: str | Compute) -> Computation:
    """The function of a computation's text (docs/computations.md): takes torch tensors, allocates and
    returns what is stored. On a GPU a kernel computes it; on a CPU its meaning in NumPy, or Triton's
    interpreter where ``transconv.config.cpu`` says so. torch.compile holds it as one operator,
    ``transconv::compute``. Gradients of float tensors are texts too (``transconv.compute.differentiate``),
    and have gradients themselves; where an operation has none, asking for one is a RuntimeError that names
    its line. Raises ComputeError for a text that cannot be read, that does not store each element of its
    results once, or whose sizes are arguments: see ``transconv.compile``."""
    named = parse(text).named if isinstance(text, str) and "sizes" in text else None
    named = text.named if isinstance(text, Compute) else named
    if named is not None:
        raise ComputeError(f"sizes that are arguments ({named}): expected numbers; transconv.compile "
                           "makes a plan for any size")
    return Computation(text if isinstance(text, str) else str(text))
