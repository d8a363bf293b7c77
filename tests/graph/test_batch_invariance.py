"""Compiled graphs in invariant mode: a sample's bits are those it has alone, and what cannot be so is
refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from transconv import ir
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.compute import Compute
from transconv.graph import backend, report, torch_compile
from transconv.graph.certification import certify
from transconv.graph.regions import region_calls
from transconv.graph.regions.batch_invariance import LARGEST_BATCH, largest_batch
from transconv.graph.regions.graph_wait import GraphWait
from transconv.runtime import steps
from transconv.selection import spread
from transconv.support import Unsupported
from transconv.target import Target
from transconv.verify.invariance import proof

Tensor = torch.Tensor
SAMPLES = 4
N, H = ir.Var("N"), ir.Var("H")


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with transconv.config.changed(cpu="interpret", invariant=True):
        yield


class Convolutional(nn.Module):
    """A convolution, a norm, a mean over positions, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A block with attention among the rows of a sample; ``whole``: by torch's one call."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x)).chunk(3, -1)
        if self.whole:
            made = F.scaled_dot_product_attention(q, k, v)
        else:
            made = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v
        return x + self.out(made)  # type: ignore[no-any-return]


class Framewise(nn.Module):
    """Functions of images for every frame of a video, which is added behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = self.conv, self.norm, lambda y: F.avg_pool2d(y, 3, 1, 1), lambda y: F.softmax(y, 1)
        for f in (*images, lambda y: self.out(y.flatten(2).mT).mT.view(y.shape)):
            x = x + f(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, x.shape[2])).transpose(1, 2)
        return x


class Heads(nn.Module):
    """Attention of two heads by torch's one call, each key of some queries alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y * 2, y + 1, is_causal=True, scale=0.3) + y


def marked(x: Tensor) -> Tensor:
    made = x.clone()
    torch._dynamo.mark_dynamic(made, 0)
    return made


class Marked:
    """A compiled model, ``of``, whose first dim is marked."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        self.of = of

    def __call__(self, x: Tensor) -> Any:
        return self.of(marked(x))


def compiled(model: Any, **options: Any) -> Marked:
    run = torch.compile(model, backend=backend, options={"rest": "eager", **options})
    return Marked(run)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Convolutional(), (3, 7, 6)),
        (Attention(), (5, 8)),
        (Attention(whole=True), (5, 8)),
        (Framewise(), (4, 3, 2, 5)),
        (Heads(), (5, 16)),
    ],
)
def test_inference(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Whatever size comes first: a batch of one is no graph of its own."""
    x, run = torch.randn(SAMPLES, *shape), compiled(model.eval())
    with torch.no_grad():
        first = run(x[:1])
        whole = run(x)
        assert torch.equal(first[0], whole[0])
        for i in range(1, SAMPLES):
            assert torch.equal(run(x[i : i + 1])[0], whole[i])
        torch.testing.assert_close(whole, model(x), rtol=1e-4, atol=1e-5)


def test_norms_of_long_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few images on a GPU have them: several kernels, and memory between them for each sample."""
    made: list[int] = []

    def asked(compute: Compute, target: Target, asked: bool = False) -> tuple[Compute, ...]:
        made.append(len(found := spread(compute, target, asked=True)))
        return found

    monkeypatch.setattr(steps, "spread", asked)
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)).eval()
    x, run = torch.randn(SAMPLES, 8, 32, 16), compiled(model)
    with torch.no_grad():
        whole = run(x)
        assert 3 in made
        torch.testing.assert_close(whole, model(x), rtol=1e-4, atol=1e-5)
        for i in range(SAMPLES):
            assert torch.equal(run(x[i : i + 1])[0], whole[i])
        assert torch.equal(run(x[1:3]), whole[1:3])


@pytest.mark.parametrize("kind", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [Heads(), pytest.param(Attention(whole=True), marks=pytest.mark.slow)])
def test_attention_of_16_bits(model: nn.Module, kind: torch.dtype) -> None:
    """No further from torch in f64 than torch's own attention of that type, and each sample as alone."""
    made, x = copy.deepcopy(model).eval().to(kind), torch.randn(SAMPLES, 5, 16)
    x = x[..., :8].to(kind) if isinstance(model, Attention) else x.to(kind)
    run = compiled(made)
    with torch.no_grad():
        whole, torchs, want = run(x), made(x), copy.deepcopy(made).double()(x.double())
        assert all(torch.equal(run(x[i : i + 1])[0], whole[i]) for i in range(SAMPLES))
    off, own = ((y.double() - want).abs().max() for y in (whole, torchs))
    assert whole.dtype is kind and 0 < off <= 1.5 * own


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_gradients_of_attention_of_16_bits(kind: torch.dtype) -> None:
    """No further from torch in f64 than twice torch's own; each sample's as alone."""
    model, x = Heads(), torch.randn(SAMPLES, 5, 16).to(kind)
    run = torch.compile(model, backend=backend, options={"rest": "eager"})

    def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        given = x.requires_grad_()
        y = f(given)
        (made,) = torch.autograd.grad(
            y, given, torch.linspace(-1, 1, 80).to(y.dtype).view(2, 5, 8).expand_as(y)
        )
        return made

    whole, torchs = gradient(run, marked(x)), gradient(model, x.clone())
    want = gradient(model, x.double())
    assert all(torch.equal(gradient(run, marked(x[i : i + 1]))[0], whole[i]) for i in range(SAMPLES))
    off, own = ((y.double() - want).abs().max() for y in (whole, torchs))
    assert whole.dtype is kind and 0 < off <= 2 * own


@pytest.mark.slow
def test_training() -> None:
    """Gradients of samples, and weights' gradients of a batch and of one with samples of zeros behind."""
    model = Convolutional().train()
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    x = torch.randn(SAMPLES, 3, 7, 6)

    def gradients(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        given = marked(x).requires_grad_()
        y = run(given)
        y.backward(x.flatten(1)[:, :1].expand_as(y).contiguous())
        assert given.grad is not None
        return given.grad, [p.grad for p in model.parameters() if p.grad is not None]

    whole, sums = gradients(x)
    for i in range(SAMPLES):
        assert torch.equal(gradients(x[i : i + 1])[0][0], whole[i])
    again = gradients(torch.cat([x, torch.zeros(2, 3, 7, 6)]))[1]
    assert len(sums) == 6 and all(map(torch.equal, sums, again))


def test_a_number_for_samples_is_refused() -> None:
    run = torch.compile(Convolutional().eval(), backend=backend, options={"rest": "eager"}, dynamic=False)
    with pytest.raises(Exception, match="the number of samples is no name of this graph: .*mark_dynamic"):
        run(torch.randn(2, 3, 7, 6))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.cumsum(x, 1) + 1, "cumsum"),
        (lambda x: torch.nn.functional.dropout(x, 0.5) * 2, "bernoulli|dropout|rand"),
    ],
)
def test_what_torch_would_add_up_or_draw_is_refused_by_name(
    function: Callable[[Tensor], Tensor], name: str
) -> None:
    with pytest.raises(Exception, match=f"torch would compute .*({name})"):
        compiled(function)(torch.randn(3, 8))


def test_what_torch_moves_it_may() -> None:
    table, run = torch.randn(10, 4), compiled(lambda x: F.embedding(x.long(), table).sum(1))
    x = torch.randint(0, 10, (SAMPLES, 6)).float()
    whole = run(x)
    assert all(torch.equal(run(x[i : i + 1])[0], whole[i]) for i in range(SAMPLES))


@pytest.mark.slow
def test_the_option_alone() -> None:
    """Without the switch of the settings; a first batch of several samples makes their number a name."""
    with transconv.config.changed(invariant=False):
        torch.compiler.reset()
        run, x = compiled(Attention().eval(), invariant=True), torch.randn(SAMPLES, 5, 8)
        with torch.no_grad():
            whole = run(x)
            for i in range(0, SAMPLES, 2):
                assert torch.equal(run(x[i : i + 2]), whole[i : i + 2])


def test_the_option_alone_waits_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch may answer calls until kernels are there, it answers none of such a graph."""
    monkeypatch.setattr(GraphWait, "begin", lambda wait, sizes: modes.append(wait.mode()))
    monkeypatch.setattr(region_calls, "compile_mode", lambda same: modes.append(same) or "now")
    with transconv.config.changed(invariant=False, compile="background", fallback="warn"):
        for invariant in (True, False):
            modes, run = list[object](), compiled(lambda x: x.softmax(1) * 2, invariant=invariant)
            torch.compiler.reset()
            run(torch.randn(SAMPLES, 8))
            assert {*modes} == ({"now", True} if invariant else {"background", False})


@pytest.mark.slow
def test_a_part_of_a_batch_that_begins_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are asked for aligned tensors alone: another kernel may be chosen for others."""
    real, odd = TritonKernel._interpret, list[bool]()

    def interpret(kernel: TritonKernel, tensors: list[Any], *rest: Any) -> None:
        odd.extend(t.data_ptr() % 16 != 0 for t in tensors)
        real(kernel, tensors, *rest)

    monkeypatch.setattr(TritonKernel, "_interpret", interpret)
    run = torch.compile(Attention().eval(), backend=backend, options={"rest": "eager"})
    x = torch.randn(SAMPLES * 40 + 1)[1:].view(SAMPLES, 5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        run(x)
    assert odd and not any(odd)


def test_a_graph_of_before_the_switch_is_refused() -> None:
    with transconv.config.changed(invariant=False):
        torch.compiler.reset()
        run, x = compiled(lambda x: x.softmax(1)), torch.randn(SAMPLES, 8)
        run(x)
    with pytest.raises(Unsupported, match="compiled before transconv.config.invariant was set"):
        run(x)


@pytest.mark.slow
def test_graphs_are_planned_for_a_fixed_number() -> None:
    model = Convolutional().eval()
    texts = []
    for count in (3, 9):
        torch.compiler.reset()
        run = torch.compile(model, backend=backend, options={"rest": "eager"})
        with torch.no_grad():
            run(marked(torch.randn(count, 3, 7, 6)))
        texts.append([k.text for g in report(run).graphs for k in g.kernels])
    assert texts[0] == texts[1] and "S0=8" in texts[0][0]


def test_images_between_convolutions_have_features_last() -> None:
    """As where the number of samples is given: boxes read them so."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)).eval()
    run, x = torch.compile(model, backend=backend), torch.randn(SAMPLES, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(marked(x)), model(x), rtol=1e-4, atol=1e-5)
    texts = [k.text for g in report(run).graphs for k in g.kernels]
    stored = [line for text in texts for line in text.splitlines() if "tensor Y" in line]
    assert len(stored) == 3
    assert [line.endswith(" acdb") for line in stored] == [True, True, False]  # the last is torch's


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        (nn.ConvTranspose2d(8, 4, 2, 2), 1),
        (nn.ConvTranspose2d(8, 6, 4, 2, 1, groups=2), 1),
        (nn.ConvTranspose1d(8, 4, 6, 3, bias=False), 1),
        (nn.ConvTranspose2d(8, 4, 2, 2, output_padding=1), 4),  # a position of no tap's
    ],
)
def test_stride_phases_with_as_many_taps_are_one_kernel(layer: nn.Module, kernels: int) -> None:
    """As where the number of samples is given."""
    x = torch.randn(SAMPLES, 8, *(5,) * (layer.weight.ndim - 2))  # type: ignore[union-attr,operator]
    run, exact = compiled(layer.eval()), copy.deepcopy(layer).double()
    with torch.no_grad():
        whole = run(x)
        assert [len(g.kernels) for g in report(run.of).graphs] == [kernels]
        torch.testing.assert_close(whole.double(), exact(x.double()), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(run(x[i : i + 1])[0], whole[i]) for i in range(SAMPLES))
        assert torch.equal(run(x[1:3]), whole[1:3])


class Joined(nn.Module):
    """As in a U-Net: what was normed, and what was made larger, are joined and convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(2, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(32, 4, 3, padding=1)
        self.first = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.norm(self.first(x)))
        made = self.up(F.silu(self.norm(self.down(x))))
        return self.out(torch.cat([made, first], 1))  # type: ignore[no-any-return]


def test_parts_of_concatenations_are_stored_in_them() -> None:
    """No kernel copies, for any number of samples; the parts have gaps between their images."""
    model, x = Joined().eval(), torch.randn(SAMPLES, 3, 8, 6)
    run, exact = compiled(model), copy.deepcopy(model).double()
    with torch.no_grad():
        whole = run(x)
        torch.testing.assert_close(whole.double(), exact(x.double()), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(run(x[i : i + 1])[0], whole[i]) for i in range(SAMPLES))
        assert torch.equal(run(x[1:3]), whole[1:3])
    texts = [k.text for g in report(run.of).graphs for k in g.kernels]
    assert len(texts) == 6 and not any("cat" in text.partition("\n")[0] for text in texts)
    slices = [line for text in texts for line in text.splitlines() if f"strides({32 * 48}," in line]
    assert len(slices) == 2 and all("tensor Y0 f32 [S0, 16, " in line for line in slices)


def test_a_model_with_joined_images_is_certified() -> None:
    made = certify(Joined().eval(), torch.randn(3, 3, 8, 6), drawn=1, seed=31)
    assert made.holds and "no bit differs" in str(made), str(made)


def test_a_plan_that_groups_by_the_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proof.reduction_tree

    def planted(*given: Any) -> Any:
        tree = real(*given)

        class Planted:
            def depends(self, name: str) -> list[str]:
                return [f"part = {name} // 2"]

        return tree and Planted()

    monkeypatch.setattr(proof, "reduction_tree", planted)
    with torch.no_grad(), pytest.raises(Unsupported, match="the number of samples decides part = S0 // 2"):
        compiled(Convolutional().eval())(torch.randn(2, 3, 7, 6))


@pytest.mark.parametrize(
    ("conditions", "most"),
    [
        ((N * H * H <= 1_000_000,), 100),
        ((N * H * H <= 1_000_000, N <= 64, H <= 2), 64),
        ((N >= 1,), LARGEST_BATCH),
        ((N * H < 900,), 8),
    ],
)
def test_the_most_samples_of_what_was_assumed(conditions: tuple[ir.Expr, ...], most: int) -> None:
    """By the numbers: all hold for so many, and not for one more."""
    found = largest_batch(symbols_of(conditions), ["N"])
    assert found == most
    told = [c for c in conditions if "N" in {v.name for v in ir.free_vars(c)}]
    held = [all(ir.value_at(c, {"N": n, "H": 100}) for c in told) for n in (1, found, found + 1)]
    assert held == [True, True, found == LARGEST_BATCH]


@pytest.mark.parametrize("condition", [N * H <= 700, ir.eq(N % 2, 0), N > 8])
def test_what_holds_for_some_numbers_alone_is_refused(condition: ir.Expr) -> None:
    with pytest.raises(Unsupported, match="its kernels are for batches with"):
        largest_batch(symbols_of([condition]), ["N"])


def symbols_of(conditions: Iterable[ir.Expr]) -> Any:
    known = SimpleNamespace(names=("N", "H"), like={"N": 8, "H": 100}, assumed=dict.fromkeys(conditions))
    return SimpleNamespace(known=known)


def test_many_positions_bound_the_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 32 bits hold fewer samples of these than are taken at most; the others are computed."""
    model, x = nn.Conv2d(3, 64, 1).eval(), torch.randn(5, 3, 36, 34)
    found: list[int] = []

    def noted(*given: Any) -> int:
        found.append(largest_batch(*given))
        return 4

    monkeypatch.setattr(torch_compile, "largest_batch", noted)
    run = compiled(model)
    with torch.no_grad():
        whole = run(x[:4])
        torch.testing.assert_close(whole, model(x[:4]), rtol=1e-4, atol=1e-5)
        assert torch.equal(run(x[:1])[0], whole[0])
        with pytest.raises(Unsupported, match="a batch of 5; its kernels take 4 at most"):
            run(x)
    assert SAMPLES < found[0] < LARGEST_BATCH and found[0] * 36 * 34 * 64 < 2**31


def test_a_model_is_certified() -> None:
    made = certify(Convolutional().eval(), torch.randn(3, 3, 7, 6), drawn=1, seed=31)
    assert made.holds, str(made)
    assert made.title == "Convolutional" and "no bit differs" in str(made)


@torch.compiler.disable
def outside(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2)).cumsum(-1)


UNCERTAIN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "torch": (lambda x: torch.cumsum(x, 1) * 2, "torch would compute cumsum"),
    "outside of the graph": (lambda x: outside(x * 2), "REFUSED  graph: "),
    "nothing in a graph": (outside, "REFUSED  graph: "),
    "no part for each sample": (lambda x: x.sum(0), "result 0 has no part for each of"),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_not_known_of_a_model_is_no_certificate(name: str) -> None:
    function, why = UNCERTAIN[name]
    made = certify(function, torch.randn(3, 8, 5), drawn=1, seed=31)
    assert not made.holds and why in str(made)


def test_options() -> None:
    with pytest.raises(Exception, match='"invariant": True or False'):
        torch.compile(lambda x: x + 1, backend=backend, options={"invariant": "yes"})(torch.randn(3))
