"""Calls in invariant mode: a sample's bits are those it has alone, whatever is in its batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transconv
import transconv.functional as F
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.functional.batch_trials import BatchTrial, CallDrawing, run_trials
from transconv.support import Unsupported
from transconv.torch_ops.quantized.float8 import Float8Conv1d

Tensor = torch.Tensor
SAMPLES = 4


@pytest.fixture(autouse=True)
def invariant(interpreted: None) -> Iterator[None]:
    torch.manual_seed(0)
    with transconv.config.changed(invariant=True):
        yield


def same_alone(run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The result, of which each sample alone has the same bits, as has a part."""
    whole = run(*tensors)
    for begin, end in [(i, i + 1) for i in range(SAMPLES)] + [(1, SAMPLES)]:
        part = run(*[t[begin:end].clone() for t in tensors])
        assert torch.equal(part, whole[begin:end]), (begin, end)
    return whole


WEIGHT = torch.randn(33, 20)


def places(x: Tensor) -> Tensor:
    """Rows of the weight that numbers tell."""
    return (x * 100).long() % 33


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT), ((20,),)),
    "linear of as many rows": (lambda x: F.linear(x, WEIGHT[:SAMPLES].contiguous()), ((20,),)),
    "linear of one row": (lambda x: F.linear(x, WEIGHT[:1].contiguous()), ((20,),)),
    "linear of rows": (lambda x: F.linear(x, WEIGHT, WEIGHT[:, 0].contiguous()), ((3, 20),)),
    "bmm": (F.bmm, ((5, 8), (8, 6))),
    "layer_norm": (lambda x: F.layer_norm(x, (20,)), ((3, 20),)),
    "group_norm": (lambda x: F.group_norm(x, 2), ((6, 3, 4),)),
    "softmax": (lambda x: F.softmax(x, 1), ((7, 5),)),
    "sum": (lambda x: F.sum(x, 1), ((7, 5),)),
    "mean": (lambda x: F.mean(x, (1, 2)), ((7, 5),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), ((3, 6, 6),)),
    "embedding": (lambda x: F.embedding(places(x), WEIGHT), ((3,),)),
    "embedding of as many rows": (
        lambda x: F.embedding(places(x) % SAMPLES, WEIGHT[:SAMPLES].clone()),
        ((),),
    ),
    "gather": (lambda x: F.gather(x, 1, places(x)[:, ::2].contiguous()), ((33,),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, places(x[:, 0]), reduction="none"), ((33,),)),
}


class Kernels:
    """What the interpreter runs: the kernels, and how many of their tensors begin at no multiple of 16
    bytes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sources: list[str] = []
        self.unaligned = 0
        real = TritonKernel._interpret

        def interpret(kernel: TritonKernel, tensors: list[Any], *rest: Any) -> None:
            self.sources.append(kernel.source)
            self.unaligned += sum(t.data_ptr() % 16 != 0 for t in tensors)
            real(kernel, tensors, *rest)

        patch.setattr(TritonKernel, "_interpret", interpret)

    def of(self, run: Callable[[], Tensor]) -> tuple[Tensor, list[str]]:
        """A result, and the kernels that made it."""
        self.sources.clear()
        return run(), [*self.sources]


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


FILTERS, ROWS = torch.randn(6, 3, 3, 3), torch.randn(5, 15)
SLOPE = torch.randn(SAMPLES, 6, 3, 3)
SCALE = torch.randn(6, 1, 1)


def input_gradient(x: Tensor) -> Tensor:
    given = x.detach().requires_grad_()
    y = transconv.conv2d(given, FILTERS, FILTERS[:, 0, 0, 0].contiguous())
    return torch.autograd.grad(y, given, given[:, :1, :1, :1].detach().expand_as(y))[0]


LYING: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "conv2d": (lambda x: transconv.conv2d(x, FILTERS), torch.randn(SAMPLES, 3, 5, 5)),
    "conv2d, channels last": (lambda x: transconv.conv2d(x, FILTERS), last(torch.randn(SAMPLES, 3, 5, 5))),
    "conv2d, images innermost": (
        lambda x: transconv.conv2d(x, FILTERS),
        torch.randn(3, SAMPLES, 5, 5).transpose(0, 1),
    ),
    "fused_conv2d": (
        lambda x: transconv.fused_conv2d(x, FILTERS, activation="silu"),
        torch.randn(SAMPLES, 3, 5, 5),
    ),
    "traced": (
        lambda x: transconv.fused_conv2d(x, FILTERS, epilogue=lambda acc, s: acc * s, operands=[SCALE]),
        torch.randn(SAMPLES, 3, 5, 5),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, SCALE[:, 0, 0], SCALE[:, 0, 0] ** 2, SCALE[:, 0, 0], SCALE[:, 0, 0]),
        torch.randn(SAMPLES, 6, 5, 5),
    ),
    "gradient": (input_gradient, torch.randn(SAMPLES, 3, 5, 5)),
    "linear": (lambda x: F.linear(x, ROWS), torch.randn(SAMPLES, 15)),
    "softmax": (lambda x: F.softmax(x, 1), torch.randn(SAMPLES, 7, 5)),
}
PARTS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "a view": (lambda x: x[1:2], [1]),
    "two": (lambda x: x[1:3], [1, 2]),
    "of one image": (lambda x: x.unbind(0)[1][None], [1]),
    "others": (lambda x: x[[3, 1]], [3, 1]),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", LYING)
def test_a_part_of_a_batch_wherever_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views begin at any address, and torch gives a dim of one any stride: the same kernel answers, with
    the same bits, and of tensors that begin at multiples of 16 bytes, as another one may be chosen for
    others."""
    (run, x), kernels = LYING[name], Kernels(monkeypatch)
    whole, made = kernels.of(lambda: run(x))
    for part, (taken, at) in PARTS.items():
        again, others = kernels.of(lambda taken=taken: run(taken(x)))  # type: ignore[misc]
        assert torch.equal(again, whole[at]) and others == made, part
    assert kernels.unaligned == 0


def test_every_second_image() -> None:
    """A batch with gaps between its images is copied, by fused layers too."""
    x = torch.randn(SAMPLES, 3, 5, 5)
    for run in (transconv.conv2d, transconv.fused_conv2d):
        assert torch.equal(run(x[::2], FILTERS), run(x, FILTERS)[::2])


def test_no_samples_are_no_sum() -> None:
    assert transconv.conv2d(torch.empty(0, 3, 5, 5), FILTERS).shape == (0, 6, 3, 3)
    assert F.softmax(torch.empty(0, 3), 1).shape == (0, 3)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str) -> None:
    run, shapes = CALLS[name]
    tensors = [torch.randn(SAMPLES, *shape) for shape in shapes]
    made = same_alone(run, *tensors)
    with transconv.config.changed(invariant=False, cpu="fallback"):
        torch.testing.assert_close(made, run(*tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_layer_and_its_gradients(channels_last: bool) -> None:
    x, w, b = torch.randn(SAMPLES, 4, 6, 5), torch.randn(6, 4, 3, 3), torch.randn(6)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    slope = torch.randn(SAMPLES, 6, 3, 3)

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        y = transconv.conv2d(*given, stride=2, padding=1)
        return y.detach(), *torch.autograd.grad(y, given, g)

    y, dx, dw, db = run(x, slope)
    for i in range(SAMPLES):
        one, done = run(x[i : i + 1], slope[i : i + 1])[:2]
        assert torch.equal(one[0], y[i]) and torch.equal(done[0], dx[i])
    more = [torch.cat([t, torch.zeros(2, *t.shape[1:])]) for t in (x, slope)]
    for sum_of_all, again in zip((dw, db), run(*more)[2:], strict=True):
        assert torch.equal(sum_of_all, again)  # samples of zeros add nothing
    want = torch.autograd.grad(
        torch.nn.functional.conv2d(x, ww := w.clone().requires_grad_(), None, 2, 1), ww, slope
    )[0]
    torch.testing.assert_close(dw, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db, slope.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_an_input_with_gaps_is_copied() -> None:
    w = torch.randn(6, 4, 3, 3)
    same_alone(lambda x: transconv.conv2d(x[:, :, 1:], w), torch.randn(SAMPLES, 4, 6, 5))


def test_a_fused_layer() -> None:
    w, b = torch.randn(6, 4, 3, 3), torch.randn(6)
    same_alone(lambda x: transconv.fused_conv2d(x, w, b, activation="relu"), torch.randn(SAMPLES, 4, 6, 5))


def test_the_sizes_before_change_nothing() -> None:
    w, x = torch.randn(6, 4, 3, 3), torch.randn(SAMPLES, 4, 7, 6)
    first = transconv.conv2d(x, w)
    with transconv.config.changed(sizes="any"):
        for n in (1, 9, 2):
            transconv.conv2d(torch.randn(n, 4, 5, 8), w)
        assert torch.equal(transconv.conv2d(x, w), first)


def quantized_layer() -> torch.nn.Module:
    """A layer of 8 bits whose input has no scale of its own."""
    layer = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3)).eval()
    transconv.quantize_(layer, "int8")
    return layer


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "mean": (lambda x: F.mean(x, 0), "mean: its text has numbers of the batch"),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        "batch_norm: its text has numbers of the batch",
    ),
    "gaps": (lambda x: F.linear(x[:, ::2], WEIGHT[:, :10].contiguous()), "has gaps between its elements"),
    "second derivatives": (
        lambda x: torch.autograd.grad(
            F.softmax(given := x.requires_grad_(), 1).sum(), given, create_graph=True
        ),
        "torch would compute the gradient of softmax",
    ),
    "an operand of an epilogue": (
        lambda x: torch.autograd.grad(
            transconv.fused_conv1d(
                x[:, None],
                WEIGHT[:2, None, :3].contiguous(),
                epilogue=lambda acc, s: acc * s,
                operands=[given := torch.ones(2, 1, requires_grad=True)],
            ).sum(),
            given,
        ),
        "the gradient of operand 0 of an epilogue, a sum over samples",
    ),
    "a scale of the batch": (
        lambda x: quantized_layer()(x[:, None]),
        "the scale of its input is found from all samples",
    ),
    "a history of scales": (
        lambda x: Float8Conv1d(1, 2, 3)(x[:, None]),
        "its scales are found from all samples",
    ),
    "too many": (
        lambda x: transconv.conv1d(torch.zeros(70_000, 1, 3), WEIGHT[:2, None, :3].contiguous()),
        "MB=70000 is not in 1..65535.*divide the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_batch_is_refused_by_name(name: str) -> None:
    run, why = REFUSED[name]
    with pytest.raises(Unsupported, match=why):
        run(torch.randn(SAMPLES, 20))


def test_torch_computes_nothing() -> None:
    with transconv.config.changed(cpu="fallback"), pytest.raises(Unsupported, match="torch would have to"):
        transconv.conv2d(torch.randn(2, 4, 6, 5), torch.randn(6, 4, 3, 3))


def test_sums_over_samples_are_those_of_a_prefix() -> None:
    x = torch.randn(9, 20)
    assert torch.equal(F.sum(x, 0), F.sum(torch.cat([x, torch.zeros(5, 20)]), 0))


def test_a_switch_that_is_changed_comes_back() -> None:
    with pytest.raises(RuntimeError), transconv.config.changed(invariant=False, sizes="any"):
        assert transconv.config.sizes == "any"
        raise RuntimeError
    assert transconv.config.invariant and transconv.config.sizes != "any"
    with pytest.raises(ValueError, match="invariant = 'yes'"):
        transconv.config.invariant = "yes"  # type: ignore[assignment]


def test_drawn_calls() -> None:
    found = list(run_trials(3, "cpu", seed=3))
    assert [o for o in found if o.differs or o.refused] == [] and len({o.text for o in found}) == 3


@pytest.mark.slow
def test_many_drawn_calls() -> None:
    assert [o for o in run_trials(60, "cpu", seed=11) if o.differs or o.refused] == []


def test_a_planted_dependence_is_found() -> None:
    def run(x: Tensor) -> Tensor:
        return x.reshape(len(x), -1).sum(1) * (1 + 2.0**-20 * (len(x) == 1))

    found = list(BatchTrial("planted", run, (torch.randn(SAMPLES, 8),)).differing(random.Random(0)))
    assert len(found) >= SAMPLES and "the result of sample 0 of 4: 1 of 1 elements differ" in found


def test_a_planted_sum_is_found() -> None:
    """A gradient of shared values whose grouping follows the number of samples."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sum(1) * len(x)

    trial = BatchTrial("planted", run, (torch.randn(SAMPLES, 8),), (torch.randn(8),), True, True)
    assert any(line.startswith("sum 0 over 4 samples") for line in trial.differing(random.Random(0)))


def test_samples_of_zeros_lie_as_the_others_do() -> None:
    """Another order in memory is another problem, whose sums are grouped otherwise."""
    orders: list[bool] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        orders.append(x.is_contiguous(memory_format=torch.channels_last))
        return (x * w[:, None, None]).sum((2, 3))

    x = torch.randn(SAMPLES, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    trial = BatchTrial("sums", run, (x,), (torch.randn(8),), True, True)
    [*trial.differing(random.Random(0))]
    assert len(orders) == SAMPLES + 3 and all(orders)


def test_draws_repeat() -> None:
    one, other = (CallDrawing("cpu", 5) for _ in range(2))
    assert [one.trial().text for _ in range(20)] == [other.trial().text for _ in range(20)]
