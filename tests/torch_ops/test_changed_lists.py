"""Numbers that a caller has in a list, and changes after the call: no entry, cache or module keeps it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional, quantized
from transconv.calls import guard, route_cache
from transconv.torch_ops.calls import call_entries, lower_call
from transconv.torch_ops.calls.call_entries import CALLS

X1, X2, X3 = (torch.randn(2, 4, *[8] * n) for n in (1, 2, 3))
WEIGHTS = [torch.randn(4, 4, *[3] * n) for n in (1, 2, 3)]
Function = Callable[[list[int]], Any]


def convolutions() -> dict[str, tuple[Function, Function, list[int], list[int]]]:
    """Ours and torch's function of a list, what the list has first, and what it has then."""
    found: dict[str, Any] = {}
    for n, x in ((1, X1), (2, X2), (3, X3)):
        w = WEIGHTS[n - 1]
        for name in (f"conv{n}d", f"conv_transpose{n}d", f"fused_conv{n}d"):
            ours = getattr(transconv, name)
            theirs = getattr(F, name.removeprefix("fused_"))
            for word, before, after in (("stride", 1, 2), ("padding", 0, 1), ("dilation", 1, 2)):
                found[f"{name} {word}"] = (
                    lambda v, f=ours, x=x, w=w, k=word: f(x, w, **{k: v}),
                    lambda v, f=theirs, x=x, w=w, k=word: f(x, w, **{k: v}),
                    [before] * n,
                    [after] * n,
                )
        name = f"conv_transpose{n}d"
        ours, theirs = getattr(transconv, name), getattr(F, name)
        found[f"{name} output_padding"] = (
            lambda v, f=ours, x=x, w=w: f(x, w, None, 2, 0, v),
            lambda v, f=theirs, x=x, w=w: f(x, w, None, 2, 0, v),
            [0] * n,
            [1] * n,
        )
    return found


def of_bytes() -> dict[str, tuple[Function, Function, list[int], list[int]]]:
    found: dict[str, Any] = {}
    x, w = (torch.randint(-9, 9, t.shape, dtype=torch.int8) for t in (X2, WEIGHTS[1]))
    for name in ("conv2d", "conv_transpose2d"):
        ours, theirs = getattr(quantized, name), getattr(F, name)
        for word, before, after in (("stride", 1, 2), ("padding", 0, 1), ("dilation", 1, 2)):
            found[f"quantized.{name} {word}"] = (
                lambda v, f=ours, k=word: f(x, w, **{k: v}),
                lambda v, f=theirs, k=word: f(x.double(), w.double(), **{k: v}).float(),
                [before] * 2,
                [after] * 2,
            )
    return found


def functions() -> dict[str, tuple[Function, Function, list[int], list[int]]]:
    one = torch.ones(8, 8)
    return {
        "max_pool2d": (
            lambda v: functional.max_pool2d(X2, v),
            lambda v: F.max_pool2d(X2, v),
            [2, 2],
            [3, 1],
        ),
        "max_pool2d stride": (
            lambda v: functional.max_pool2d(X2, 3, v),
            lambda v: F.max_pool2d(X2, 3, v),
            [1, 1],
            [2, 3],
        ),
        "avg_pool2d": (
            lambda v: functional.avg_pool2d(X2, v),
            lambda v: F.avg_pool2d(X2, v),
            [2, 2],
            [4, 1],
        ),
        "adaptive_avg_pool2d": (
            lambda v: functional.adaptive_avg_pool2d(X2, v),
            lambda v: F.adaptive_avg_pool2d(X2, v),
            [2, 2],
            [4, 1],
        ),
        "pad": (lambda v: functional.pad(X2, v), lambda v: F.pad(X2, v), [1, 1], [2, 0]),
        "sum": (lambda v: functional.sum(X2, v), lambda v: torch.sum(X2, v), [0, 1], [2, 3]),
        "mean": (lambda v: functional.mean(X2, v), lambda v: torch.mean(X2, v), [0, 1], [2, 3]),
        "amax": (lambda v: functional.amax(X2, v), lambda v: torch.amax(X2, v), [0, 1], [2, 3]),
        "var": (lambda v: functional.var(X2, v), lambda v: torch.var(X2, v), [0, 1], [2, 3]),
        "flip": (lambda v: functional.flip(X2, v), lambda v: torch.flip(X2, v), [0, 1], [2, 3]),
        "logsumexp": (lambda v: functional.logsumexp(X2, v), lambda v: torch.logsumexp(X2, v), [1], [2]),
        "layer_norm": (lambda v: functional.layer_norm(X2, v), lambda v: F.layer_norm(X2, v), [8], [8, 8]),
        "rms_norm": (
            lambda v: functional.rms_norm(X2, v, one[0] if len(v) == 1 else one),
            lambda v: F.rms_norm(X2, v, one[0] if len(v) == 1 else one),
            [8],
            [8, 8],
        ),
        "interpolate": (
            lambda v: functional.interpolate(X2, v),
            lambda v: F.interpolate(X2, v),
            [4, 4],
            [2, 16],
        ),
        "unfold": (lambda v: functional.unfold(X2, v), lambda v: F.unfold(X2, v), [2, 2], [3, 1]),
    }


CASES = {**convolutions(), **of_bytes(), **functions()}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_list_that_changes_is_read_at_every_call(name: str) -> None:
    """Also once its values have been seen so often that a call like the one before takes the short way."""
    ours, theirs, before, after = CASES[name]
    transconv.config.cpu = "fallback"
    given = [*before]
    for _ in range(guard.PATIENCE + 3):
        torch.testing.assert_close(ours(given), theirs(given))
    given[:] = after
    for _ in range(guard.PATIENCE + 3):
        torch.testing.assert_close(ours(given), theirs(given))
    given[:] = before
    torch.testing.assert_close(ours(given), theirs(given))
    # Once more with what cannot change, beside the same in a list.
    torch.testing.assert_close(ours(tuple(after)), theirs(after))  # type: ignore[arg-type]
    given[:] = after
    torch.testing.assert_close(ours(given), theirs(after))


@pytest.mark.parametrize("kind", [transconv.nn.Conv2d, transconv.nn.ConvTranspose2d])
def test_numbers_of_a_module_are_its_own(kind: Any) -> None:
    """They are tuples, as torch's are, or change with the module's attribute alone."""
    transconv.config.cpu = "fallback"
    padding = [0, 0]
    made = kind(4, 4, 3, padding=padding)
    want = [made(X2) for _ in range(guard.PATIENCE + 3)][-1]
    plain = getattr(torch.nn, kind.__name__)(4, 4, 3, padding=padding)
    plain.load_state_dict(made.state_dict())
    padding[:] = [1, 1]
    assert torch.equal(made(X2), want) is torch.equal(plain(X2), want)
    torch.testing.assert_close(made(X2), plain(X2))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
)
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"input_scale": 0.5},
        {"input_scale": torch.tensor(0.5)},
        {"input_scale": 0.5, "weight_scale": torch.full((4,), 2.0)},
    ],
    ids=["none", "number", "tensor", "both"],
)
@pytest.mark.parametrize("cpu", ["interpret", "fallback"])
def test_quantised_calls_of_any_number_of_quantities(name: str, words: dict[str, Any], cpu: str) -> None:
    """Repeated calls, whose entry is written out for its quantities, of which there may be none."""
    transconv.config.cpu = cpu
    n = int(name[-2])
    x, w = (torch.randint(-5, 5, (1, 4, *[k] * n), dtype=torch.int8) for k in (5, 3))
    w = w.expand(4, *w.shape[1:]).contiguous()
    scale = float(words.get("input_scale", 1.0)) * float(words.get("weight_scale", torch.ones(1))[0])
    want = getattr(F, name)(x.double(), w.double()).float() * scale
    transconv.stats(reset=True)
    for _ in range(guard.PATIENCE + (3 if n < 3 else 1)):
        torch.testing.assert_close(getattr(quantized, name)(x, w, **words).float(), want)
    assert bool(transconv.stats().fallback) is (cpu == "fallback")


@pytest.mark.parametrize("padding", [[1, 1], (1, 1)], ids=["list", "tuple"])
def test_entries_of_any_size_keep_no_list(padding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare numbers by identity, so they are made for those alone that cannot change."""
    made: list[Any] = []
    monkeypatch.setattr(CALLS, "due", lambda *_: 1)
    monkeypatch.setattr(CALLS, "keep", lambda *given: made.append(given))
    monkeypatch.setattr(route_cache, "find_layer", lambda _: SimpleNamespace(known={}, forward=None))
    monkeypatch.setattr(call_entries, "only_on", lambda *_: None)
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)
    given, flags = (x, w, None, None), lower_call.Flags("ieee", False)
    call_entries.note_layer(
        (None, None),
        None,
        given,
        given,
        (1, padding, 0, 1, 1),
        None,
        None,
        flags,  # type: ignore[arg-type]
        True,
        None,
    )
    assert bool(made) is isinstance(padding, tuple)
