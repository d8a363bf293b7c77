"""Kernels whose sizes are arguments, on a GPU: one compiled kernel for drawn sizes, each result exact."""

from __future__ import annotations

import pytest

from tests.runtime.test_sized_boxes import LAYERS as BOXED
from tests.runtime.test_sized_boxes import NAMES, STEPPED, built
from tests.runtime.test_sized_weights import KERNELS
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.errors import TensorError
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import detect
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase

SOFTMAX = """compute softmax
    sizes  N=64 in 1..65535, K=777 in 1..65536
    axes   n=N | k=K
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
WIDE = """compute wide
    sizes  M=8 in 1..65536, K=300 in 1..131072
    tensor X f16 [M, K]
    tensor Y f16 [M, K]
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = x + 1"""
LAYERS = (
    "mb2?ic64ih28?oc64oh28kh3ph1 dt=bf16 tag=nhwc",
    "mb2?ic64ih28?oc128oh14kh3sh2ph1 dt=f16 tag=nhwc",
    "mb2?g2ic32ih14?oc32oh14kh3ph1 dt=f32 tag=nchw",
)


def computes(subject: str, prop: Prop | None) -> list[Compute]:
    """The kernels of a computation, or of a direction of a layer."""
    if prop is None:
        return [parse(subject)]
    plain, names = marked(subject)
    return list(any_size(ConvProblem.parse(plain), prop, names))


@pytest.mark.gpu
@pytest.mark.parametrize(("subject", "prop"), [(SOFTMAX, None), *((x, p) for x in LAYERS for p in Prop)])
def test_one_compilation_for_drawn_sizes(subject: str, prop: Prop | None) -> None:
    for compute in computes(subject, prop):
        compiled_once(compute)


def compiled_once(compute: Compute) -> None:
    """20 drawn sizes of a computation by one plan."""
    plan = build_compute(compute, detect())
    refused = 0  # sizes that the computation allows, and the kernel does not, as it says
    for drawn in sizes.drawn(compute, 20):
        try:
            judged = ComputationCase(compute.at(**drawn)).launched(plan, "cuda")
        except TensorError as error:
            assert "the plan requires" in str(error)
            refused += 1
            continue
        assert not judged.problem, (drawn, judged.problem)
    assert refused < 10
    # What sums up partial weight gradients has the weight's size alone, which is known.
    sized = [s.triton for s in plan.steps if s.triton.sizes is not None]
    assert sized and all(len(kernel.kept) == 1 for kernel in sized)


@pytest.mark.gpu
def test_beyond_two_to_the_31() -> None:
    import torch

    plan = build_compute(parse(WIDE), detect())
    x = torch.zeros(33000, 65600, dtype=torch.float16, device="cuda")  # more than 2^31 elements
    x[-1, -1] = 3
    y = torch.empty_like(x)
    plan.launch(X=x, Y=y)
    assert float(y[-1, -1]) == 4 and float(y[0, 0]) == 1 and bool((y[-1, :-1] == 1).all())
    with pytest.raises(TensorError, match="is not in"):
        plan.launch(X=x[:, :0], Y=y[:, :0])


@pytest.mark.gpu
def test_calls_of_drawn_sizes_compile_nothing_more() -> None:
    """Three directions, exact for every size; at most six kernels for each and three copies in torch's
    order, of which each is compiled once."""
    import torch

    import transconv
    from transconv.calls import size_policy

    transconv.config.sizes = "any"
    try:
        w, b = (torch.randint(-2, 3, shape, device="cuda").bfloat16() for shape in ((64, 64, 3, 3), (64,)))
        for n, h, width in ((1, 14, 14), (8, 56, 56), (1, 1, 1), (3, 1, 300), (16, 224, 224), (2, 97, 5)):
            x = torch.randint(-1, 2, (n, 64, h, width), device="cuda").bfloat16()
            given = [t.detach().requires_grad_() for t in (x, w, b)]
            made = transconv.conv2d(*given, padding=1)
            want = torch.conv2d(x.double(), w.double(), b.double(), padding=1)
            assert torch.equal(made, want.bfloat16()), (n, h, width)
            grad = torch.zeros_like(made)
            grad[..., -1:] = 1
            dx, dw, _ = torch.autograd.grad(made, given, grad)
            wanted = torch.ops.aten.convolution_backward(
                grad.double(),
                x.double(),
                w.double(),
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                False,
                [0, 0],
                1,
                [True, True, False],
            )
            assert torch.equal(dx, wanted[0].bfloat16()) and torch.equal(dw, wanted[1].bfloat16())
        for registry in size_policy._registries.values():
            assert not isinstance(registry, str)
            launchers = [s.triton for k in registry.there.values() for s in k.plan.steps]
            sized = [s for s in launchers if s.sizes is not None]
            assert len(registry.kernels) <= 6 + 3 and all(len(s.kept) <= 1 for s in sized)
        assert not transconv.stats(reset=True).fallback
    finally:
        transconv.config.sizes = "exact"


@pytest.mark.gpu
def test_a_layer_beyond_two_to_the_31() -> None:
    """More than 2^31 elements on either side have a kernel of their own, with addresses of 64 bits."""
    import torch

    import transconv

    transconv.config.sizes = "any"
    try:
        w = torch.ones(64, 64, 1, 1, device="cuda", dtype=torch.float16)
        for n in (1, 33):
            x = torch.zeros(n, 64, 1024, 1024, device="cuda", dtype=torch.float16)
            x = x.to(memory_format=torch.channels_last)
            x[-1, 3, -1, -1] = 3
            y = transconv.conv2d(x, w)
            assert float(y[-1, 5, -1, -1]) == 3 and float(y[-1, :, -1, :-1].abs().max()) == 0
            assert float(y[0, 0, 0, 0]) == 0
    finally:
        transconv.config.sizes = "exact"


@pytest.mark.gpu
@pytest.mark.parametrize("at", range(len(BOXED)), ids=NAMES)
def test_boxes_of_drawn_sizes(at: int) -> None:
    """Exact for every size, each launched twice: the second time descriptors are at hand."""
    compute, plan = built(at, detect())
    for drawn in sizes.drawn(compute, 20):
        for _ in range(2):
            judged = ComputationCase(compute.at(**drawn)).launched(plan, "cuda")
            assert not judged.problem, (drawn, judged.problem)
    kernel = plan.steps[0].triton
    assert kernel.sizes is not None and len(kernel.kept) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "prop", "words"), [*STEPPED, *((text, Prop.BWD_W, words) for text, words in KERNELS)]
)
def test_explicit_kernels_and_boxes_in_steps(text: str, prop: Prop, words: str) -> None:
    """Boxes that take every second position, and sums that end at a size: edges first, then drawn ones."""
    (compute,) = computes(text, prop)
    plan = build_compute(compute, detect(), Schedule.parse(words))
    assert compute.named is not None
    least = {s.name: s.least for s in compute.named.each}
    for drawn in (least, *sizes.drawn(compute, 12)):
        judged = ComputationCase(compute.at(**drawn)).launched(plan, "cuda")
        assert not judged.problem, (drawn, judged.problem)
