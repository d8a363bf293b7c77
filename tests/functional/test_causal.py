"""Causal depthwise convolutions with a state: results and gradients are those of torch's operations on the
sequences one by one, pieces those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv.functional import causal, causal_conv1d_fn, causal_conv1d_update
from transconv.functional.calls import symbolic_bind

Tensor = torch.Tensor


def whole(x: Tensor, w: Tensor, b: Tensor | None, state: Tensor, activation: str | None) -> Tensor:
    """The convolution of the state and x, in f64."""
    wide = torch.cat([state, x], -1).double()
    y = F.conv1d(wide, w[:, None].double(), None if b is None else b.double(), groups=len(w))
    return F.silu(y) if activation else y


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def agree(
    mine: Callable[..., Any], theirs: Callable[..., Any], given: list[Tensor], tolerance: float = 1e-5
) -> None:
    """Results and all gradients, of several results with one sum."""
    got, want = mine(*given), theirs(*given)
    pairs = list(zip(got, want, strict=True)) if isinstance(got, tuple) else [(got, want)]
    flows = [torch.randn_like(g) for g, _ in pairs]
    for g, t in pairs:
        torch.testing.assert_close(g.double(), t.double(), rtol=tolerance, atol=tolerance)
    sums = (
        sum((t.double() * flow).sum() for t, flow in zip(side, flows, strict=True))
        for side in zip(*pairs, strict=True)
    )
    for a, b in zip(*(torch.autograd.grad(s, given) for s in sums), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("n", "c", "t", "k", "biased", "activation"),
    [
        (2, 5, 9, 4, True, "silu"),
        (1, 3, 2, 4, False, None),
        (2, 4, 1, 3, True, None),
        (3, 2, 7, 1, False, "swish"),
    ],
)
def test_results_and_gradients_with_a_state(
    n: int, c: int, t: int, k: int, biased: bool, activation: str | None
) -> None:
    given = [drawn(n, c, t), drawn(c, k)] + [drawn(n, c, k - 1)] * (k > 1) + [drawn(c)] * biased
    empty = torch.empty(n, c, 0)

    def mine(x: Tensor, w: Tensor, state: Tensor = empty, b: Tensor | None = None) -> Any:
        return causal_conv1d_fn(x, w, b, None, state, True, activation=activation)

    def theirs(x: Tensor, w: Tensor, state: Tensor = empty, b: Tensor | None = None) -> Any:
        wide = torch.cat([state, x], -1)
        return whole(x, w, b, state, activation), wide[..., wide.shape[-1] - (k - 1) :]

    agree(mine, theirs, given)
    b = given[-1] if biased else None
    plain = causal_conv1d_fn(given[0], given[1], b, activation=activation)
    want = whole(given[0], given[1], b, torch.zeros(n, c, k - 1), activation)
    torch.testing.assert_close(plain.double(), want, rtol=1e-5, atol=1e-5)
    found = transconv.stats(reset=True)
    assert found.native == {"causal_conv1d_fn": 2, "causal_conv1d_fn_gradient": 1}


@pytest.mark.parametrize("activation", [None, "silu"])
def test_sequences_are_apart_and_padding_is_zero(activation: str | None) -> None:
    lengths, c, k = [3, 1, 5, 2], 3, 4
    numbers = torch.tensor([[7] * 3 + [-1] + [2] * 5 + [0] * 2]).int()
    given = [drawn(1, c, sum(lengths)), drawn(c, k), drawn(c)]

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        parts, zeros = x.split(lengths, -1), torch.zeros(1, c, k - 1)
        return torch.cat([whole(p, w, b, zeros, activation) * (i != 1) for i, p in enumerate(parts)], -1)

    agree(lambda x, w, b: causal_conv1d_fn(x, w, b, numbers, activation=activation), theirs, given)


@pytest.mark.parametrize("states", [False, True])
def test_packed_sequences_with_states(states: bool) -> None:
    lengths, c, k = [1, 5, 2, 0, 7], 2, 4
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    given = [drawn(1, c, sum(lengths)), drawn(c, k), drawn(c)] + [drawn(len(lengths), c, k - 1)] * states

    def theirs(x: Tensor, w: Tensor, b: Tensor, before: Tensor | None = None) -> Any:
        before = torch.zeros(len(lengths), c, k - 1) if before is None else before
        wide = [torch.cat([s[None], p], -1) for s, p in zip(before, x.split(lengths, -1), strict=True)]
        y = [
            whole(p, w, b, s[None], "silu")
            for s, p in zip(before, x.split(lengths, -1), strict=True)
            if p.numel()
        ]
        return torch.cat(y, -1), torch.cat([t[..., t.shape[-1] - (k - 1) :] for t in wide])

    def mine(x: Tensor, w: Tensor, b: Tensor, before: Tensor | None = None) -> Any:
        return causal_conv1d_fn(x, w, b, None, before, True, None, "silu", cu_seqlens=ends)

    agree(mine, theirs, given)
    y = causal_conv1d_fn(*given[:3], activation="silu", cu_seqlens=ends)
    torch.testing.assert_close(y, mine(*given[:3])[0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_all_lengths_have_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": 4, "LONG": 16, "ELEMENTS": 64, "SIDE": 4, "REACHES": (96,)}.items():
        monkeypatch.setattr(symbolic_bind, name, value)
    symbolic_bind._written.clear()
    transconv.config.sizes = "any"
    w = drawn(3, 4)
    for length in (9, 1, 23):
        given = [drawn(2, 3, length), w, drawn(2, 3, 3)]
        agree(
            lambda x, w, s: causal_conv1d_fn(x, w, None, None, s, activation="silu"),
            lambda x, w, s: whole(x, w, None, s, "silu"),
            given,
        )
    assert transconv.stats(reset=True).native == {
        "causal_conv1d_fn any size": 3,
        "causal_conv1d_fn_gradient any size": 3,
    }
    transconv.config.sizes = "exact"
    symbolic_bind._written.clear()


@pytest.mark.every(8)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(("n", "c", "k", "size"), [(2, 3, 4, 3), (1, 2, 3, 5)])
def test_steps_are_the_whole(n: int, c: int, k: int, size: int, chosen: bool, ring: bool) -> None:
    torch.manual_seed(size)
    rows = n + 2 if chosen else n
    where = torch.randperm(rows)[:n].int() if chosen else None
    before, lengths = torch.randn(n, c, size), torch.randint(size, 40, (n,)).int()
    state = torch.randn(rows, c, size)
    kept, own = state.clone(), [int(where[i]) if chosen else i for i in range(n)]  # type: ignore[index]

    def places(i: int, at: int) -> list[int]:
        return [(int(lengths[i]) + at - size + e) % size if ring else e for e in range(size)]

    for i, row in enumerate(own):
        state[row][:, places(i, 0)] = before[i]
    x, w, b = torch.randn(n, c, 7), torch.randn(c, k), torch.randn(c)
    at, found = 0, []
    for steps in (1, 2, 1, 3):
        piece = x[..., at : at + steps]
        y = causal_conv1d_update(
            piece[..., 0] if steps == 1 else piece,
            state,
            w,
            b,
            "silu",
            lengths + at if ring else None,
            where,
        )
        found.append(y[..., None] if steps == 1 else y)
        at += steps
    want = whole(x, w, b, before[..., size - (k - 1) :], "silu")
    torch.testing.assert_close(torch.cat(found, -1).double(), want, rtol=1e-5, atol=1e-5)
    for i, row in enumerate(own):
        assert torch.equal(state[row][:, places(i, at)], torch.cat([before, x], -1)[i, :, -size:])
    others = [row for row in range(rows) if row not in own]
    assert torch.equal(state[others], kept[others])
    assert transconv.stats(reset=True).native == {"causal_conv1d_update": 4}


def test_torch_computes_the_same_on_a_cpu() -> None:
    given = torch.randn(2, 3, 5), torch.randn(3, 4), torch.randn(3), torch.tensor([[0, 0, 1, 1, -1]] * 2)
    mine = causal_conv1d_fn(*given[:3], given[3], activation="silu")
    transconv.config.cpu = "fallback"
    torch.testing.assert_close(causal_conv1d_fn(*given[:3], given[3], activation="silu"), mine)
    assert not transconv.stats(reset=True).native.get("causal_conv1d_update")


X, W = torch.zeros(2, 3, 5), torch.zeros(3, 4)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "split": (
        lambda: causal_conv1d_fn(X, W, split=[1, 1]),
        ValueError,
        r"split=\[1, 1\]; expected numbers of features that add up to 3",
    ),
    "norms": (
        lambda: causal_conv1d_fn(X, W, split=[1, 2], norm=["l2"]),
        ValueError,
        "one for all parts or for each",
    ),
    "norm": (
        lambda: causal_conv1d_fn(X, W, norm="layer"),
        ValueError,
        "norm='layer'; expected 'l2', 'rms'",
    ),
    "heads": (
        lambda: causal_conv1d_update(X, X, W, split=[1, 2], norm="l2", head=2),
        ValueError,
        r"head=2; expected a number that divides \(1, 2\) features",
    ),
    "weight": (
        lambda: causal_conv1d_fn(X, W[:2]),
        ValueError,
        r"weight: expected shape \(3, width\), got \(2, 4\)",
    ),
    "rank": (lambda: causal_conv1d_fn(X[0], W), ValueError, r"x: expected \(batch, dim, length\)"),
    "bias": (lambda: causal_conv1d_fn(X, W, X[0, 0]), ValueError, r"bias: expected shape \(3,\)"),
    "activation": (lambda: causal_conv1d_fn(X, W, activation="sulu"), RuntimeError, "sulu"),
    "state": (
        lambda: causal_conv1d_fn(X, W, initial_states=X),
        ValueError,
        r"initial_states: expected shape \(2, 3, 3\)",
    ),
    "index": (
        lambda: causal_conv1d_fn(X, W, seq_idx=X[:, 0]),
        TypeError,
        "seq_idx: expected a tensor of int32",
    ),
    "index and states": (
        lambda: causal_conv1d_fn(X, W, seq_idx=X[:, 0].int(), return_final_states=True),
        ValueError,
        "expected cu_seqlens",
    ),
    "packed": (
        lambda: causal_conv1d_fn(X, W, cu_seqlens=torch.tensor([0, 5])),
        ValueError,
        r"x \(1, dim, length\)",
    ),
    "no tensor": (lambda: causal_conv1d_fn([1], W), TypeError, "x: expected a tensor, got list"),  # type: ignore[arg-type]
    "short state": (
        lambda: causal_conv1d_update(X, X[..., :2], W),
        ValueError,
        "holds 2 elements; expected at least 3",
    ),
    "short ring": (
        lambda: causal_conv1d_update(X, X[..., :4], W, cache_seqlens=torch.tensor([1, 2])),
        ValueError,
        "at least 5, for a weight of width 4 and 5 positions",
    ),
    "rows": (
        lambda: causal_conv1d_update(X, X[:1], W),
        ValueError,
        r"conv_state: expected shape \(2, 3, state",
    ),
    "lengths": (
        lambda: causal_conv1d_update(X, X, W, cache_seqlens=torch.tensor([1])),
        ValueError,
        r"cache_seqlens: expected shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    run, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        run()


def in_parts(y: Tensor, split: list[int], norms: list[str | None], head: int) -> list[Tensor]:
    """The parts of a result in torch's operations, heads divided by their norms."""
    made = [*y.split(split, 1)]
    for i, norm in enumerate(norms):
        if norm:
            wide = made[i].unflatten(1, (-1, head))
            square = (
                wide.square().sum(2, keepdim=True) if norm == "l2" else wide.square().mean(2, keepdim=True)
            )
            made[i] = (wide / (square + 1e-6).sqrt()).flatten(1, 2)
    return made


Parted = tuple[list[int], list[str | None], int]
PARTED: list[Parted] = [
    ([5, 1, 2], [None, None, None], 1),
    ([4, 4, 8], ["l2", "l2", None], 4),
    ([6, 3], ["rms", "l2"], 3),
    ([4], ["rms"], 2),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "parted", [p if i == 1 else pytest.param(p, marks=pytest.mark.every(4)) for i, p in enumerate(PARTED)]
)
def test_parts_of_a_result_and_their_gradients(parted: Parted, last: bool) -> None:
    """Each part is dense, in x's order in memory, and the kernel's own: none is a view of another."""
    split, norms, head = parted
    c, k = sum(split), 4
    for n, t, state, activation in ((2, 7, True, "silu"), (1, 2, False, None), (1, 9, False, "silu")):
        x = torch.randn(n, t, c).transpose(1, 2).requires_grad_() if last else drawn(n, c, t)
        given = [x, drawn(c, k), drawn(c)] + [drawn(n, c, k - 1)] * state

        def mine(*own: Tensor, activation: str | None = activation) -> Any:
            words: dict[str, Any] = {"split": split, "norm": norms, "head": head}
            before = own[3] if len(own) > 3 else None
            y = causal_conv1d_fn(*own[:3], None, before, activation=activation, **words)
            for part in y:
                assert part.untyped_storage().nbytes() == 4 * part.numel()
                assert (part.transpose(1, 2) if last else part).is_contiguous()
            return y

        def theirs(*own: Tensor, activation: str | None = activation) -> Any:
            before = own[3] if len(own) > 3 else own[0].new_zeros(len(own[0]), c, k - 1)
            return tuple(in_parts(whole(*own[:3], before, activation), split, norms, head))

        agree(mine, theirs, given)
    found = transconv.stats(reset=True)
    assert found.native == {"causal_conv1d_fn": 3, "causal_conv1d_fn_gradient": 3}


def test_parts_of_packed_sequences() -> None:
    lengths, (split, norms, head) = [3, 1, 6], PARTED[1]
    c, ends = sum(split), torch.tensor([0, *lengths]).cumsum(0)
    words: dict[str, Any] = {"activation": "silu", "split": split, "norm": norms, "head": head}
    given = [drawn(1, c, sum(lengths)), drawn(c, 4), drawn(c), drawn(len(lengths), c, 3)]
    numbers = torch.tensor([[4] * 3 + [-1] + [0] * 6])

    def theirs(x: Tensor, w: Tensor, b: Tensor, states: Tensor) -> Any:
        pairs = zip(x.split(lengths, -1), states, strict=True)
        y = torch.cat([whole(p, w, b, s[None], "silu") for p, s in pairs], -1)
        return tuple(in_parts(y, split, norms, head))

    def mine(x: Tensor, w: Tensor, b: Tensor, states: Tensor) -> Any:
        return causal_conv1d_fn(x, w, b, None, states, True, cu_seqlens=ends, **words)[0]

    agree(mine, theirs, given)
    zeros = torch.zeros(len(lengths), c, 3)
    apart = theirs(*given[:3], zeros)
    for made in (
        causal_conv1d_fn(*given[:3], cu_seqlens=ends, **words),
        causal_conv1d_fn(*given[:3], numbers, **words),
    ):
        for a, b in zip(made, apart, strict=True):
            there = b * (numbers >= 0) if made[0][..., 3].count_nonzero() == 0 else b
            torch.testing.assert_close(a.double(), there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ring", [False, True])
def test_parts_of_steps(ring: bool) -> None:
    split, norms, head = PARTED[1]
    c = sum(split)
    x, w, b, state = torch.randn(2, c, 6), torch.randn(c, 4), torch.randn(c), torch.zeros(2, c, 5)
    want = in_parts(whole(x, w, b, torch.zeros(2, c, 3), "silu"), split, norms, head)
    for t in range(6):
        at = torch.full((2,), t) if ring else None
        y = causal_conv1d_update(x[..., t], state, w, b, "silu", at, split=split, norm=norms, head=head)
        for a, part in zip(y, want, strict=True):
            torch.testing.assert_close(a.double(), part[..., t], rtol=1e-5, atol=1e-5)
    assert transconv.stats(reset=True).native == {"causal_conv1d_update": 6}


@pytest.mark.parametrize("parted", [PARTED[0], PARTED[1], ([128, 128, 256], ["l2", "rms", None], 64)])
def test_parts_of_pieces_have_the_bits_of_the_whole(parted: Parted) -> None:
    """One kernel for any length computes them; without that, others may add in another order."""
    split, norms, head = parted
    x, w, b = torch.randn(2, sum(split), 23), torch.randn(sum(split), 4), torch.randn(sum(split))
    words: dict[str, Any] = {"activation": "silu", "split": split, "norm": norms, "head": head}
    zeros = torch.zeros(2, sum(split), 3)
    with transconv.config.changed(sizes="any"):
        want = causal_conv1d_fn(x, w, b, initial_states=zeros, **words)
        for lengths in ([1, 20, 2], [8, 8, 7]):
            state, made = zeros, list[tuple[Tensor, ...]]()
            for part in x.split(lengths, -1):
                y, state = causal_conv1d_fn(
                    part.contiguous(), w, b, initial_states=state, return_final_states=True, **words
                )
                made.append(y)
            assert all(map(torch.equal, [torch.cat(p, -1) for p in zip(*made, strict=True)], want))
    assert transconv.stats(reset=True).native == {"causal_conv1d_fn any size": 7}


def test_parts_that_nothing_needs_and_gradients_of_gradients() -> None:
    split, norms, head = PARTED[1]
    given = [drawn(1, 16, 5), drawn(16, 4)]
    words: dict[str, Any] = {"split": split, "norm": norms, "head": head}
    zeros = torch.zeros(1, 16, 3)
    for last in (0, 2):
        agree(
            lambda x, w, at=last: causal_conv1d_fn(x, w, **words)[at],
            lambda x, w, at=last: in_parts(whole(x, w, None, zeros, None), split, norms, head)[at],
            given,
        )
    wide = [t.detach()[..., :2].double().requires_grad_() for t in given]
    assert torch.autograd.gradgradcheck(lambda x, w: causal_conv1d_fn(x, w, **words)[1:], wide)


def test_parts_in_a_graph() -> None:
    words: dict[str, Any] = {"activation": "silu", "split": PARTED[1][0], "norm": "rms", "head": 4}
    run = torch.compile(lambda x, w: causal_conv1d_fn(x, w, **words), backend="aot_eager", fullgraph=True)
    agree(run, lambda x, w: causal_conv1d_fn(x, w, **words), [drawn(1, 16, 5), drawn(16, 4)])


def test_torch_computes_the_same_parts() -> None:
    x, w, (split, norms, head) = torch.randn(2, 16, 5), torch.randn(16, 4), PARTED[1]
    transconv.config.cpu = "fallback"
    made = causal_conv1d_fn(x, w, split=split, norm=norms, head=head)
    want = in_parts(whole(x, w, None, torch.zeros(2, 16, 3), None), split, norms, head)
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("c", [8, 512, 16384, 1 << 18])
@pytest.mark.parametrize("words", [{"split": [1, 1, 2]}, {"norm": "l2"}])
def test_any_number_of_features_has_forms_for_any_size(c: int, words: dict[str, Any]) -> None:
    """Of results and gradients; the number of features is in their texts, the examples of sizes fit it."""
    shapes = (2, c, 9), (c, 4), (c,), (2, c, 3)
    x, w, b, state = (torch.empty(s, device="meta") for s in shapes)
    split = [n * c // 4 for n in words["split"]] if "split" in words else None
    numbers = causal._numbers(x, "silu", split, words.get("norm"), 4, 1e-6)
    for given in (
        (x, w, None, state, None),
        (x, w, b, None, torch.empty(2, 9, dtype=torch.int64, device="meta")),
    ):
        made = symbolic_bind.bind(causal.CONV, given, numbers, (True,) * 3, any_size=True)
        assert all(step.named is not None for step in (made.forward, *made.backward))


STEPS = [
    pytest.param(6, 4, 3, 1, 0, False, None, marks=pytest.mark.every(4)),
    (5, 3, 5, 2, 0, True, None),
    (8, 4, 3, 1, 9, True, PARTED[1]),
    pytest.param(9, 2, 4, 3, 11, False, PARTED[2], marks=pytest.mark.every(4)),
]


@pytest.mark.parametrize(("c", "k", "size", "steps", "rows", "ring", "parted"), STEPS)
def test_steps_of_a_sample_have_its_bits_in_any_batch(
    c: int, k: int, size: int, steps: int, rows: int, ring: bool, parted: Parted | None
) -> None:
    """Alone and with others, with a state of its own or in a row of a larger one, and near torch's. There
    are as many samples as rows, or as features, in some."""
    split, norms, head = parted or ([c], None, 1)
    c, n = sum(split), 9
    torch.manual_seed(c)
    x, state, w, b = (torch.randn(s) for s in ((n, c, steps), (rows or n, c, size), (c, k), (c,)))
    lengths = torch.randint(size, 40, (n,)).int() if ring else None
    where = torch.randperm(rows)[:n] if rows else None

    def run(begin: int, end: int) -> list[Tensor]:
        own = state.clone() if rows else state[begin:end].clone()
        at, which = (t if t is None else t[begin:end] for t in (lengths, where))
        y = causal_conv1d_update(
            x[begin:end].contiguous(), own, w, b, "silu", at, which, split=split, norm=norms, head=head
        )
        return [*y, own if which is None else own[which]]

    with transconv.config.changed(invariant=True):
        whole = run(0, n)
        for begin, end in [(i, i + 1) for i in range(n)] + [(0, 2), (1, 7)]:
            for part, joined in zip(run(begin, end), whole, strict=True):
                assert torch.equal(part, joined[begin:end]), (begin, end)
        assert transconv.stats(reset=True).native == {"causal_conv1d_update": 12}
    with transconv.config.changed(cpu="fallback"):
        for own, theirs in zip(whole, run(0, n), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


def test_a_step_has_a_certificate() -> None:
    x, state, w = torch.empty(3, 64, 1), torch.empty(5, 64, 3), torch.empty(64, 4)
    given = (x, state, w, None, None, torch.empty(3, dtype=torch.int64))
    numbers = causal._numbers(x, "silu", None, "l2", 32, 1e-6)
    text = symbolic_bind.bind(causal.STEP, given, numbers, (), any_size=True).forward.text
    proof = transconv.certify(text, target="sm_90")
    assert proof.holds, str(proof)


@pytest.mark.parametrize("n", [2, 5])
def test_a_state_in_invariant_mode(n: int) -> None:
    """Whole sequences with a state, whose width may be the number of samples."""
    x, w, state = torch.randn(n, 5, 7), torch.randn(5, 4), torch.randn(n, 5, 3)
    with transconv.config.changed(invariant=True):
        whole = causal_conv1d_fn(x, w, initial_states=state, activation="silu")
        for i in range(n):
            part = causal_conv1d_fn(
                x[i : i + 1].clone(), w, initial_states=state[i : i + 1].clone(), activation="silu"
            )
            assert torch.equal(part, whole[i : i + 1])
