"""The arguments of a call: arrays as torch tensors, numbers, and what a kernel is compiled for.

Integers are sizes of arrays and of the work, and numbers of the call:

    X.shape = (200, 4096), work 200    X_d0 = 200, which is the work too; X_d1_by128 = 32

One compiled kernel serves all calls that it fits. Equal numbers share a name, so a mask that compares a
group's place with the end of an array is proved away where work and array have one size. A number that a
power of two divides is passed divided by it: what follows from that (no ragged end, aligned rows) follows
from the expression, for the simplifier and for Triton. A number below 2, and one that the kernel needs to
know, is a constant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

from transconv import ir
from transconv.support import KernelError

UNITS = (128, 64, 32, 16, 8)
"""Divisors that belong to a compiled kernel."""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer of a call. ``said``: as users write it; ``name``: of the kernel's argument."""

    said: str
    name: str
    value: int


class Needed(Exception):
    """The signal that a kernel needs to know the values of arguments, by name, when it is compiled."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


def unit_of(value: int) -> int:
    """The divisor of a number that belongs to a compiled kernel."""
    return next((u for u in UNITS if value % u == 0), 1)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How the numbers of a call enter a kernel. ``exprs``: each as a constant, or as an argument times a
    divisor; ``sizes``: the arguments, with the call's as examples, None without any; ``sources``: for each
    the place of its number and the divisor; ``first``: for each number the place of the one it equals;
    ``plain``: the places of numbers whose divisors do not matter."""

    numbers: tuple[Number, ...]
    exprs: tuple[ir.Expr, ...]
    sizes: ir.Sizes | None
    sources: tuple[tuple[int, int], ...]
    first: tuple[int, ...]
    plain: frozenset[int]

    def fits(self, given: Sequence[int]) -> bool:
        """Whether other numbers have the same constants, are equal where these are, and have the same
        divisors where these matter."""
        for at, (value, e, first) in enumerate(zip(given, self.exprs, self.first, strict=True)):
            if value != (self.numbers[at].value if isinstance(e, ir.Const) else given[first]):
                return False
        return all(
            1 < given[at] <= ir.LARGEST_SIZE and (at in self.plain or unit_of(given[at]) == unit)
            for at, unit in self.sources
        )

    def values(self, given: Sequence[int]) -> dict[str, int]:
        """The arguments for numbers that fit."""
        return {name: given[at] // unit for name, (at, unit) in zip(self.names, self.sources, strict=True)}

    def places(self, names: Iterable[str]) -> frozenset[int]:
        """The numbers that become arguments of these names."""
        own = {name: at for name, (at, _) in zip(self.names, self.sources, strict=True)}
        roots = {own[n] for n in names}
        return frozenset(at for at, first in enumerate(self.first) if first in roots)

    def is_argument(self, at: int) -> bool:
        """Whether a number is an argument of the kernel, not a constant."""
        return not isinstance(self.exprs[at], ir.Const)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return self.sizes.names if self.sizes else ()

    @property
    def divided(self) -> frozenset[str]:
        """The names of arguments that are divided."""
        return frozenset(n for n, (_, unit) in zip(self.names, self.sources, strict=True) if unit > 1)

    @property
    def told(self) -> tuple[str, ...]:
        """What each argument is, in the user's words."""
        found = []
        for at, _ in self.sources:
            same = [n.said for n, first in zip(self.numbers, self.first, strict=True) if first == at]
            if same != [str(self.exprs[at])]:
                found.append(f"{' = '.join(same)} = {ir.text_of(self.exprs[at])}")
        return tuple(found)


def sizing(numbers: Sequence[Number], fixed: Iterable[int] = (), plain: Iterable[int] = ()) -> Sizing:
    """How numbers enter a kernel. ``fixed``: the places of those that are constants; ``plain``: of those
    whose divisors do not matter."""
    constant, whole = {*fixed}, {*plain}
    alike: dict[int, list[int]] = {}
    for at, number in enumerate(numbers):
        if at not in constant and 1 < number.value <= ir.LARGEST_SIZE:
            alike.setdefault(number.value, []).append(at)
    exprs: list[ir.Expr] = [ir.as_expr(n.value) for n in numbers]
    first = [*range(len(numbers))]
    each: list[ir.Size] = []
    sources: list[tuple[int, int]] = []
    for value, places in alike.items():
        root = places[0]
        unit = 1 if whole.issuperset(places) else unit_of(value)
        name = numbers[root].name if unit == 1 else f"{numbers[root].name}_by{unit}"
        each.append(ir.Size(name, value // unit, 2 if unit == 1 else 1, ir.LARGEST_SIZE // unit))
        sources.append((root, unit))
        for at in places:
            exprs[at] = ir.Var(name) if unit == 1 else ir.Var(name) * unit
            first[at] = root
    unchecked = frozenset(places[0] for places in alike.values() if whole.issuperset(places))
    return Sizing(
        tuple(numbers),
        tuple(exprs),
        ir.Sizes(tuple(each)) if each else None,
        tuple(sources),
        tuple(first),
        unchecked,
    )


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array of a call without its sizes. ``order``: its dimensions from the outermost on if it is
    dense; ``strides``: of others; ``overlaps``: whether elements share memory."""

    dtype: ir.DType
    rank: int
    order: tuple[int, ...]
    strides: tuple[int, ...] = ()
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call. ``kinds``: an ArrayLayout, a type or a boolean for each parameter;
    ``numbers``: sizes of arrays in order and integers; ``tensors``: torch's tensors, by name; ``alike``:
    names of arrays that share memory, each with the first of them; ``device``: of the arrays."""

    kinds: dict[str, Any]
    numbers: tuple[Number, ...]
    tensors: dict[str, Any]
    floats: dict[str, float]
    alike: dict[str, str]
    device: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """What a kernel depends on beside the numbers."""
        # With the types of booleans: 1 and True are equal in Python.
        kinds = tuple((n, type(k), k) for n, k in self.kinds.items())
        return kinds, tuple(sorted(self.alike.items()))

    def numbers_with(self, work: Sequence[int]) -> tuple[Number, ...]:
        """The numbers, and behind them those of a group's work."""
        return (
            *self.numbers,
            *(Number(f"work_shape[{at}]", f"work_{at}", n) for at, n in enumerate(work)),
        )

    def specs(self, sizing: Sizing) -> dict[str, Any]:
        """What a kernel knows of each parameter: a Tensor, a number, or an expression of numbers that are
        arguments. A Tensor without dimensions is a number that is read at run time."""
        places, found = count(), dict[str, Any]()
        for name, kind in self.kinds.items():
            if isinstance(kind, ArrayLayout):
                at = [next(places) for _ in range(kind.rank)]
                found[name] = _tensor(
                    name,
                    kind,
                    tuple(sizing.numbers[i].value for i in at),
                    tuple(sizing.exprs[i] for i in at),
                )
            elif kind is float:
                found[name] = ir.Tensor(name, (), (), ir.Layout.dense(ir.f32, ()), number=True)
            elif kind is int:
                e = sizing.exprs[next(places)]
                found[name] = e.value if isinstance(e, ir.Const) else e
            else:
                found[name] = kind
        return found


def tensors_of(given: Mapping[str, Any]) -> Arguments:
    """Look at arguments by name. Raises KernelError for one that is no array and no number, for an array
    of a type that kernels do not have, and for arrays of several devices."""
    kinds: dict[str, Any] = {}
    numbers: list[Number] = []
    tensors: dict[str, Any] = {}
    floats: dict[str, float] = {}
    for name, value in given.items():
        number = plain_number(value)
        if isinstance(number, bool):
            kinds[name] = number
        elif isinstance(number, int):
            kinds[name] = int
            numbers.append(Number(name, name, number))
        elif number is not None:
            floats[name] = number
            kinds[name] = float
        elif isinstance(value, ModuleType):  # a library of functions
            kinds[name] = value
        else:
            tensor = as_tensor(name, value)
            tensors[name] = tensor
            kinds[name] = lying(name, tensor)
            numbers += [
                Number(f"{name}.shape[{d}]", f"{name}_d{d}", n) for d, n in enumerate(tensor.shape)
            ]
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        told = ", ".join(f"{n} on {t.device}" for n, t in tensors.items())
        raise KernelError(f"arrays on several devices: {told}; expected one device")
    return Arguments(kinds, tuple(numbers), tensors, floats, sharing(tensors), next(iter(devices), None))


def plain_number(value: Any) -> int | float | bool | None:
    """A number of Python or NumPy as Python's; None for what is none."""
    for kind in (bool, int, float):  # a launch passes no subclass, as np.float64 is one
        if isinstance(value, kind):
            return kind(value)
    if (
        hasattr(value, "dtype")
        and hasattr(value, "item")
        and not hasattr(value, "data_ptr")
        and (getattr(value, "shape", None) == () and not hasattr(value, "__dlpack__"))
    ):
        number: int | float | bool = value.item()
        return number
    return None


def as_tensor(name: str, value: Any) -> Any:
    """An array as a torch tensor of the same memory."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            form = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise KernelError(f"{name} is {form}; expected a strided tensor")
        return value.detach()
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise KernelError(
            f"{name} is a read-only array; expected one that may be written, as {name}.copy()"
        )
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
        if hasattr(value, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).split("\n")[0]
        raise KernelError(f"{name} cannot be an array of a kernel: {said}") from None
    raise KernelError(
        f"{name} is {described(value)}; expected a torch tensor, a NumPy array, an object "
        "with DLPack or the CUDA array interface, or a number"
    )


def lying(name: str, tensor: Any) -> ArrayLayout:
    """What a kernel knows of an array beside its sizes."""
    dtype = type_of(name, str(tensor.dtype).removeprefix("torch."))
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_neg() or tensor.is_conj():
        raise KernelError(
            f"{name} is a negated or conjugated view; expected values as they are "
            "(resolve_neg() copies it)"
        )
    if not shape:
        raise KernelError(
            f"{name} is an array without dimensions; expected a number, or an array of one "
            f"element: {name}.reshape(1)"
        )
    if tensor.is_contiguous():
        return ArrayLayout(dtype, len(shape), tuple(range(len(shape))))
    layout = ir.Layout.from_strides(dtype, shape, strides)
    order = tuple(b.dim for b in layout.blocks)
    if layout.is_packed:
        return ArrayLayout(dtype, len(shape), order)
    return ArrayLayout(dtype, len(shape), order, strides, layout.overlaps and all(shape))


def _tensor(name: str, kind: ArrayLayout, shape: tuple[int, ...], sizes: tuple[ir.Expr, ...]) -> ir.Tensor:
    """An array of these sizes. ``sizes``: the same as expressions of arguments."""
    dims = tuple(f"d{i}" for i in range(len(shape)))
    named = not all(isinstance(e, ir.Const) for e in sizes)
    if not kind.strides:
        layout = ir.Layout.dense(kind.dtype, shape, kind.order)
        return ir.Tensor(name, dims, shape, layout, extents=sizes if named else ())
    layout = ir.Layout.from_strides(kind.dtype, shape, kind.strides)
    if not named:
        return ir.Tensor(name, dims, shape, layout)
    return ir.Tensor(
        name, dims, shape, layout, extents=sizes, pitches=tuple(map(ir.as_expr, kind.strides))
    )


def type_of(name: str, torch: str) -> ir.DType:
    """The type of the IR that torch calls so."""
    found = next((t for t in ir.DTYPES.values() if t.torch == torch and t.within is None), None)
    if found is None:
        known = " ".join(t.torch for t in ir.DTYPES.values() if t.torch and t.within is None)
        raise KernelError(f"{name} has elements of type {torch}; expected one of {known}")
    return found


def sharing(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The names of arrays whose memory overlaps that of another one, each with the first of them."""
    spans: dict[str, tuple[int, int]] = {}
    found: dict[str, str] = {}
    for name, t in tensors.items():
        if t.device.type == "meta" or not t.numel():
            continue
        begin = t.data_ptr()
        end = begin + spanned(t)
        for other, (a, z) in spans.items():
            if begin < z and a < end:
                found[name] = found.get(other, other)
                break
        spans[name] = (begin, end)
    return found


def spanned(tensor: Any) -> int:
    """The bytes from the first element of an array to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * int(tensor.element_size()) if tensor.numel() else 0


def described(value: Any) -> str:
    """A value in a few words."""
    return f"{value!r} ({type(value).__name__})" if len(repr(value)) < 40 else type(value).__name__
