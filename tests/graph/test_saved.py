"""What forward graphs leave for backward graphs: which values, and how they lie in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.meant import by_meaning, near, results, traced
from transconv.graph import backend, report, torch_compile
from transconv.graph.fusion.index_ir import TYPES
from transconv.graph.regions import aot_graphs

Tensor = torch.Tensor


class Skipped(nn.Module):
    """Two levels of a U-Net with group norms, whose parts are cast behind their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.two, self.up = nn.Conv2d(32, 32, 3, padding=1), nn.ConvTranspose2d(32, 32, 2, 2)
        self.join, self.last = nn.Conv2d(64, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.one(x)))
        y = self.up(F.relu(self.two(F.max_pool2d(skip, 2))))
        z: Tensor = self.last(F.relu(self.join(torch.cat([skip, y], 1))))
        return z


@contextmanager
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[fx.Graph, list[fx.Node]]]]:
    """The backward graphs, and what forward ones leave for them."""
    found: list[tuple[fx.Graph, list[fx.Node]]] = []
    divided = aot_graphs.divided

    def seen(joint: fx.GraphModule, *given: Any, **about: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = divided(joint, *given, **about)
        outs: Any = forward.graph.output_node().args[0]
        found.append((backward.graph, [x for x in outs[about["num_fwd_outputs"] :]]))
        return forward, backward

    with monkeypatch.context() as patch:
        patch.setattr(aot_graphs, "divided", seen)
        yield found


def trained(model: nn.Module, x: Tensor) -> Any:
    """Two steps of what torch.compile made, whose gradients are torch's."""
    other = copy.deepcopy(model)
    run: Any = torch.compile(model, backend=backend, options={"rest": "eager"})
    with by_meaning():
        for _ in range(2):
            losses = [f(x).square().mean() for f in (other, run)]
            for loss in losses:
                loss.backward()
            near(losses[1].detach(), losses[0].detach(), 1e-4, "loss")
            for one, two in zip(other.parameters(), model.parameters(), strict=True):
                assert one.grad is not None and two.grad is not None
                near(two.grad, one.grad, 1e-4, "gradient")
    return report(run)


@pytest.mark.slow
def test_a_concatenation_is_left_in_the_place_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with left(monkeypatch) as found:
        made = trained(Skipped(), torch.randn(2, 4, 8, 8))
    ((backward, saved),) = found
    assert not any(n.target is torch.ops.aten.cat.default for n in backward.nodes)
    whole = [n for n in saved if n.target is torch.ops.aten.cat.default]
    assert len(whole) == 1 and not {*whole[0].args[0]} & {*saved}
    texts = [k.text for g in made.graphs for k in g.kernels]
    assert not any("where(i1 < 32" in t or "where(ic < 32" in t for t in texts), texts
    assert any("where it stands" in e.reason for e in made.graphs[0].edges)
    assert all(k.flops for k in made.graphs[0].kernels), made.graphs[0]  # none only copies a part


@pytest.mark.slow
def test_images_lie_as_convolutions_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's group norm gives images with features first, whatever it reads."""
    torch.manual_seed(0)
    made = trained(Skipped(), torch.randn(2, 4, 8, 8))
    gradients = [k.text for k in made.graphs[1].kernels if "weight_gradient" in k.name]
    assert len(gradients) == 5
    assert any("X0 f32 [2, 64, 8, 8] strides(4096,1,512,64)" in t for t in gradients), gradients


class Pooled(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(4, 8, 3, padding=1), pool

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(self.conv(x).sigmoid() * 2)
        return y


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("pool", "bits"),
    [
        (nn.MaxPool2d(3, 2, 1), torch.int8),
        (nn.MaxPool2d((2, 3), (1, 2), ceil_mode=True), torch.int8),
        (nn.MaxPool2d(2, dilation=2), torch.int32),
        (nn.MaxPool2d((8, 9), 1, 4), torch.int8),
        (nn.MaxPool2d((15, 9), 1, (5, 4)), torch.int32),
    ],
    ids=["sliding", "ends beyond", "gaps", "72 places", "135 places"],
)
def test_a_pool_leaves_places_and_no_image(
    pool: nn.Module, bits: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those within windows of up to 128 places have 8 bits, others 32."""
    torch.manual_seed(0)
    with left(monkeypatch) as found:
        trained(Pooled(pool), torch.randn(2, 4, 9, 8))
    ((_, saved),) = found
    types = [n.meta["val"].dtype for n in saved if n.op == "call_function"]
    assert {t for t in types if not t.is_floating_point} == {bits}
    assert types.count(torch.float32) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("narrow", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16)]
)
def test_parts_that_were_rounded_stay_rounded(narrow: torch.dtype, wide: torch.dtype) -> None:
    """A cast of a concatenation whose parts were narrowed, not widened, to its type."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (torch.cat([x.to(narrow), y.to(narrow)], 1).to(wide),)

    x, y = torch.randn(4, 8).to(wide), torch.randn(4, 8).to(wide)
    run: Any = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning() as texts, torch.no_grad():
        run(x, y)
    name = TYPES[narrow].name
    assert sum(t.count(f" {name}(") for t in texts) == 2, texts


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 8, 8)])
def test_pools_of_no_image_and_of_one(shape: tuple[int, ...]) -> None:
    def f(x: Tensor) -> Tensor:
        return F.max_pool2d(x * 2, 2).sum()

    x, y = (torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).requires_grad_() for _ in "xy")
    with by_meaning():
        torch.compile(f, backend=backend, options={"rest": "eager"})(x).backward()
    f(y).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


class Normed(nn.Module):
    """A convolution of an image that a norm makes, and what something else makes of that image."""

    def __init__(self, norm: nn.Module, far: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(4, 32, 3, padding=1), norm, nn.Conv2d(32, 16, 3)
        self.far = far

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        image = F.relu(self.norm(self.one(x)))
        return self.two(image), self.far(image)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("far", "form"),
    [
        (lambda image: image, torch.channels_last),
        (lambda image: image.sort(1).values, torch.contiguous_format),
    ],
    ids=["itself", "sort"],
)
def test_results_that_are_handed_out_have_torch_s_strides(
    far: Callable[[Tensor], Tensor], form: torch.memory_format
) -> None:
    """Also what an operation of torch makes of an image that is left for the backward graph."""
    torch.manual_seed(0)
    model = Normed(nn.GroupNorm(4, 32), far)
    run: Any = torch.compile(model, backend=backend, options={"rest": "eager"})
    x = torch.randn(2, 4, 8, 8).to(memory_format=form)
    with by_meaning():
        for _ in range(2):
            for one, two in zip(run(x), model(x), strict=True):
                assert one.stride() == two.stride()
                near(one.detach(), two.detach(), 1e-4, "result")
    assert report(run).graphs[0].kernels


@pytest.mark.every(2)
@pytest.mark.parametrize("norm", [nn.GroupNorm, lambda *n: nn.BatchNorm2d(n[1])], ids=["group", "batch"])
def test_a_forward_graph_tells_how_its_results_lie(
    norm: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's compiler takes that for the strides of what the backward graph gets. Buffers that the graph
    writes, those of a batch norm, are not among its results."""
    told, lying, call = list[Any](), list[Any](), torch_compile._Graph.__call__

    def called(graph: Any, given: list[Any]) -> list[Any]:
        made = call(graph, given)
        if graph.phase == "forward":
            lying.append([t.stride() if isinstance(t, Tensor) else None for t in made])
        return made

    monkeypatch.setattr(aot_graphs, "told", told.append)
    monkeypatch.setattr(torch_compile._Graph, "__call__", called)
    with by_meaning():
        torch.compile(Normed(norm(4, 32), torch.sin), backend=backend, options={"rest": "eager"})(
            torch.randn(2, 4, 8, 8)
        )
    assert told == lying and any(len(s) == 4 and s[1] == 1 < s[3] for s in told[0])


def test_a_view_that_was_widened_and_narrowed_again_has_torch_s_strides() -> None:
    def again(x: Tensor) -> tuple[Tensor, Tensor]:
        view = x.t()[2:]
        return view.float().to(x.dtype), view

    x = torch.randn(8, 16, dtype=torch.bfloat16)
    run: Any = torch.compile(again, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        made, view = run(x)
    want, _ = again(x)
    assert made.stride() == want.stride() and torch.equal(made, want)
    assert made.data_ptr() != view.data_ptr() == x.t()[2:].data_ptr()


def test_a_slice_of_what_was_widened_is_read_as_it_is() -> None:
    def sliced(x: Tensor, w: Tensor) -> tuple[Tensor]:
        wide = x.float()[:, 8:].transpose(0, 1)
        return (wide.to(x.dtype) @ w,)

    x, w = torch.randn(32, 24, dtype=torch.bfloat16), torch.randn(32, 16, dtype=torch.bfloat16)
    run = traced(sliced, [x, w])
    with by_meaning() as texts:
        near(results(run(x, w))[0], sliced(x, w)[0], 1e-2, "product")
    assert texts and not any("f32(" in t for t in texts), texts


def test_a_hardswish_is_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operand is kept, not its result as well, where no product reads that."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate = nn.Conv2d(4, 8, 3), nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.hardswish(self.conv(x)) * self.gate

    torch.manual_seed(0)
    with left(monkeypatch) as found:
        trained(Gated(), torch.randn(2, 4, 6, 6))
    ((_, saved),) = found
    large = [n.target for n in saved if n.op == "call_function" and n.meta["val"].dim() == 4]
    assert large == [torch.ops.aten.convolution.default]


def test_a_concatenation_with_an_empty_part_of_one_dim() -> None:
    """torch takes such a part in any concatenation; it is no slice of the result."""
    aten = torch.ops.aten

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        none, much = aten.full.default([0], 0.0), aten.exp.default(x)
        return aten.cat.default([none, much], -2) * 2, none, much

    def backward(none: Tensor, much: Tensor) -> tuple[Tensor]:
        return (aten.cat.default([none, much], -2) * 3,)

    x = torch.randn(2, 4, 3)
    asked = ((forward, (x,)), (backward, (torch.empty(0), x)))
    graphs = [make_fx(f, tracing_mode="fake")(*given) for f, given in asked]
    for node, name in zip(graphs[1].graph.nodes, ("full", "exp"), strict=False):
        node.target = name
    aot_graphs.shared(*graphs, 1)
    assert len([n for n in graphs[1].graph.nodes if n.op == "placeholder"]) == 2
    torch.testing.assert_close(graphs[1](torch.empty(0), x)[0], x * 3)
