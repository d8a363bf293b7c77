"""The arguments of a call: arrays as torch tensors, and what a kernel is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transconv.errors import KernelError
from transconv.ir import DTYPES, DType, Layout, Tensor, f32


@dataclass(frozen=True, slots=True)
class Arguments:
    """``specs``: a Tensor or a number for each parameter; ``tensors``: torch's tensors, by name; ``key``:
    what a kernel depends on; ``alike``: names of arrays that share memory, each with the first of them;
    ``device``: of the arrays."""

    specs: dict[str, Any]
    tensors: dict[str, Any]
    floats: dict[str, float]
    key: tuple[Any, ...]
    alike: dict[str, str]
    device: Any


def tensors_of(given: Mapping[str, Any]) -> Arguments:
    """Look at arguments by name. Raises KernelError for one that is no array and no number, for an array
    of a type that kernels do not have, and for arrays of several devices."""
    specs: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    floats: dict[str, float] = {}
    for name, value in given.items():
        number = plain_number(value)
        if number is not None:
            if isinstance(number, float):
                floats[name] = number
                specs[name] = Tensor(name, (), (), Layout.dense(f32, ()))
            else:
                specs[name] = number
            continue
        if isinstance(value, ModuleType):  # a library of functions
            specs[name] = value
            continue
        tensor = as_tensor(name, value)
        tensors[name] = tensor
        specs[name] = spec_of(name, tensor)
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        told = ", ".join(f"{n} on {t.device}" for n, t in tensors.items())
        raise KernelError(f"arrays on several devices: {told}; expected one device")
    alike = sharing(tensors)
    # With the types of numbers: 1 and True are equal in Python.
    key = tuple((n, type(s), s) for n, s in specs.items()), tuple(sorted(alike.items()))
    return Arguments(specs, tensors, floats, key, alike, next(iter(devices), None))


def plain_number(value: Any) -> int | float | bool | None:
    """A number of Python or NumPy as Python's; None for what is none."""
    if isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "item") and not hasattr(value, "data_ptr") and (
            getattr(value, "shape", None) == () and not hasattr(value, "__dlpack__")):
        return value.item()  # type: ignore[no-any-return]
    return None


def as_tensor(name: str, value: Any) -> Any:
    """An array as a torch tensor of the same memory."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        if isinstance(value, np.ndarray):
            if not value.flags.writeable:
                raise KernelError(f"{name} is a read-only array; expected one that may be written, as "
                                  f"{name}.copy()")
            return torch.from_numpy(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
        if hasattr(value, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).split("\n")[0]
        raise KernelError(f"{name} cannot be an array of a kernel: {said}") from None
    raise KernelError(f"{name} is {described(value)}; expected a torch tensor, a NumPy array, an object "
                      "with DLPack or the CUDA array interface, or a number")


def spec_of(name: str, tensor: Any) -> Tensor:
    """What a kernel knows of an array: its type, shape and strides."""
    dtype = type_of(name, str(tensor.dtype).removeprefix("torch."))
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_neg() or tensor.is_conj():
        raise KernelError(f"{name} is a negated or conjugated view; expected values as they are "
                          "(resolve_neg() copies it)")
    if not shape:
        raise KernelError(f"{name} is an array without dimensions; expected a number, or an array of one "
                          f"element: {name}.reshape(1)")
    dims = tuple(f"d{i}" for i in range(len(shape)))
    return Tensor(name, dims, shape, Layout.from_strides(dtype, shape, strides))


def type_of(name: str, torch: str) -> DType:
    """The type of the IR that torch calls so."""
    found = next((t for t in DTYPES.values() if t.torch == torch and t.within is None), None)
    if found is None:
        known = " ".join(t.torch for t in DTYPES.values() if t.torch and t.within is None)
        raise KernelError(f"{name} has elements of type {torch}; expected one of {known}")
    return found


def sharing(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The names of arrays whose memory overlaps that of another one, each with the first of them."""
    spans: dict[str, tuple[int, int]] = {}
    found: dict[str, str] = {}
    for name, t in tensors.items():
        if t.device.type == "meta" or not t.numel():
            continue
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        begin = t.data_ptr()
        end = begin + (last + 1) * t.element_size()
        for other, (a, z) in spans.items():
            if begin < z and a < end:
                found[name] = found.get(other, other)
                break
        spans[name] = (begin, end)
    return found


def described(value: Any) -> str:
    """A value in a few words."""
    return f"{value!r} ({type(value).__name__})" if len(repr(value)) < 40 else type(value).__name__
