"""On a GPU: pieces of a stream have the bits of its whole, and are torch's; a step of a depthwise
convolution runs in a CUDA graph; tensors wait in host memory, copied beside kernels; a bound holds for
what torch takes inside of its operations."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from bench.streaming import decoder, video
from tests.distributed.test_streams import Causal, FirstRow, Recurrent, encoder
from tests.graph.test_piece_tiles import Normed
from tests.graph.test_pieces import least
from transconv.errors import Unsupported
from transconv.functional import causal_conv1d_fn, causal_conv1d_update
from transconv.graph.pieces.region_pieces import RegionPieces

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["codec", "video"])
def test_pieces_have_the_bits_of_the_whole(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    made, shape = {"codec": (decoder(64), (2, 128, 23)), "video": (video(32), (1, 16, 9, 12, 20))}[name]
    model = made.eval().to("cuda", kind)
    x = torch.randn(shape, device="cuda", dtype=kind)
    s = transconv.streaming(model)
    whole = s(x)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        want = exact(x.double())
        theirs = (model(x).double() - want).abs().max()
    assert (whole.double() - want).abs().max() <= 2 * theirs + 1e-6
    draw = torch.Generator().manual_seed(1)
    for trial in range(4):
        s.reset()
        lengths: list[int] = []
        while sum(lengths) < shape[2]:
            left = shape[2] - sum(lengths)
            lengths.append(1 if trial == 0 else min(left, int(torch.randint(1, 8, (1,), generator=draw))))
        parts = [s(part) for part in x.split(lengths, 2)]
        assert torch.equal(torch.cat(parts, 2), whole), lengths
    found = transconv.stats(reset=True)
    assert found.native["stream"] and not found.fallback


@pytest.mark.parametrize("name", ["codec", "video", "recurrent", "encoder", "first row"])
def test_recorded_steps_have_the_bits_of_others(name: str) -> None:
    """A step that came before is one launch of a CUDA graph, also in a stream of other numbers."""
    torch.manual_seed(0)
    made, shape = {
        "codec": (decoder(64), (2, 128, 48)),
        "video": (video(32), (1, 16, 48, 12, 20)),
        "recurrent": (nn.Sequential(Causal(8, 32, 3), Recurrent(32)), (2, 8, 48)),
        "encoder": (encoder(), (1, 2, 48)),
        "first row": (FirstRow(), (2, 3, 48)),
    }[name]
    model = made.eval().cuda()
    plain, s = transconv.streaming(model, record=False), transconv.streaming(model)
    for lengths in ([1] * 48, [4] * 12, [3, 5] * 6, [1, 2, 1, 4] * 6):
        x = torch.randn(shape, device="cuda")
        plain.reset()
        s.reset()
        found = [s(part) for part in x.split(lengths, 2)]
        wanted = [plain(part) for part in x.split(lengths, 2)]
        assert all(map(torch.equal, found, wanted)), lengths
    graphs = s._plan.graphs
    assert not graphs.why_not
    assert len(graphs._graphs) >= 4
    with torch.inference_mode():
        assert torch.equal(s(x[:, :, :4]), plain(x[:, :, :4]))
    assert torch.equal(s(x[:, :, 4:8]), plain(x[:, :, 4:8]))


@pytest.mark.parametrize("ring", [0, 3, 4, 5, 8])
def test_a_step_in_a_cuda_graph(ring: int) -> None:
    """``ring``: the elements of one, 0 for a window."""
    n, c, k, steps = 4, 96, 4, 9
    x = torch.randn(n, c, steps, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(c, k, device="cuda").bfloat16(), torch.randn(c, device="cuda").bfloat16()
    state = torch.zeros(n, c, ring or k - 1, device="cuda", dtype=torch.bfloat16)
    lengths = torch.zeros(n, device="cuda", dtype=torch.int32) if ring else None
    given = x[..., 0].clone()
    for _ in range(2):
        causal_conv1d_update(given, state, w, b, "silu", lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = causal_conv1d_update(given, state, w, b, "silu", lengths)
    state.zero_()
    found: list[Tensor] = []
    for t in range(steps):
        given.copy_(x[..., t])
        graph.replay()
        found.append(y.clone())
        if lengths is not None:
            lengths += 1
    want = F.silu(F.conv1d(F.pad(x, (k - 1, 0)).double(), w[:, None].double(), b.double(), groups=c))
    torch.testing.assert_close(torch.stack(found, -1).double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [None, ["l2", "rms", None]])
def test_parts_of_a_result(last: bool, kind: torch.dtype, norm: list[str | None] | None) -> None:
    """Results, gradients, steps in a CUDA graph, and the bits of pieces by one kernel for all lengths;
    norms of heads whose channels lie innermost are within rounding."""
    torch.manual_seed(0)
    split, head, t = [128, 128, 256], 64, 300
    x = torch.randn(2, 512, t, device="cuda", dtype=kind)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    w, b = torch.randn(512, 4, device="cuda", dtype=kind), torch.randn(512, device="cuda", dtype=kind)
    words = {"activation": "silu", "split": split, "norm": norm, "head": head}

    def exact(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        made = [*F.silu(F.conv1d(F.pad(x, (3, 0)), w[:, None], b, groups=512)).split(split, 1)]
        for i, own in enumerate(norm or ()):
            if own:
                wide = made[i].unflatten(1, (-1, head))
                square = wide.square().sum(2, keepdim=True) / (head if own == "rms" else 1)
                made[i] = (wide * torch.rsqrt(square + 1e-6)).flatten(1, 2)
        return made

    given = [g.requires_grad_() for g in (x, w, b)]
    wide = [g.detach().double().requires_grad_() for g in given]
    mine, want = causal_conv1d_fn(*given, **words), exact(*wide)
    near = 1e-5 if kind is torch.float32 else 2e-2
    for a, e in zip(mine, want, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=near, atol=near)
    flows = [torch.randn_like(a) for a in mine]
    pairs = zip(
        torch.autograd.grad(mine, given, flows),
        torch.autograd.grad(want, wide, [f.double() for f in flows]),
        strict=True,
    )
    for a, e in pairs:
        assert (a.double() - e).abs().max() <= near * e.abs().max()
    assert "causal_conv1d_fn_gradient" in str(transconv.stats(reset=True))
    x, w, b = (g.detach() for g in given)
    state, step = torch.zeros(2, 512, 3, device="cuda", dtype=kind), x[..., 0].clone()
    causal_conv1d_update(step, state, w, b, **words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = causal_conv1d_update(step, state, w, b, **words)
    state.zero_()
    for at in range(4):
        step.copy_(x[..., at])
        graph.replay()
        for a, e in zip(made, want, strict=True):
            torch.testing.assert_close(a.double(), e[..., at], rtol=near, atol=near)
    transconv.stats(reset=True)
    with transconv.config.changed(sizes="any"), torch.no_grad():
        before = torch.zeros(2, 512, 3, device="cuda", dtype=kind)
        one = causal_conv1d_fn(x, w, b, initial_states=before, **words)
        pieces = list[tuple[Tensor, ...]]()
        for part in x.split([1, 100, 3, 196], -1):
            part = torch.empty_like(part).copy_(part)
            y, before = causal_conv1d_fn(
                part, w, b, initial_states=before, return_final_states=True, **words
            )
            pieces.append(y)
    assert transconv.stats(reset=True).native == {"causal_conv1d_fn any size": 5}
    for joined, whole in zip((torch.cat(p, -1) for p in zip(*pieces, strict=True)), one, strict=True):
        if norm and last:
            torch.testing.assert_close(joined, whole)
        else:
            assert torch.equal(joined, whole)


@pytest.mark.parametrize("ring", [0, 5])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [None, ["l2", "rms", None]])
def test_a_step_has_its_bits_in_any_batch(
    ring: int, kind: torch.dtype, norm: list[str | None] | None
) -> None:
    """In invariant mode, with states in rows of a larger one; other plans are for so many samples."""
    torch.manual_seed(0)
    c, n = 512, 300
    split, head = ([128, 128, 256], 64) if norm else (None, 1)
    x, states = (torch.randn(s, device="cuda", dtype=kind) for s in ((n, c), (n + 3, c, ring or 3)))
    w, b = (torch.randn(s, device="cuda", dtype=kind) for s in ((c, 4), (c,)))
    rows = torch.randperm(n + 3, device="cuda")[:n]
    lengths = torch.randint(ring, 99, (n,), device="cuda") if ring else None

    def run(begin: int, end: int) -> list[Tensor]:
        own, where = states.clone(), rows[begin:end].clone()
        at = None if lengths is None else lengths[begin:end].clone()
        words = {"split": split, "norm": norm, "head": head}
        y = causal_conv1d_update(x[begin:end].clone(), own, w, b, "silu", at, where, **words)
        return [*(y if split else [y]), own[where]]

    with transconv.config.changed(invariant=True):
        whole = run(0, n)
        for begin, end in [(i, i + 1) for i in range(9)] + [(0, m) for m in (2, 3, 9, 64)] + [(n - 1, n)]:
            for part, joined in zip(run(begin, end), whole, strict=True):
                assert torch.equal(part, joined[begin:end]), (begin, end)
    assert not transconv.stats(reset=True).fallback


@pytest.mark.parametrize("last", [False, True])
def test_gradients(last: bool) -> None:
    n, c, t, k = 2, 128, 300, 4
    torch.manual_seed(0)
    x = torch.randn(n, c, t, device="cuda")
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    given = [x, *(torch.randn(s, device="cuda") for s in ((c, k), (c,), (n, c, k - 1)))]
    given = [g.requires_grad_() for g in given]

    def whole(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> Tensor:
        wide = torch.cat([state, x], -1)
        return F.silu(F.conv1d(wide, w[:, None], b, groups=c))

    mine = causal_conv1d_fn(given[0], given[1], given[2], None, given[3], activation="silu")
    exact = [g.detach().double().requires_grad_() for g in given]
    want = whole(*exact)
    torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    flow = torch.randn_like(mine)
    for a, e in zip(
        torch.autograd.grad(mine, given, flow),
        torch.autograd.grad(want, exact, flow.double()),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-3)
    assert "causal_conv1d_fn_gradient" in str(transconv.stats(reset=True))


def test_tensors_that_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(2, 64, 3, padding=1), torch.nn.Conv2d(64, 2, 3, padding=1)
    model = torch.nn.Sequential(first, Normed(64), Normed(64), last).cuda().bfloat16()
    x = torch.randn(1, 2, 64, 8192, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    plan = RegionPieces.plan

    def planned(self: RegionPieces, *given: Any) -> None:
        self.graph.rates = replace(
            self.graph.rates, link_gbs=1e6
        )  # copies cost next to nothing: two tensors wait
        plan(self, *given)

    monkeypatch.setattr(RegionPieces, "plan", planned)
    run, side = transconv.within(model, "75 MB", "h", 1 << 36), torch.cuda.Stream()
    with torch.no_grad():
        whole = transconv.within(model, None, "h")(x)
        for trial in range(6):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.cuda.stream(side if trial % 2 else torch.cuda.default_stream()):
                made = run(x)  # the next one begins while copies of this one are on their way
            most = torch.cuda.max_memory_allocated() - before
            if trial % 2:
                torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(made, whole), trial
            del made
    report = run.report()
    assert report.pinned > 0
    assert most + report.plans[0].beside <= 1.03 * report.peak + (1 << 20)  # torch's allocator rounds


class Attended(torch.nn.Module):
    """An attention of one wide head, which torch computes, between convolutions."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = (
            torch.nn.Conv2d(3, wide, 3, padding=1),
            torch.nn.Conv2d(wide, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        q = y.flatten(2).transpose(1, 2).unsqueeze(1)
        y = y + F.scaled_dot_product_attention(q, q, q)[:, 0].transpose(1, 2).reshape(y.shape)
        return self.last(F.silu(y))


def test_a_bound_holds_for_what_torch_takes() -> None:
    torch.manual_seed(0)
    model = Attended(512).cuda().bfloat16().eval()
    x = torch.randn(1, 3, 64, 80, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    held = sum(t.untyped_storage().nbytes() for t in (x, *model.parameters()))
    with torch.no_grad():
        want = transconv.within(model, None)(x)
        bound = 1 << 20
        for _ in range(3):  # each refusal is of the first region that needs more
            try:
                transconv.within(model, bound)(x)
            except Unsupported as error:
                bound = int(1.3 * least(error))
        run, peaks = transconv.within(model, bound), list[int]()
        others = torch.cuda.memory_allocated() - held
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            made = run(x)
            peaks.append(torch.cuda.max_memory_allocated() - others)
            assert torch.equal(made, want)
            del made
    assert max(peaks[2:]) <= bound, (bound, peaks, str(run.report()))
    assert run.report().peak <= bound
