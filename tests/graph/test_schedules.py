"""A convolution of a graph gets the schedule, and up to names the kernel, of the call of that layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.meant import traced
from transconv.conv import ConvProblem, ConvWorkload, Prop, Surrounded, compiler
from transconv.graph.fusion.groups import Price
from transconv.graph.regions import aot_graphs
from transconv.graph.regions.partition import regions
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.graph.regions.region_kernels import launches
from transconv.graph.regions.region_kernels import plain as plain_product
from transconv.ir import Layout, bf16, f16, f32
from transconv.runtime import Plan, ready
from transconv.selection import shortlist
from transconv.selection.tuning_db import read_rows, unnamed
from transconv.target import TARGETS

CPU, H200 = torch.device("cpu"), TARGETS["sm_90"]
Like = tuple[Sequence[int], Sequence[int], torch.dtype]
WORD = re.compile(r"[A-Za-z_]\w*")

# The first has tuned rows of its own and one image; the second takes four stride phases, and its rows are
# those of neighbours. Then groups, one tap, other layouts, a volume.
LAYERS = [
    "mb1ic512ih128oc512oh128kh3ph1 dt=bf16 tag=nhwc",
    "mb8ic64ih56oc64oh28kh3sh2ph1 dt=bf16 tag=nhwc",
    *(
        pytest.param(text, marks=pytest.mark.slow)
        for text in (
            "g64mb32ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc",
            "mb32ic256ih56oc64oh56kh1ph0 dt=bf16 tag=nhwc",
            "mb8ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nchw",
            "mb32ic3ih224oc64oh112kh7sh2ph3 dt=bf16 tag=nhwc",
            "mb1ic128id16ih64iw64oc128od16oh64ow64kd3kh3kw3pd1ph1pw1 dt=bf16 tag=ndhwc",
        )
    ),
]


def order_on_gpu(x: torch.Tensor, w: torch.Tensor, backend: Any) -> torch.memory_format:
    """That of a convolution's result by cuDNN: features last where the image or the weight has them so.
    On a CPU torch has some 3D convolutions in bf16 otherwise."""
    found = [suggest_memory_format(t) for t in (x, w)]
    return next((order for order in found if order is not torch.contiguous_format), found[0])


def kernels(f: Callable[..., Any], *like: Like) -> list[RegionKernel]:
    """The kernels of a function of tensors of these shapes, strides and types, on an H200."""
    with FakeTensorMode(), patch.object(torch._C, "_conv_determine_backend_memory_format", order_on_gpu):
        tensors = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in like]
        graph = make_fx(f, decomposition_table=aot_graphs.table())(*tensors).graph
    graph.eliminate_dead_code()
    (region,) = (r for r in regions(graph, CPU) if r.nodes)
    return launches(region, CPU, H200, Price(H200)).kernels


def like(p: ConvProblem, name: str) -> Like:
    spec = p.specs[name]
    strides = spec.layout.strides()
    assert strides is not None
    return p.shapes[name], strides, getattr(torch, spec.dtype.torch)


def layer(p: ConvProblem, prop: Prop, behind: Callable[..., Any] | None = None) -> list[RegionKernel]:
    """The kernels of a direction."""
    rest = [[*p.stride], [*p.pad_lo], [*p.dilation], False, [0] * p.ndims, p.g]
    back = torch.ops.aten.convolution_backward
    if prop is Prop.FWD:

        def forward(x: Any, w: Any, *more: Any) -> Any:
            y = torch.ops.aten.convolution(x, w, None, *rest)
            return behind(y, *more) if behind else y

        more = [like(p, "dst")] if behind else []
        return kernels(forward, like(p, "src"), like(p, "wei"), *more)
    if prop is Prop.BWD_D:
        return kernels(
            lambda dy, w, x: back(dy, x, w, None, *rest, [True, False, False])[0],
            *(like(p, name) for name in ("dst", "wei", "src")),
        )
    return kernels(
        lambda x, dy, w: back(dy, x, w, None, *rest, [False, True, False])[1],
        *(like(p, name) for name in ("src", "dst", "wei")),
    )


def rows() -> list[tuple[ConvProblem, Prop]]:
    """What was tuned on an H200, in types that torch convolves, of the sizes that its layers have."""
    text = (files("transconv") / "data" / "tuned_h200.csv").read_text()
    asked = dict.fromkeys((r.problem, r.direction) for r in read_rows(text) if r.direction)
    found = [(ConvProblem.parse(text), Prop(direction)) for text, direction in asked]
    return [(p, prop) for p, prop in found if {*p.dtypes} in ({bf16}, {f16}, {f32}) and is_layer(p)]


def is_layer(p: ConvProblem) -> bool:
    """Whether it is padded alike on both sides, as far as windows reach."""
    each = zip(p.i, p.k, p.o, p.stride, p.dilation, p.pad_lo, strict=True)
    return all((i + 2 * pad - (k - 1) * d - 1) // s + 1 == o for i, k, o, s, d, pad in each)


def moved(p: ConvProblem, stride: int) -> ConvProblem:
    """The problem with another stride of each dim of one element, but for features: by the stride of one
    feature torch chooses the order of the result."""
    specs = p.specs
    for name, spec in specs.items():
        shape, strides = p.shapes[name], spec.layout.strides()
        assert strides is not None
        made = [
            stride if n == 1 and d != 1 else s for d, (n, s) in enumerate(zip(shape, strides, strict=True))
        ]
        specs[name] = replace(spec, layout=Layout.from_strides(spec.dtype, shape, made))
    return replace(p, **specs)


@pytest.mark.every(3)
@pytest.mark.parametrize("stride", [1, 7, 10**9])
def test_strides_of_one_element_do_not_cost_tuned_rows(stride: int) -> None:
    several = 0
    for p, prop in rows():
        row, call = ConvWorkload(p, prop), ConvWorkload(moved(p, stride), prop)
        several += call != row
        assert call.group("sm_90x132") == row.group("sm_90x132") and call.distance(row) == 0, str(call)
    assert several > 50


@pytest.mark.parametrize(
    "every", [40, pytest.param(1, marks=pytest.mark.slow)], ids=["some of them", "all of them"]
)
def test_a_node_of_a_graph_finds_the_rows_of_its_layer(every: int) -> None:
    """One image of a 3D convolution in bf16 among them."""
    found = rows()
    single = next(
        i for i, (p, _) in enumerate(found) if p.mb == 1 and len(p.k) == 3 and p.src.dtype is bf16
    )
    for p, prop in [found[single], *found[::every]]:
        for stride in (1, 10**9):
            given = moved(p, stride)
            (kernel,) = [k for k in layer(given, prop) if k.group.product]
            work = kernel.workload
            about, row = work.about(work.computations[0]), ConvWorkload(p, prop)
            assert about.group("sm_90x132") == row.group("sm_90x132"), f"{given} {prop}"
            assert about.distance(row) == 0, f"{given} {prop}"


def plan(kernel: RegionKernel) -> Plan:
    assert isinstance(kernel.asked, Surrounded)
    return ready(kernel.asked, H200, None, False, Plan, True, "now")


def plain(source: str) -> str:
    """A text without comments and line ends, its names replaced by numbers in the order of their
    appearance."""
    lines = (line.partition("#")[0] for line in source.splitlines())
    numbers: dict[str, str] = {}
    text = " ".join(" ".join(lines).split())
    return WORD.sub(lambda m: numbers.setdefault(m[0], f"v{len(numbers)}"), text)


@pytest.mark.every(2)
@pytest.mark.parametrize("text", LAYERS)
def test_kernels_are_those_of_calls(text: str) -> None:
    p = ConvProblem.parse(text)
    for prop in Prop:
        (kernel,) = layer(p, prop)
        ours, call = plan(kernel), compiler.plan(p, prop, H200)
        assert ours.why == call.why
        assert [plain(s.source) for s in ours.steps] == [plain(s.source) for s in call.steps]


def test_what_stands_behind_does_not_cost_the_schedule() -> None:
    p = ConvProblem.parse("mb1ic512ih128oc512oh128kh3ph1 dt=bf16 tag=nhwc")
    (kernel,) = layer(p, Prop.FWD, lambda y, z: torch.relu(y + z))
    call = compiler.plan(p, Prop.FWD, H200, epilogue="res+relu")
    ours = plan(kernel)
    assert str(ours.schedule) == str(call.schedule) and "via=gluon" in str(ours.schedule)
    assert ours.why == call.why and len(ours.steps) == 1


def test_a_product_without_its_statistics_reads_its_factors_alone() -> None:
    """What only they need is no part of the alternative that they are weighed against, and its schedules
    are those of the layer."""
    p = ConvProblem.parse("mb8ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc")

    def behind(y: Any, z: Any) -> Any:
        return y, (y.float() * (z.float() - 1.0)).sum((0, 2, 3))

    (kernel,) = layer(p, Prop.FWD, behind)
    (whole,), (alone,) = (w.computations for w in (kernel.workload, plain_product(kernel.workload)))
    assert whole.statistics and len(whole.reads) == 3
    assert not alone.statistics and len(alone.reads) == 2
    call = ConvWorkload(p, Prop.FWD)
    assert unnamed(alone) == unnamed(call.computations[0])
    assert shortlist(8, alone, H200, Surrounded(p, Prop.FWD, (alone,))) == shortlist(
        8, call.computations[0], H200, call
    )


def test_what_a_product_reads_may_be_added_to_it() -> None:
    """A residual of the very tensor that is convolved: one kernel."""
    p = ConvProblem.parse("mb1ic512ih128oc512oh128kh3ph1 dt=bf16 tag=nhwc")
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    (kernel,) = kernels(
        lambda x, w: x + torch.ops.aten.convolution(x, w, None, *rest), like(p, "src"), like(p, "wei")
    )
    assert [s.schedule.via for s in plan(kernel).steps] == ["gluon"]


def enlarged(channels: int, size: int) -> list[RegionKernel]:
    """A convolution of an image that is twice as large by nearest neighbours."""
    shape, rest = (1, channels, size, size), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    strides = (channels * size * size, 1, channels * size, channels)
    return kernels(
        lambda x, w: torch.ops.aten.convolution(
            torch.nn.functional.interpolate(x, scale_factor=2.0), w, None, *rest
        ),
        (shape, strides, torch.bfloat16),
        ((channels, channels, 3, 3), (9 * channels, 1, 3 * channels, channels), torch.bfloat16),
    )


def test_estimates_decide_what_is_written_before_a_convolution() -> None:
    """A large one has boxes only where what it reads lies in memory; for a small one that is a launch."""
    assert len(enlarged(16, 8)) == 1
    first, second = enlarged(512, 256)
    assert first.group.labels == ["upsample"] and "via=gluon" in str(plan(second).schedule)
    assert first.memory[0].strides == (512 * 512 * 512, 1, 512 * 512, 512)


def test_a_copy_of_one_factor_beside_another_that_is_computed() -> None:
    """In f32 the copy is rounded, and the schedules that are proposed for it are those of no product."""
    (found,) = kernels(
        lambda x, w: torch.conv2d(x.abs(), w, padding=1),
        ((2, 16, 2, 3), (96, 6, 3, 1), torch.float32),
        ((16, 16, 1, 2), (32, 2, 2, 1), torch.float32),
    )
    assert shortlist(1, found.workload.computations[0], TARGETS["interpreter"], found.workload)


def test_a_sum_that_rows_of_the_result_share() -> None:
    """An image without the result's frames: the product is computed once, and spread by another kernel."""

    def f(x: Any, w: Any, y: Any) -> Any:
        x, one, none = x.expand(1, 8, 3, 4, 4), [1, 1, 1], [0, 0, 0]
        return torch.ops.aten.convolution(x, w, None, one, none, one, False, none, 1) * y

    given = [torch.randn(1, 8, 1, 4, 4), torch.randn(8, 8, 1, 1, 1), torch.randn(1, 8, 3, 4, 4)]
    run = traced(lambda x, w, y: (f(x, w, y),), given)
    with torch.no_grad():
        (kernel,) = kernels(f, *[(t.shape, t.stride(), t.dtype) for t in given])
        assert isinstance(kernel.asked, str)
        torch.testing.assert_close(run(*given)[0], f(*given), rtol=1e-3, atol=1e-3)


def test_a_matrix_product_of_an_image_sees_boxes() -> None:
    """Its rows are the pixels, whose dims are the digits of one axis: of the image, the result and what is
    added to it, wherever their features lie in memory."""
    image = (16, 256, 32, 32), (262144, 1, 8192, 256), torch.bfloat16

    def f(x: Any, w: Any, y: Any) -> Any:
        return y + torch.nn.functional.linear(x.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2)

    (kernel,) = kernels(f, image, ((256, 256), (256, 1), torch.bfloat16), image)
    assert "%" not in kernel.texts[0] and "[16384, 256]" in kernel.texts[0]
    assert "a=box b=box | c=box behind=box" in str(
        ready(kernel.workload, H200, None, False, Plan, True, "now").schedule
    )


def test_a_matrix_product_whose_factor_is_dear_has_it_written_first() -> None:
    """Rows of the factor depend on the image: no schedule of the matrix unit computes it."""

    def f(x: Any, scale: Any, w: Any) -> Any:
        return torch.nn.functional.linear(x + x * scale, w)

    written, product = kernels(
        f,
        ((32, 14, 14, 768), (150528, 10752, 768, 1), torch.bfloat16),
        ((32, 1, 1, 768), (768, 768, 768, 1), torch.bfloat16),
        ((192, 768), (768, 1), torch.bfloat16),
    )
    assert written.group.kind == "map" and product.group.product is not None
    assert "| mma |" in str(ready(product.workload, H200, None, False, Plan, True, "now").schedule)


@pytest.mark.slow
def test_parts_of_a_value_that_is_written_once_are_read_in_place() -> None:
    """Two convolutions of halves of a map's result: it is written for both, and neither half is copied."""
    one, none = [1, 1], [0, 0]

    def f(x: Any, w: Any, v: Any) -> tuple[Any, Any]:
        x = torch.relu(x) * 2
        first, second = torch.narrow(x, 1, 0, 128), torch.narrow(x, 1, 128, 128)
        return (
            torch.ops.aten.convolution(first, w, None, one, none, one, False, none, 1),
            torch.ops.aten.convolution(second, v, None, one, none, one, False, none, 1),
        )

    def tensors(images: int) -> list[torch.Tensor]:
        x = torch.randint(-2, 3, (images, 256, 14, 14)).bfloat16().to(memory_format=torch.channels_last)
        return [x, *torch.randint(-2, 3, (2, 40, 128, 1, 1)).bfloat16()]

    likes, given = [(t.shape, t.stride(), t.dtype) for t in tensors(256)], tensors(1)
    written, *products = kernels(f, *likes)
    assert written.group.kind == "map" and len(products) == 2
    for kernel in products:
        assert kernel.given[0] is written.stored[0]
        assert "a=box b=box" in str(plan(kernel).schedule)
    assert "ic + 128" in products[1].texts[0]
    with torch.no_grad():
        run = traced(f, given)
        for ours, theirs in zip(run(*given), f(*given), strict=True):
            assert torch.equal(ours, theirs)


def test_a_copy_before_a_convolution_is_seen_through() -> None:
    """Dropout that is off: elements in the frame are masked as those of the image itself are."""
    p = ConvProblem.parse("mb4ic64ih32oc64oh32kh3ph1 dt=bf16 tag=nhwc")
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    (kernel,) = kernels(
        lambda x, w: torch.ops.aten.convolution(x.clone(), w, None, *rest), like(p, "src"), like(p, "wei")
    )
    assert [plain(s.source) for s in plan(kernel).steps] == [
        plain(s.source) for s in compiler.plan(p, Prop.FWD, H200).steps
    ]


@pytest.mark.slow
@pytest.mark.parametrize("prop", [pytest.param(Prop.BWD_D, marks=pytest.mark.slow), Prop.BWD_W])
def test_dims_in_another_order_do_not_cost_the_schedule(prop: Prop) -> None:
    """A gradient whose features are the last dim, as what follows a convolution of ConvNeXt leaves it."""
    p = ConvProblem.parse("g96mb32ic96ih56oc96oh56kh7ph3 dt=bf16 tag=nhwc")
    rest = [[1, 1], [3, 3], [1, 1], False, [0, 0], 96]
    mask = [prop is Prop.BWD_D, prop is Prop.BWD_W, False]
    dst = (32, 56, 56, 96), (301056, 5376, 96, 1), torch.bfloat16
    (kernel,) = kernels(
        lambda x, dy, w: torch.ops.aten.convolution_backward(
            dy.permute(0, 3, 1, 2), x, w, None, *rest, mask
        )[mask.index(True)],
        like(p, "src"),
        dst,
        like(p, "wei"),
    )
    assert plan(kernel).why == compiler.plan(p, prop, H200).why


@pytest.mark.parametrize("images", [32, 24])
def test_a_factor_that_a_later_kernel_stores_is_stored_before(images: int) -> None:
    """By its price: the gradient of a weight would compute what that of the image reads in boxes."""
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    back = torch.ops.aten.convolution_backward

    def gradients(g: Any, y: Any, x: Any, w: Any) -> Any:
        grad = (g.float() * 0.5 - y.float() * 0.25).to(torch.bfloat16)
        weight = back(grad, x, w, None, *rest, [False, True, False])[1]
        return weight, back(grad, x, w, None, *rest, [True, False, False])[0]

    p = ConvProblem.parse(f"mb{images}ic128ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc")
    found = kernels(gradients, *(like(p, name) for name in ("dst", "dst", "src", "wei")))
    assert [k.group.name for k in found] == ["mul_sub", "weight_gradient", "input_gradient"]


@pytest.mark.parametrize(("images", "size", "wide"), [(32, 56, 64), (16, 56, 64)])
def test_sums_of_columns_leave_with_a_product(images: int, size: int, wide: int) -> None:
    """A kernel that reads a gradient again for the sums of two batch norms takes twice as long as its
    bytes."""

    def gradients(g: Any, w: Any, rest: Any, x: Any, y: Any) -> Any:
        back = torch.ops.aten.convolution_backward
        made = back(g, rest, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])[0]
        made = torch.where(rest <= 0, 0, made + rest).float()
        total = made.sum([0, 2, 3], True) * 0.1
        return [
            (made - total - z * (made * z).sum([0, 2, 3], True) * 0.2).to(torch.bfloat16) for z in (x, y)
        ]

    p = ConvProblem.parse(f"mb{images}ic{4 * wide}ih{size}oc{wide}oh{size}kh1ph0 dt=bf16 tag=nhwc")
    found = kernels(gradients, *(like(p, name) for name in ("dst", "wei", "src", "src", "src")))
    assert [len(k.group.statistics) for k in found] == [3, 0]


@pytest.mark.parametrize(("rows", "wide"), [(25088, 192), (1568, 768)])
def test_a_sum_of_columns_that_is_applied_to_nothing_leaves(rows: int, wide: int) -> None:
    """The gradient of a bias: no kernel that applies it has its columns in registers anyway."""

    def gradients(g: Any, w: Any, y: Any) -> Any:
        made = torch.ops.aten.gelu_backward(g @ w, y)
        return made, made.sum(0, dtype=torch.float32), made @ w.t()

    shapes = (rows, wide), (wide, 4 * wide), (rows, 4 * wide)
    found = kernels(gradients, *((s, (s[1], 1), torch.bfloat16) for s in shapes))
    assert [len(k.group.statistics) for k in found] == [1, 0]
