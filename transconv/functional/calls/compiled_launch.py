"""The launches of computations: of texts, and of workloads that several texts are, each made once for a
device. What torch says of the tensors of a text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import torch

from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.compute import Alone, Compute, Workload, parse
from transconv.ir import DType, boolean, f8e4m3, f8e5m2, i8, i32, i64, u8
from transconv.ir import Tensor as Declared
from transconv.runtime import Launch, PlanRequest, torch_internals
from transconv.support import Cache, Unsupported
from transconv.torch_ops.calls.lower_call import DTYPES, target_of, why_not_on

Tensor = torch.Tensor

TYPES: dict[torch.dtype, DType] = DTYPES | {
    torch.int8: i8,
    torch.int32: i32,
    torch.int64: i64,
    torch.bool: boolean,
}
HELD = TYPES | {torch.uint8: u8, torch.float8_e4m3fn: f8e4m3, torch.float8_e5m2: f8e5m2}
"""The types of tensors that texts declare; those beyond ``TYPES`` are no operands of torch's functions."""
TORCH = {ours: theirs for theirs, ours in HELD.items()}
LIMIT = 4096  # launches kept

_deterministic: Callable[[], bool] = torch_internals.deterministic


class TensorMemory(NamedTuple):
    """A tensor of a text, as torch says it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Program(NamedTuple):
    """A text that was read: what it reads in order, and what it stores."""

    compute: Compute
    given: dict[str, TensorMemory]
    stored: dict[str, TensorMemory]


@lru_cache(maxsize=LIMIT)
def program(text: str) -> Program:
    """Raises ComputeError, and Unsupported for layouts that no strides describe."""
    compute = parse(text)
    stored = {w.view.tensor.name for w in compute.writes}
    memory = {t.name: _memory(t) for t in compute.tensors}
    if both := {r.view.tensor.name for r in compute.reads} & stored:
        raise Unsupported("tensor:both", f"{min(both)} is read and stored; expected two tensors")
    return Program(
        compute,
        {n: m for n, m in memory.items() if n not in stored},
        {n: m for n, m in memory.items() if n in stored},
    )


def _memory(tensor: Declared) -> TensorMemory:
    strides = tensor.layout.strides()
    if strides is None or tensor.layout.offset:
        raise Unsupported(
            "layout:blocked", f"{tensor.name} has the layout {tensor.layout}; expected strides"
        )
    return TensorMemory(tensor.shape, strides, TORCH[tensor.dtype])


_launches: Cache[Hashable, Launch] = Cache("launches", LIMIT)


def launch(
    asked: str | Workload, device: torch.device, aligned: bool, mode: str, same: bool | None = None
) -> Launch:
    """The launch of a text or workload, made when it is first asked for. ``same``: whether with the same
    bits; default: as is asked for now. Raises ComputeError, and Unsupported where no kernel can be made,
    or is there as the mode has it, with the reason."""
    same = deterministic() if same is None else same
    key = (asked, device.type, device.index, aligned, same)
    found = _launches.get(key)
    if found is None:
        found = _launches.keep(key, Launch.requested(question(asked, device, aligned, same), device, mode))
    return found


def forget() -> None:
    """Clear the launches: the next calls take plans that were made since."""
    _launches.forget()


def launch_of_batch(asked: str | Workload, device: torch.device, aligned: bool, mode: str) -> Launch:
    """``launch``; in invariant mode that of the form for any number of samples, at that of what is asked
    for. Raises Unsupported, too, where there is no such form."""
    if not settings.invariant:
        return launch(asked, device, aligned, mode)
    workload = Alone(program(asked).compute) if isinstance(asked, str) else asked
    form, sizes = workload.of_any_batch()
    made = launch(form, device, aligned, mode)
    return made.at(sizes) if sizes else made


def deterministic() -> bool:
    """Whether the same bits are asked for at every run."""
    return settings.invariant or _deterministic()


def question(
    asked: str | Workload, device: torch.device, aligned: bool = True, same: bool | None = None
) -> PlanRequest:
    """What ``launch`` asks for."""
    workload = Alone(program(asked).compute) if isinstance(asked, str) else asked
    return PlanRequest(workload, target_of(device), deterministic() if same is None else same, aligned)


def refused(
    tensors: Sequence[Tensor], whole: Sequence[bool] = (), types: Mapping[torch.dtype, DType] = TYPES
) -> str:
    """Why no kernel may take these tensors; empty if one may. ``whole``: which of them may be of any of
    ``types``, such as integers and truth values."""
    device = tensors[0].device
    if reason := why_not_on(device):
        return reason
    for i, t in enumerate(tensors):
        if t.dtype not in (types if i < len(whole) and whole[i] else DTYPES):
            return f"dtype:{str(t.dtype).removeprefix('torch.')}"
        if t.device != device:
            return "device:several"
        if t.layout is not torch.strided:
            return f"layout:{str(t.layout).removeprefix('torch.')}"
        if t.numel() == 0:
            return "shape:empty"
    return ""


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    return not reduce(or_, map(Tensor.data_ptr, tensors), 0) & ALIGNMENT


settings.on_change(forget)
