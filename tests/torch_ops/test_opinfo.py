"""torch's own samples, error inputs and module tables, run against our functions and modules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import transconv
from tests.torch_ops import samples as s

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64)


def _same(got: Any, wanted: Any, what: str = "") -> None:
    torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda text: f"{what}: {text}")


def _is_right(y: torch.Tensor, f: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether torch's own answer is near its answer in f64, as the sum of the products' magnitudes
    measures it. On some CPUs its f16 kernel for dilated groups (torch 2.13) reads what lies beside the
    input: another answer at every call."""

    def in_f64(change: Any) -> torch.Tensor:
        return f(*(change(a.double()) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    return bool(((y - in_f64(lambda a: a)).abs() <= 2**-8 * in_f64(torch.abs)).all())


@pytest.mark.every(5)
@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_in_every_memory_variant(name: str, dtype: torch.dtype) -> None:
    seen = compared = 0
    for sample in s.samples(name, dtype):
        for memory, variant in s.VARIANTS.items():
            args = [s.vary(a, variant) for a in (sample.input, *sample.args)]
            got = s.ours(name)(*args, **sample.kwargs)
            wanted = s.theirs(name)(*args, **sample.kwargs)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            seen += 1
            if dtype is torch.float16 and not _is_right(wanted, s.theirs(name), args, sample.kwargs):
                continue
            _same(got, wanted, f"{memory} {sample.kwargs}")
            compared += 1
    assert seen >= 10 * len(s.VARIANTS)
    assert compared == seen or (dtype is torch.float16 and compared >= seen / 2)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64], ids=str)
def test_gradients_of_samples(name: str, dtype: torch.dtype) -> None:
    for sample in s.samples(name, dtype, requires_grad=True):
        for variant in (s.contiguous, s.channels_last, s.gaps):
            args = [s.vary(a, variant) for a in (sample.input, *sample.args)]
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            results = [f(name)(*args, **sample.kwargs) for f in (s.ours, s.theirs)]
            grad = torch.randn_like(results[0])
            got, wanted = (torch.autograd.grad(y, leaves, grad) for y in results)
            _same(got, wanted)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_error_inputs(name: str) -> None:
    """Same exception class, and the sentence that torch's own test asks for."""
    op = s.opinfo(name)
    seen = 0
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            s.ours(name)(sample.input, *sample.args, **sample.kwargs)
        seen += 1
    assert seen >= 10


@pytest.mark.every(2)
@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_gradcheck_of_samples(name: str) -> None:
    for at, sample in enumerate(s.samples(name, torch.float64, requires_grad=True)):
        if at % 4:
            continue
        tensors = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
        rest = [a for a in sample.args if not isinstance(a, torch.Tensor)]

        def call(*given: torch.Tensor, rest: Any = rest, kwargs: Any = sample.kwargs) -> Any:
            return s.ours(name)(*given, *rest, **kwargs)

        assert torch.autograd.gradcheck(call, tensors, fast_mode=True, check_batched_grad=False)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def _module_infos() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return [
        m
        for m in module_db
        if m.module_cls.__name__ in dir(transconv.nn) and "Conv" in m.module_cls.__name__
    ]


def test_module_table() -> None:
    """ModuleInfo: the twelve modules, their inputs, results, gradients and state."""
    kinds = set()
    for info in _module_infos():
        kind = getattr(transconv.nn, info.module_cls.__name__)
        kinds.add(kind.__name__)
        for dtype in (torch.float32, torch.float64):
            for given in info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=True
            ):
                made = given.constructor_input
                factory = {"device": "cpu", "dtype": dtype}
                theirs = info.module_cls(*made.args, **made.kwargs, **factory)
                ours = kind(*made.args, **made.kwargs, **factory)
                call = given.forward_input
                theirs(*call.args, **call.kwargs)  # a lazy module gets its shape
                ours(*call.args, **call.kwargs)
                ours.load_state_dict(theirs.state_dict())
                assert repr(ours) == repr(theirs)
                results = [m(*call.args, **call.kwargs) for m in (ours, theirs)]
                _same(*results)
                grads = [
                    torch.autograd.grad(y.sum(), list(m.parameters()))
                    for y, m in zip(results, (ours, theirs), strict=True)
                ]
                _same(*grads)
    assert len(kinds) == 12


def _legacy_table() -> list[Any]:
    from torch.testing._internal import common_nn

    return [
        e
        for e in common_nn.get_new_module_tests()
        if e.get("module_name", e.get("fullname", "")).startswith("Conv")
    ]


def test_legacy_module_table() -> None:
    """common_nn: padding modes, zero batches, depthwise, dilation, same and valid."""
    seen = 0
    for entry in _legacy_table():
        name = entry.get("module_name")
        if name is None:
            name = entry["fullname"].split("_")[0]
        made = entry["constructor"] if "constructor" in entry else getattr(torch.nn, name)
        theirs = made(*entry.get("constructor_args", ()))
        if type(theirs).__name__ not in dir(transconv.nn):
            continue
        size = entry.get("input_size")
        x = entry["input_fn"]() if "input_fn" in entry else torch.randn(size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = theirs(x)
            assert transconv.convert_(theirs).converted == ("",)
            _same(theirs(x), wanted)
        seen += 1
    assert seen >= 50
