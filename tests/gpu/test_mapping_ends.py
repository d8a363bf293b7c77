"""Operands at the first and at the last byte of a mapping of device memory, with nothing mapped around it:
an access outside, also one that is only formed where a chip fetches it, is a fault and not a number."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from transconv.conv import ConvProblem, Prop, compiler
from transconv.schedule import Schedule
from transconv.support import ScheduleError
from transconv.target import detect

pytestmark = pytest.mark.gpu
GATHER = "a=gather b=gather"
PROBLEMS = (  # masked lanes around images, tails of channels and pixels, strides, groups; and boxes
    ("mb8ic64ih28oc64oh28kh3ph1 dt=f32", ""),
    ("mb3ic5ih13oc7oh13kh3ph1 dt=f32", ""),
    ("mb3ic5ih13oc7oh13kh3ph1 dt=f16", f"mb.oh.ow:32 oc:16 ic:16 | mma | {GATHER} | stages=4 warps=4"),
    ("mb2ic16ih28oc32oh14kh3sh2ph1 dt=f16 tag=axb", ""),
    ("mb2ic64ih28oc64oh28kh3ph1 dt=f16 tag=axb", ""),
    ("g32mb4ic32ih14oc32oh14kh3ph1 dt=f16 tag=axb", ""),
)


class Granularity(ctypes.Structure):
    """CUmemAllocationProp of pinned memory of one device."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int),
        ("device", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


@dataclass
class Mapping:
    """A mapping of its own, between pages that nothing is mapped to."""

    address: int
    size: int

    def tensor(self, like: torch.Tensor, last: bool) -> torch.Tensor:
        """A copy of a dense tensor (of any order of dimensions) that begins with the first byte of the
        mapping, or ends with its last one."""
        taken = like.numel() * like.element_size()
        at = self.address + (self.size - taken if last else 0)
        kind = {torch.float32: "<f4", torch.float16: "<f2"}[like.dtype]
        steps = tuple(n * like.element_size() for n in like.stride())

        told = {"shape": tuple(like.shape), "typestr": kind, "strides": steps, "version": 3}
        held = SimpleNamespace(__cuda_array_interface__=told | {"data": (at, False)})
        made = torch.as_tensor(held, device="cuda")
        assert made.data_ptr() == at and made.stride() == like.stride()
        return made.copy_(like)


def driver() -> Any:
    torch.zeros(1, device="cuda")  # its context is the current one
    return ctypes.CDLL("libcuda.so.1")


def call(cuda: Any, name: str, *args: Any) -> None:
    assert (code := getattr(cuda, name)(*args)) == 0, f"{name}: CUDA error {code}"


@contextmanager
def mapped(room: int) -> Iterator[Mapping]:
    """At least ``room`` bytes of device memory, one page of addresses without memory before and behind."""
    cuda, device = driver(), torch.cuda.current_device()
    wanted = Granularity(1, 0, 1, device, None, (ctypes.c_ubyte * 8)())
    page, base, handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    call(cuda, "cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(wanted), 0)
    n, zero = page.value, ctypes.c_uint64(0)
    size = -(-room // n) * n
    whole = ctypes.c_size_t(size + 2 * n)
    call(cuda, "cuMemAddressReserve", ctypes.byref(base), whole, ctypes.c_size_t(0), zero, zero)
    inner, length = ctypes.c_uint64(base.value + n), ctypes.c_size_t(size)
    call(cuda, "cuMemCreate", ctypes.byref(handle), length, ctypes.byref(wanted), zero)
    call(cuda, "cuMemMap", inner, length, ctypes.c_size_t(0), handle, zero)
    asked = Access(1, device, 3)
    call(cuda, "cuMemSetAccess", inner, length, ctypes.byref(asked), ctypes.c_size_t(1))
    try:
        yield Mapping(inner.value, size)
    finally:
        torch.cuda.synchronize()
        call(cuda, "cuMemUnmap", inner, length)
        call(cuda, "cuMemRelease", handle)
        call(cuda, "cuMemAddressFree", base, whole)


def dense(p: ConvProblem, name: str) -> torch.Tensor:
    """Small whole numbers as an operand of a problem, in its layout."""
    spec = p.specs[name]
    strides = spec.layout.strides()
    assert strides is not None
    made = torch.empty_strided(
        p.shapes[name], strides, dtype=getattr(torch, spec.dtype.torch), device="cuda"
    )
    return made.copy_(torch.randint(-2, 3, p.shapes[name], device="cuda"))


def answer(p: ConvProblem, prop: Prop, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """What torch computes in f64."""
    x, w, y = (given[n].double() for n in ("src", "wei", "dst"))
    asked: dict[str, Any] = {"stride": p.stride, "padding": p.pad_lo, "groups": p.g}
    if prop is Prop.FWD:
        return torch.nn.functional.conv2d(x, w, **asked)
    if prop is Prop.BWD_D:
        return conv2d_input(list(x.shape), w, y, **asked)
    return conv2d_weight(x, list(w.shape), y, **asked)


@pytest.mark.parametrize("last", [False, True], ids=["first byte", "last byte"])
@pytest.mark.parametrize("prop", list(Prop), ids=str)
@pytest.mark.parametrize(("problem", "words"), PROBLEMS)
def test_nothing_outside_is_touched(problem: str, words: str, prop: Prop, last: bool) -> None:
    p = ConvProblem.parse(problem)
    try:
        made = compiler.build(p, prop, detect(), Schedule.parse(words) if words else None)
    except ScheduleError:  # the words are those of one direction
        made = compiler.build(p, prop, detect(), None)
    given = {n: dense(p, n) for n in p.specs}
    want = answer(p, prop, given)
    rooms = [given[n].numel() * given[n].element_size() for n in given]
    with mapped(rooms[0]) as a, mapped(rooms[1]) as b, mapped(rooms[2]) as c:
        held = {n: m.tensor(given[n], last) for n, m in zip(given, (a, b, c), strict=True)}
        held[prop.result].fill_(float("nan"))
        made.launch(**held)
        torch.cuda.synchronize()
        got = held[prop.result].double().clone()
        del held
    assert torch.equal(got, want.to(got.dtype)) or torch.allclose(got, want, rtol=1e-2, atol=1e-2)
