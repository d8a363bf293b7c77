"""torch's own samples, error inputs, derivatives and module tables, with generated kernels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import transconv
from tests.gpu import cases as c
from tests.torch_ops import samples as s
from tests.torch_ops.test_opinfo import _legacy_table, _module_infos

pytestmark = pytest.mark.gpu

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Ten samples at a time, so that many processes share the work.
PARTS = [
    (name, at)
    for name, parts in (
        ("conv1d", 1),
        ("conv2d", 3),
        ("conv3d", 2),
        ("conv_transpose1d", 1),
        ("conv_transpose2d", 2),
        ("conv_transpose3d", 1),
    )
    for at in range(parts)
]


def part_of(name: str, at: int, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[Any]:
    made = enumerate(s.samples(name, dtype, requires_grad, c.DEVICE))
    yield from itertools.islice(made, 10 * at, 10 * at + 10)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "at"), PARTS)
def test_gradients_of_samples(name: str, at: int, dtype: torch.dtype, cases: c.Cases) -> None:
    forms = (
        (s.contiguous, s.channels_last, s.gaps) if dtype.itemsize > 2 else (s.contiguous, s.channels_last)
    )
    for number, sample in part_of(name, at, dtype, requires_grad=True):
        for variant in forms:
            with cases.case(f"{number} {variant.__name__}"):
                args = [s.vary(a, variant) for a in (sample.input, *sample.args)]
                grad = torch.randn_like(s.theirs(name)(*args, **sample.kwargs))
                got, wanted = (c.run(f(name), args, sample.kwargs, grad) for f in (s.ours, s.theirs))
                c.agree(cases, got, wanted, name, args, sample.kwargs, grad)
    cases.finish()


@pytest.mark.parametrize(("name", "at"), PARTS)
def test_gradcheck_of_samples(name: str, at: int, cases: c.Cases) -> None:
    """First and second derivatives, and dual numbers, of every float64 sample."""
    for number, sample in part_of(name, at, torch.float64, requires_grad=True):
        tensors = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
        rest = [a for a in sample.args if not isinstance(a, torch.Tensor)]

        def call(*given: torch.Tensor, rest: Any = rest, kwargs: Any = sample.kwargs) -> Any:
            return s.ours(name)(*given, *rest, **kwargs)

        with cases.case(f"gradcheck {number}"):
            assert torch.autograd.gradcheck(
                call, tensors, fast_mode=True, check_forward_ad=True, check_batched_grad=False
            )
        with cases.case(f"gradgradcheck {number}"):
            assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    cases.finish(at_least=4)


@pytest.mark.parametrize("variant", s.VARIANTS.values(), ids=list(s.VARIANTS))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "at"), PARTS)
def test_samples_in_every_memory_variant(
    name: str, at: int, dtype: torch.dtype, variant: Any, cases: c.Cases
) -> None:
    for number, sample in part_of(name, at, dtype):
        with cases.case(str(number)):
            args = [s.vary(a, variant) for a in (sample.input, *sample.args)]
            got, wanted = (c.run(f(name), args, sample.kwargs, None) for f in (s.ours, s.theirs))
            c.agree(cases, got, wanted, name, args, sample.kwargs)
    cases.finish(at_least=2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_what_torch_computes_or_refuses(name: str, dtype: torch.dtype, cases: c.Cases) -> None:
    for number, sample in enumerate(s.samples(name, dtype, device=c.DEVICE)):
        call = (sample.input, *sample.args)
        with cases.case(str(number)):
            try:
                wanted = s.theirs(name)(*call, **sample.kwargs)
            except RuntimeError as error:  # torch has no integer convolutions on a GPU
                with pytest.raises(type(error)):
                    s.ours(name)(*call, **sample.kwargs)
            else:
                # Complex sums are torch's own, in an order that differs from run to run.
                loose = {"rtol": 1e-5, "atol": 1e-4} if dtype.is_complex else {}
                torch.testing.assert_close(s.ours(name)(*call, **sample.kwargs), wanted, **loose)
    cases.finish(at_least=10)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_error_inputs(name: str, cases: c.Cases) -> None:
    """Same exception class, and the sentence that torch's own test asks for."""
    for number, error in enumerate(s.opinfo(name).error_inputs(c.DEVICE)):
        sample = error.sample_input
        with (
            cases.case(f"{number} {error.error_regex[:40]}"),
            pytest.raises(error.error_type, match=error.error_regex),
        ):
            s.ours(name)(sample.input, *sample.args, **sample.kwargs)
    cases.finish(at_least=10)


def as_close_as(got: list[torch.Tensor], wanted: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """torch's tolerances, or an error against float64 of no more than twice torch's own."""
    try:
        torch.testing.assert_close(got, wanted)
    except AssertionError:
        for mine, its, ref in zip(got, wanted, exact, strict=True):
            scale = ref.abs().max().item() * torch.finfo(mine.dtype).eps
            ours, theirs = ((t.double() - ref).square().mean().sqrt().item() for t in (mine, its))
            assert ours <= 2 * theirs + scale, f"error {ours:.3g}, torch's {theirs:.3g}"


def module_run(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), list(module.parameters()))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [n for n in dir(transconv.nn) if "Conv" in n and hasattr(torch.nn, n)])
def test_module_table(name: str, dtype: torch.dtype, cases: c.Cases) -> None:
    (info,) = (m for m in _module_infos() if m.module_cls.__name__ == name)
    kind = getattr(transconv.nn, name)
    inputs = info.module_inputs_func(info, device=c.DEVICE, dtype=dtype, requires_grad=True, training=True)
    for number, given in enumerate(inputs):
        made, call = given.constructor_input, given.forward_input
        with cases.case(f"{number} {made.args} {made.kwargs}"):
            factory = {"device": c.DEVICE, "dtype": dtype}
            theirs = info.module_cls(*made.args, **made.kwargs, **factory)
            ours = kind(*made.args, **made.kwargs, **factory)
            (x,) = call.args
            for module in (theirs, ours):
                module(x)  # a lazy module gets its shape
            ours.load_state_dict(theirs.state_dict())
            assert repr(ours) == repr(theirs)
            got, wanted = module_run(ours, x), module_run(theirs, x)
            as_close_as(got, wanted, module_run(theirs.double(), x.double()))
    cases.finish(at_least=2)


@pytest.mark.parametrize("part", range(4))
def test_legacy_module_table(part: int, cases: c.Cases) -> None:
    """common_nn: padding modes, zero batches, depthwise, dilation, same and valid."""
    for number, entry in enumerate(_legacy_table()):
        if number % 4 != part:
            continue
        name = entry.get("module_name") or entry["fullname"].split("_")[0]
        made = entry["constructor"] if "constructor" in entry else getattr(torch.nn, name)
        module = made(*entry.get("constructor_args", ())).to(c.DEVICE)
        if type(module).__name__ not in dir(transconv.nn):
            continue
        x = entry["input_fn"]() if "input_fn" in entry else torch.randn(entry["input_size"])
        x = x.to(c.DEVICE)
        with cases.case(f"{number} {entry.get('desc', '')}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = module_run(module, x)
            exact = module_run(module.double(), x.double())
            module.float()
            assert transconv.convert_(module).converted == ("",)
            as_close_as(module_run(module, x), wanted, exact)
    cases.finish(at_least=10)
