"""Triton's own interpreter, prepared to run generated kernels without a GPU."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from transconv.backend_triton.launch.bound_start import INSTRUCTIONS
from transconv.ir import DType, bf16, convert, f8e4m3, f8e5m2, multiply_add
from transconv.support import Unsupported, knobs

Array = np.ndarray[Any, np.dtype[Any]]


@lru_cache(maxsize=1)
def prepare_interpreter() -> None:
    """Patch Triton's interpreter, once per process: scalar conditions in masks, rounding to bf16 and 8-bit
    floats, fused products and sums, reductions, the waits of ``launch/bound_start.py``.

    The interpreter gives the result of a comparison the type of its operands, and broadcasts a scalar
    as that type: ``mask & (0 <= i)`` becomes 32-bit integers. Triton 3.6 accepts them as a mask, 3.9
    refuses them ("mask has unsupported dtype").

    It truncates f32 to bf16 and to 8-bit floats, where chips round to nearest, and takes other numbers
    for the bits of bf16.

    It rounds the product of ``tl.fma``.

    It combines the elements of a reduction one at a time unless it knows the function.

    It adds up integers in 64 bits, and refuses a sum that 32 bits do not hold: on chips it wraps around.

    It lacks the instructions of ``launch/bound_start.py``. Kernels run one after another here, so a wait
    does nothing. It lacks ``map_elementwise``, too: functions of numbers are functions of tiles here.

    It makes a kernel once more, and reads its source again, to find its first line. It counts the lines of
    each node anew.

    It multiplies matrices by BLAS, which may add up a row in another order than its neighbours: a matrix
    unit does not. Kernels whose sizes are arguments, which promise each sample's bits wherever it lies,
    have all rows and columns added up alike (``alike``).

    It computes sums and products of integers a second time, in 64 bits, for an assertion that it drops
    unless it debugs; half of its time goes there.

    It lists its language's builtin functions and makes their replacements for each launch, and for each
    operation NumPy's types, shapes and the texts of types."""
    from triton.language import bfloat16, core, float32, int1, math, uint64
    from triton.runtime import interpreter
    from triton.runtime.interpreter import (
        FunctionRewriter,
        InterpreterBuilder,
        ReduceOps,
        ScanOps,
        TensorHandle,
    )

    spread, cast = InterpreterBuilder.create_splat, InterpreterBuilder.cast_impl
    multiplied = InterpreterBuilder.create_dot
    cast_any = InterpreterBuilder.create_fp_to_fp

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == bool and value.dtype != int1:
            value = TensorHandle(value.data, int1)
        return spread(self, shape, value)

    def cast_impl(self: Any, given: Any, to: Any) -> Any:
        if to.scalar == bfloat16 and given.dtype.scalar != bfloat16:
            with np.errstate(over="ignore"):  # of f64
                return TensorHandle(nearest_bf16(given.data.astype(np.float32)), to.scalar)
        return cast(self, given, to)

    def create_fp_to_fp(self: Any, given: Any, to: Any, rounding_mode: Any) -> Any:
        if short := SHORT.get(str(to.scalar)):
            floats = given if given.dtype.scalar == float32 else cast_any(self, given, float32, None)
            return TensorHandle(nearest_8_bits(floats.data, short), to.scalar)
        if short := SHORT.get(str(given.dtype.scalar)):
            floats = TensorHandle(values_of_8_bits(given.data, short), float32)
            return floats if to.scalar == float32 else self.cast_impl(floats, to)
        return cast_any(self, given, to, rounding_mode)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        kinds = {str(t.dtype.scalar) for t in (a, b)}
        if not getattr(self, ALIKE, False) or any(k.startswith("fp8") and k not in SHORT for k in kinds):
            return multiplied(self, a, b, d, precision, imprecise)
        left, right = [
            values_of_8_bits(t.data, SHORT[kind]) if (kind := str(t.dtype.scalar)) in SHORT else t.data
            for t in (a, b)
        ]
        return TensorHandle(product(left, right, d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
    FunctionRewriter._get_jit_fn_file_line = lambda self: place_of(self.fn)
    FunctionRewriter._transform_ast = rewritten
    InterpreterBuilder.create_fma = create_fma
    InterpreterBuilder.create_splat, InterpreterBuilder.cast_impl = create_splat, cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    ReduceOps.generic_reduce = reduce_in_pairs
    ReduceOps.sum = sum_in_own_type
    ScanOps.cumsum, ScanOps.cumprod = scan_in_own_type(np.cumsum), scan_in_own_type(np.cumprod)
    if not (builder := interpreter.interpreter_builder).options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    of_scalar = lru_cache(maxsize=64)(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda of: of_scalar(uint64 if of.scalar.is_ptr() else of.scalar)
    core.tuple_type.__init__ = tuple_type_without_name
    core.tuple_type.name = property(
        lambda self: f"[{','.join(f'{k}:{v}' for k, v in zip(self.fields, self.types, strict=False))}]"
    )
    core.block_type.__init__, core.tensor.__init__ = block_type_without_name, tensor_of_known_shape
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    language = import_module("triton.language")
    if knobs.interpret():  # else the next kernel is compiled
        cuda = import_module(INSTRUCTIONS)
        cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # type: ignore[attr-defined]
        language.map_elementwise = lambda function, *tiles: function(*tiles)  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin
    for package in (language, math, core, core.tensor):
        builtins_of(package)  # before a launch replaces them


def rewritten(self: Any, source: str) -> Any:
    """The tree of a kernel as the interpreter runs it, at the lines of its file."""
    tree = ast.parse("\n" * (self.def_file_lineno - 1) + source)
    return ast.fix_missing_locations(self.ast_transformer.visit(tree))


@lru_cache(maxsize=16)
def builtins_of(package: Any) -> tuple[tuple[str, Any], ...]:
    """The builtin functions of a module or class of Triton's language, by name."""
    every = ((name, getattr(package, name, None)) for name in dir(package))
    return tuple((name, found) for name, found in every if core().is_builtin(found))


@lru_cache(maxsize=1)
def core() -> Any:
    """The module of Triton's language that has its types."""
    return import_module("triton.language.core")


@lru_cache(maxsize=16)
def replacements(package: Any, builder: Any) -> tuple[tuple[str, Any], ...]:
    """What replaces the builtin functions of a module or class where kernels are interpreted, by name."""
    interpreter = import_module("triton.runtime.interpreter")
    scope = interpreter._LangPatchScope()
    for name, found in builtins_of(package):
        interpreter._patch_attr(package, name, found, builder, scope)
    made = tuple((name, getattr(package, name)) for name, _ in builtins_of(package))
    scope.restore()
    return made


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replaces the builtin functions of a module or class, as Triton's function of this name does, unless
    that is done: it does so again for each call of a function from a kernel."""
    made = replacements(package, builder)
    if made and getattr(package, made[0][0]) is not made[0][1]:
        for name, function in made:
            scope.set_attr(package, name, function)


def tuple_type_without_name(self: Any, types: Any, fields: Any = None) -> None:
    """Triton's constructor of the type of a tuple, without its name."""
    self.types, self.fields = types, fields or [""] * len(types)


@lru_cache(maxsize=4096, typed=True)  # True is no 1
def known_shape(*extents: int) -> tuple[Any, Any, Any]:
    """The shape of the type of a block, and of a tensor of this type the shape and number of elements."""
    numbers = core().tuple([core().constexpr(n) for n in extents])
    return core().tuple(extents), numbers, core().constexpr(int(np.prod(extents)))


def block_type_without_name(self: Any, element_ty: Any, shape: Any) -> None:
    """Triton's constructor of the type of a block, without its name."""
    assert isinstance(shape, list | core().tuple)
    extents = tuple(getattr(n, "value", n) for n in getattr(shape, "values", shape))
    if not extents:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.numel = element_ty, core().validate_block_shape(extents)
    self.shape = known_shape(*extents)[0]


def tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:
    """Triton's constructor of a tensor; tensors of one shape share it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.shape, self.numel = known_shape(*(type.shape.values if type.is_block() else ()))


@contextmanager
def alike(on: bool) -> Iterator[None]:
    """Within ``with``, products add up all rows and columns in one order, if ``on``."""
    from triton.runtime.interpreter import interpreter_builder

    setattr(interpreter_builder, ALIKE, on)
    try:
        yield
    finally:
        setattr(interpreter_builder, ALIKE, False)


def product(a: Array, b: Array, dtype: Any) -> Array:
    """The product of matrices, of which each element is added up in one order, wherever it lies."""
    columns = np.ascontiguousarray(np.swapaxes(b, -1, -2), dtype=dtype)
    made: Array = np.einsum("...mk,...nk->...mn", np.ascontiguousarray(a, dtype=dtype), columns)
    return made


ALIKE = "rows_alike"  # an attribute of Triton's interpreter


def place_of(function: Any) -> tuple[str, int]:
    """The file of a function, and the line of its ``def``, below those of its decorators."""
    file, at = function.__code__.co_filename, function.__code__.co_firstlineno
    while (line := linecache.getline(file, at)) and not line.lstrip().startswith("def "):
        at += 1
    return file, at


def reduce_in_pairs(self: Any, given: Any) -> list[Any]:
    """Reduces tensors along an axis with the function ``self.combine_fn``: neighbours in all rows at once,
    until one is left. Extents are powers of two, as in all tiles."""
    tensors, axis = self.unravel(given, self.axis)
    parts = [t.handle.data for t in tensors]
    rows = (slice(None),) * axis
    while parts[0].shape[axis] > 1:
        sides = [
            self.to_tensor(x[(*rows, slice(first, None, 2))], t.dtype)
            for first in (0, 1)
            for x, t in zip(parts, tensors, strict=True)
        ]
        made = self.combine_fn.fn(*sides)
        made = made if isinstance(made, tuple) else (made,)
        shape = sides[0].handle.data.shape
        parts = [
            np.broadcast_to(m.handle.data if hasattr(m, "handle") else m, shape).astype(x.dtype)
            for m, x in zip(made, parts, strict=True)
        ]
    if not self.keep_dims:
        parts = [x.item() if self.axis is None else x.squeeze(axis) for x in parts]
    return [self.to_tensor(x, t.dtype) for x, t in zip(parts, tensors, strict=True)]


def sum_in_own_type(self: Any, given: Any) -> Any:
    """The sum of a tensor along an axis; of integers it wraps around."""
    x = given.handle.data
    return self.to_tensor(np.sum(x, axis=self.axis, keepdims=self.keep_dims, dtype=x.dtype), given.dtype)


def scan_in_own_type(scan: Any) -> Any:
    """A scan of NumPy's, of which each number has the type of its operands."""

    def scanned(self: Any, given: Any) -> list[Any]:
        x = given.handle.data
        return [self.to_tensor(scan(x, axis=self.axis, dtype=x.dtype), dtype=given.dtype)]

    return scanned


def nearest_bf16(x: Array) -> Array:
    """The bits of f32 numbers as bf16, ties to even."""
    bits = convert(x, bf16).view(np.uint32) >> 16
    return np.where(np.isnan(x), 0x7FC0, bits).astype(np.uint16)


# Triton's names in types, and the rows of them.
SHORT = {"fp8e4nv": f8e4m3, "fp8e5": f8e5m2}


def nearest_8_bits(x: Array, dtype: DType) -> Array:
    """The bits of f32 numbers as 8-bit floats, ties to even, in the range of finite ones."""
    import torch

    near = torch.from_numpy(np.ascontiguousarray(convert(x, dtype)))
    return near.to(getattr(torch, dtype.torch)).view(torch.uint8).numpy()


def values_of_8_bits(bits: Array, dtype: DType) -> Array:
    """The 8-bit floats of these bits as f32 numbers."""
    import torch

    held = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    return held.view(getattr(torch, dtype.torch)).float().numpy()


@contextmanager
def explained() -> Iterator[None]:
    """Triton up to 3.6 converts a one-element array to a number where a loop's bound is not a constant.
    NumPy 2.4 refuses that: the failure becomes Unsupported("numpy:new"), with what to install. NumPy's
    warnings are left out, as a GPU has none: lanes outside of a tile divide 0 by 0."""
    try:
        with np.errstate(all="ignore"):
            yield
    except Exception as error:
        if _release("triton") >= (3, 7) or _release("numpy") < (2, 4):
            raise
        raise Unsupported(
            "numpy:new",
            f"Triton {version('triton')} cannot interpret this kernel with numpy "
            f"{version('numpy')}; expected numpy below 2.4: pip install 'numpy<2.4'",
        ) from error


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version(package))[:2])
