"""The arguments of a call: arrays as torch tensors, and what a kernel is compiled for.

Also here: results of a kernel: arrays that a call leaves out, allocates, and returns.

    @kernel(work_shape=N, results="Y")
    def doubled(group, X: Buffer[N], Y: Buffer[N]): ...

    y = doubled(x)          # y = empty(N); doubled(x, y)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

from transconv.ir import DTYPES, Const, DType, Expr, Layout, Tensor, as_expr, f32
from transconv.kernel.annotations import Buffer, Declared, value_of
from transconv.kernel.launch.size_arguments import Number, Sizing
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.values import dtype_of
from transconv.support import KernelError


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array of a call without its sizes. ``order``: its dimensions from the outermost on if it is
    dense; ``strides``: of others; ``overlaps``: whether elements share memory."""

    dtype: DType
    rank: int
    order: tuple[int, ...]
    strides: tuple[int, ...] = ()
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """``kinds``: a Lying, a type or a boolean for each parameter; ``numbers``: sizes of arrays in order
    and whole numbers; ``tensors``: torch's tensors, by name; ``alike``: names of arrays that share memory,
    each with the first of them; ``device``: of the arrays."""

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

    def specs(self, sizing: Sizing) -> dict[str, Any]:
        """What a kernel knows of each parameter: a Tensor, a number, or an expression of numbers that are
        arguments. A Tensor without dimensions is a number that is read at run time."""
        places, found = count(), dict[str, Any]()
        for name, kind in self.kinds.items():
            if isinstance(kind, ArrayLayout):
                at = [next(places) for _ in range(kind.rank)]
                found[name] = _tensor(name, kind, tuple(sizing.numbers[i].value for i in at),
                                      tuple(sizing.exprs[i] for i in at))
            elif kind is float:
                found[name] = Tensor(name, (), (), Layout.dense(f32, ()), number=True)
            elif kind is int:
                e = sizing.exprs[next(places)]
                found[name] = e.value if isinstance(e, Const) else e
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
            numbers += [Number(f"{name}.shape[{d}]", f"{name}_d{d}", n)
                        for d, n in enumerate(tensor.shape)]
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        told = ", ".join(f"{n} on {t.device}" for n, t in tensors.items())
        raise KernelError(f"arrays on several devices: {told}; expected one device")
    return Arguments(kinds, tuple(numbers), tensors, floats, sharing(tensors),
                     next(iter(devices), None))


def plain_number(value: Any) -> int | float | bool | None:
    """A number of Python or NumPy as Python's; None for what is none."""
    if isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "item") and not hasattr(value, "data_ptr") and (
            getattr(value, "shape", None) == () and not hasattr(value, "__dlpack__")):
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
        raise KernelError(f"{name} is a read-only array; expected one that may be written, as "
                          f"{name}.copy()")
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
    raise KernelError(f"{name} is {described(value)}; expected a torch tensor, a NumPy array, an object "
                      "with DLPack or the CUDA array interface, or a number")


def lying(name: str, tensor: Any) -> ArrayLayout:
    """What a kernel knows of an array beside its sizes."""
    dtype = type_of(name, str(tensor.dtype).removeprefix("torch."))
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_neg() or tensor.is_conj():
        raise KernelError(f"{name} is a negated or conjugated view; expected values as they are "
                          "(resolve_neg() copies it)")
    if not shape:
        raise KernelError(f"{name} is an array without dimensions; expected a number, or an array of one "
                          f"element: {name}.reshape(1)")
    if tensor.is_contiguous():
        return ArrayLayout(dtype, len(shape), tuple(range(len(shape))))
    layout = Layout.from_strides(dtype, shape, strides)
    order = tuple(b.dim for b in layout.blocks)
    if layout.is_packed:
        return ArrayLayout(dtype, len(shape), order)
    return ArrayLayout(dtype, len(shape), order, strides, layout.overlaps and all(shape))


def _tensor(name: str, kind: ArrayLayout, shape: tuple[int, ...], sizes: tuple[Expr, ...]) -> Tensor:
    """An array of these sizes. ``sizes``: the same as expressions of arguments."""
    dims = tuple(f"d{i}" for i in range(len(shape)))
    named = not all(isinstance(e, Const) for e in sizes)
    if not kind.strides:
        layout = Layout.dense(kind.dtype, shape, kind.order)
        return Tensor(name, dims, shape, layout, extents=sizes if named else ())
    layout = Layout.from_strides(kind.dtype, shape, kind.strides)
    if not named:
        return Tensor(name, dims, shape, layout)
    return Tensor(name, dims, shape, layout, extents=sizes, pitches=tuple(map(as_expr, kind.strides)))


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


AskedResults = Mapping[str, Any] | Sequence[str] | str | None


def results_of(name: str, parameters: Sequence[str], asked: AskedResults) -> dict[str, DType | None]:
    """The element type of each result in the order of the parameters; None: that of the first array.
    Raises KernelError for what is no parameter or no type."""
    said = {} if asked is None else {asked: None} if isinstance(asked, str) else (
        dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked))
    if wrong := [n for n in said if n not in parameters]:
        raise KernelError(f"{name} has the result {wrong[0]}; expected some of {' '.join(parameters)}")
    try:
        return {n: None if said[n] is None else dtype_of(said[n]) for n in parameters if n in said}
    except Refusal as refusal:
        raise KernelError(f"the results of {name}: found {refusal.found}; expected "
                          f"{refusal.allowed}") from None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What calls with such arguments leave out, by its place among the arguments in increasing order:
    what makes a result, or None and a default."""

    each: tuple[tuple[int, Callable[[], Any] | None, Any], ...]

    def filled(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The arguments with what is left out, and the results as the call returns them."""
        full, made = list(args), []
        for at, make, default in self.each:
            if make is None:
                full.insert(at, default)
            else:
                full.insert(at, make())
                made.append(full[at])
        return tuple(full), returned(made)


def returned(made: Sequence[Any]) -> Any:
    """Results as a call returns them; None for one that was given all arrays."""
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def makers(name: str, results: Mapping[str, DType | None], declared: Declared, given: Mapping[str, Any],
           sizes: Mapping[str, int]) -> dict[str, Callable[[], Any]]:
    """What makes each result: as large as its annotation says, else as the first array; beside that, and
    of its type unless the kernel says another. ``sizes``: the values of symbols. Raises KernelError."""
    first = next((n for n, v in given.items() if n not in results and hasattr(v, "shape")
                  and plain_number(v) is None), None)
    if first is None:
        raise KernelError(f"{name} is called without an array; expected at least one")
    made = {}
    for n, dtype in results.items():
        said, shape = declared.each.get(n), tuple(given[first].shape)
        if isinstance(said, Buffer):
            shape = tuple(value_of(name, e, sizes) for e in said.sizes)
        made[n] = _empty(first, given[first], shape, dtype)
    return made


def _empty(name: str, like: Any, shape: tuple[int, ...], dtype: DType | None) -> Callable[[], Any]:
    """What makes an array of a shape, of NumPy for NumPy's and else of torch."""
    import numpy as np

    if isinstance(like, np.ndarray):
        kind = like.dtype if dtype is None else dtype.numpy
        return lambda: np.empty(shape, kind)
    import torch

    tensor = as_tensor(name, like)
    of = tensor.dtype if dtype is None else getattr(torch, dtype.torch)
    device = tensor.device
    return lambda: torch.empty(shape, dtype=of, device=device)
