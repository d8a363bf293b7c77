"""New sizes of known layers: the same routes as the general way makes, for a fraction of its work."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import transconv
from bench.faked_launches import Launched, as_on_gpu
from transconv.calls import route_cache, settings, size_policy
from transconv.conv import compiler
from transconv.cost import AtSizes
from transconv.ir import value_at
from transconv.runtime import Registry
from transconv.runtime.compilation import async_compile
from transconv.torch_ops import functional
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import layer_keys, select_impl
from transconv.torch_ops.calls.call_entries import CALLS
from transconv.torch_ops.calls.route import BackwardRoutes

NUMBERS = Params((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Tensors of the CPU are taken for a GPU's, on which all kernels are loaded; launches are recorded."""
    monkeypatch.setattr(compiler, "EXAMPLES", {2: compiler.EXAMPLES[2][:2]})
    with as_on_gpu() as found:
        yield found


def image(n: int, c: int, h: int, w: int) -> torch.Tensor:
    return torch.empty(n, c, h, w, dtype=torch.bfloat16, memory_format=torch.channels_last)


def weight() -> torch.Tensor:
    return image(32, 32, 3, 3)


def called(n: int, h: int, width: int, w: torch.Tensor) -> list[Any]:
    """The three directions at a size; the routes that were made for it."""
    before = made()
    x, y = image(n, 32, h, width), image(n, 32, h, width)
    transconv.conv2d(x, w, padding=1)
    for mask in ((True, False, False), (True, True, False)):
        select_impl.backward(NUMBERS, y, x, w, mask, "now")
    return [r for item in made() if item not in before for r in item.routes()]


def made() -> list[Any]:
    """What the general way made, and what layers made of it."""
    return [
        *route_cache.routes.values(),
        *(
            r
            for layer in route_cache._layers.values()
            for r in layer.known.values()
            if isinstance(r, BackwardRoutes)
        ),
    ]


def told(found: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (
            r.direction,
            r.params,
            r.shape,
            r.strides,
            r.channels_last,
            r.near,
            r.far,
            r.types,
            r.registry,
            r.compiled.schedule,
            r.reason,
            r.over,
            r.adds_bias,
            r.copies,
            r.aligned,
            r.device,
        )
        for r in found
    ]


def numbers(found: Launched) -> Launched:
    """What was launched without addresses, which differ."""
    return [tuple(x for x in given if not isinstance(x, int) or x < 2**20) for given in found]


@pytest.mark.slow
def test_the_routes_are_those_of_the_general_way(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CALLS, "due", lambda *_: 0)  # entries keep their routes for themselves
    rng, w = random.Random(1), weight()
    sizes = [(8, 56, 56), (1, 14, 14), (1, 1, 1), (1, 1, 40), (16, 3, 2)]
    sizes += [(rng.randint(1, 16), rng.randint(1, 90), rng.randint(1, 90)) for _ in range(8)]
    plain = []
    with monkeypatch.context() as m:
        m.setattr(route_cache, "keep_layer", lambda *_: None)
        for size in sizes:
            plain.append((told(called(*size, w)), numbers(launched)))
            launched.clear()
    assert len({schedule for routes_, _ in plain for *_, schedule in [r[:10] for r in routes_]}) > 3
    kept = [r.registry for r in next(iter(route_cache.routes.values())).routes()]
    route_cache.forget(registries=False)
    for at, size in enumerate(sizes):
        if at > 1:  # both plans have run by then
            monkeypatch.setattr(select_impl, "make_forward", lambda *_: pytest.fail("decided anew"))
            monkeypatch.setattr(select_impl, "make_backward", lambda *_: pytest.fail("decided anew"))
        assert (told(called(*size, w)), numbers(launched)) == plain[at], size
        launched.clear()
    (one,) = kept
    for size in sizes:  # the compiled functions are the expressions
        at = dict(zip(("MB", "IH", "IW"), size, strict=True))
        for us, k in one.estimates(size):
            assert all(value_at(c, at) for c in k.sizes.requirements)
            each = [
                AtSizes(s.schedule, c, k.plan.target)
                for s, c in zip(k.plan.steps, k.plan.workload.computations, strict=True)
            ]
            assert us == sum(e.us(*(value_at(c, at) for c in e.counts)) for e in each)


def test_a_first_call_does_little(launched: Launched) -> None:
    """No pass, no proof, no text, no computation: what a new size calls, by function and by module. Its
    code is not in the processor's caches, so that each function more is a wait for memory."""
    w = weight()
    for size in ((8, 56, 56), (1, 14, 14), (3, 20, 30), (3, 21, 30)):
        called(*size, w)
    x, y = image(4, 32, 50, 60), image(4, 32, 50, 60)
    wanted = (True, False, False)
    for call, most in (
        (lambda: transconv.conv2d(x, w, padding=1), 19),
        (lambda: select_impl.backward(NUMBERS, y, x, w, wanted, "now"), 23),
    ):
        seen: list[str] = []

        def profile(frame: FrameType, event: str, _: Any, seen: list[str] = seen) -> None:
            if event == "call":
                seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
        rooms = {name.split("/transconv/")[1].split("/")[0] for name in seen if "/transconv/" in name}
        assert rooms <= {"torch_ops", "runtime", "backend_triton", "calls"}, rooms  # calls: settings
        ours = [name for name in seen if "/transconv/" in name or name.startswith("<string>")]
        assert 10 < len(ours) <= most, (len(ours), ours)


def test_wrong_calls_of_a_known_layer_are_torchs_errors(launched: Launched) -> None:
    w = weight()
    for size in ((8, 56, 56), (1, 14, 14), (3, 20, 30)):
        called(*size, w)
    for x, said in (
        (image(1, 16, 9, 9), "to have 32 channels, but got 16"),
        (image(1, 32, 9, 9).float(), "Input type"),
    ):
        with pytest.raises(RuntimeError, match=said):
            transconv.conv2d(x, w, padding=1)
    with pytest.raises(RuntimeError, match="Expected grad_output of size"):
        select_impl.backward(
            NUMBERS, image(1, 32, 9, 8), image(1, 32, 9, 9), w, (True, False, False), "now"
        )
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        transconv.conv2d(image(1, 32, 2, 2), w)
    launched.clear()
    gaps = image(2, 32, 9, 18)[..., ::2]
    layer = next(one for one in route_cache._layers.values() if one.data and one.data.names[-1] == "dst")
    assert layer.forward(gaps, w) is None and layer.forward(image(2, 32, 9, 9), w) is not None
    flat = torch.empty(2 * 32 * 5, dtype=torch.bfloat16)
    for strides in ((160, 1, 32, 32), (160, 1, 7, 32), (160, 1, 160, 32)):  # of a row nothing is told
        assert layer.forward(flat.as_strided((2, 32, 1, 5), strides), w) is not None
    for strides in ((160, 5, 5, 1), (160, 1, 32, 40)):
        assert layer.forward(flat.as_strided((1, 32, 1, 3), strides), w) is None


def test_one_entry_serves_all_sizes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarded by all but the input's sizes and strides; anything else goes the general way."""
    w = weight()
    for size in ((8, 56, 56), (1, 14, 14), (3, 20, 30), (3, 21, 30)):
        called(*size, w)
    learning = weight().requires_grad_()
    for side in (70, 71, 72):
        transconv.conv2d(image(2, 32, side, 71), learning, padding=1)
    transconv.stats(reset=True)
    launched.clear()
    reached: list[Any] = []
    monkeypatch.setattr(functional.CONV2D, "general", lambda f, x, *_: reached.append(x) or x)
    for n, h, width in ((2, 9, 8), (1, 1, 1), (2, 9, 8), (5, 60, 61)):
        y = transconv.conv2d(image(n, 32, h, width), w, padding=1)
        assert y.shape == (n, 32, h, width) and y.is_contiguous(memory_format=torch.channels_last)
        assert launched.pop()[-3:] == (n, h, width) and not reached
    assert transconv.stats(reset=True).native == {"fwd any size": 4}
    made = transconv.conv2d(image(2, 32, 9, 5), learning, padding=1)
    (grad,) = torch.autograd.grad(made, learning, image(2, 32, 9, 5))
    assert grad.shape == w.shape and not reached
    with torch.no_grad():
        assert not transconv.conv2d(image(2, 32, 9, 6), learning, padding=1).requires_grad and not reached
    x, flat = image(2, 32, 9, 8), torch.empty(2 * 32 * 9 * 8 + 1, dtype=torch.bfloat16)
    odd = flat[1:].as_strided(x.shape, x.stride())
    others: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (x.contiguous(), {}),
        (image(2, 32, 9, 16)[..., ::2], {}),
        (odd, {}),
        (x.half(), {}),
        (x[0], {}),
        (image(2, 16, 9, 8), {}),
        (x, {"stride": 2}),
        (image(0, 32, 9, 8), {}),
        (x, {"bias": torch.zeros(32, dtype=torch.bfloat16)}),
        (image(2, 32, 9, 8).requires_grad_(), {}),
    ]
    for given, numbers in others:
        reached.clear()
        transconv.conv2d(given, w, **({"padding": 1} | numbers))
        assert len(reached) == 1, (given.shape, numbers)
    reached.clear()
    torch.use_deterministic_algorithms(True)
    try:
        transconv.conv2d(x, w, padding=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(reached) == 1
    assert CALLS.find(id(w)) is not None
    transconv.config.fallback = "silent"  # a setting that changes drops what was decided
    assert CALLS.find(id(w)) is None


def test_entries_serve_all_sizes_under_autocast(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training: both passes of new sizes find their routes behind one guard each."""
    learning = weight().float().requires_grad_()

    def step(h: int, cast: torch.dtype = torch.bfloat16) -> torch.Tensor:
        x = image(2, 32, h, 40).float().requires_grad_()
        with torch.autocast("cpu", cast):
            y = transconv.conv2d(x, learning, padding=1)
        before = len(launched)
        y.backward(torch.empty_like(y))
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype is torch.float32
        assert len(launched) >= before + 2
        return y

    for h in (56, 14, 20, 21, 22, 23):
        step(h)
    reached: list[str] = []

    def noted(home: Any, name: str) -> None:
        real = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *given: reached.append(name) or real(*given))

    noted(functional.CONV2D, "general")
    noted(select_impl, "backward_routes")
    for h in (30, 31, 30):
        launched.clear()
        y = step(h)
        assert y.dtype is torch.bfloat16 and y.shape == (2, 32, h, 40) and not reached
        assert launched[0][-3:] == (2, h, 40)
    with torch.no_grad():
        assert not step_without_gradient(learning).requires_grad and not reached
    transconv.config.fallback = "silent"  # drops the entries
    step(32)
    assert reached == ["backward_routes"]


def step_without_gradient(learning: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return transconv.conv2d(image(2, 32, 33, 40).float().requires_grad_(), learning, padding=1)


@pytest.mark.parametrize("biased", [False, True])
def test_more_sizes_than_entries_have_one_entry(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, biased: bool
) -> None:
    """Kernels of their own at many sizes: calls find them without the general way, each its own."""
    transconv.config.sizes = "exact"
    conv = torch.nn.Conv2d(4, 4, 3, padding=1, bias=biased)
    transconv.convert_(conv)
    sizes = [(1, 4, h, w) for h in (3, 5) for w in (4, 7, 9)]
    asked = list[Any]()
    key = layer_keys.forward_key
    monkeypatch.setattr(layer_keys, "forward_key", lambda *given: asked.append(given) or key(*given))
    for turn in range(12):
        asked.clear()
        for size in sizes:
            launched.clear()
            x = torch.empty(size, requires_grad=True)
            with torch.set_grad_enabled(turn % 2 == 0):
                y = conv(x)
            assert (y.shape, y.requires_grad) == (torch.Size(size), turn % 2 == 0)
            (address,) = {given.index(y.data_ptr()) for given in launched}  # the launch stores to it
            assert address and len(launched) == 1
    assert not asked
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(torch.empty(sizes[0])).dtype is torch.bfloat16
    assert asked  # another kind of call


def test_calls_whose_kernels_may_change_have_one_entry(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a layer's further kernels are compiled, sizes that are known go no general way; each call sees
    when one has come."""
    come = False
    look, settled = Registry._look, Registry.is_settled
    monkeypatch.setattr(async_compile, "compiles", lambda target: False)
    monkeypatch.setattr(settings.Settings, "mode", property(lambda self: "background"))
    monkeypatch.setattr(Registry, "is_settled", lambda self: come and settled(self))

    def looked(self: Any, mode: str, sizes: Any = ()) -> tuple[str, list[Any]]:
        return (look(self, mode, sizes)[0], []) if come else (look(self, mode, sizes)[0], [lambda: come])

    monkeypatch.setattr(Registry, "_look", looked)
    monkeypatch.setattr(size_policy.SizeChoices, "prepared", property(lambda self: False, lambda *_: None))
    transconv.config.sizes, transconv.config.compile = "auto", "background"
    asked = list[str]()
    for home, name in ((layer_keys, "forward_key"), (select_impl, "backward_routes")):
        once = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, once=once, name=name: asked.append(name) or once(*a))
    conv = torch.nn.Conv2d(32, 32, 3, padding=1, bias=False, dtype=torch.bfloat16)
    transconv.convert_(conv.to(memory_format=torch.channels_last))
    sizes = [(2, 5, 6), (1, 5, 7), (3, 6, 9), (2, 8, 8), (1, 4, 4)]

    def turn() -> set[str]:
        asked.clear()
        for n, h, w in sizes:
            launched.clear()
            x = image(n, 32, h, w).requires_grad_()
            y = conv(x)
            y.backward(torch.empty_like(y))
            assert x.grad is not None and x.grad.shape == x.shape and y.shape == x.shape
            assert all(given[-3:] == (n, h, w) for given in launched if (n, h, w) != sizes[0])
            assert len(launched) >= 3
        return set(asked)

    assert turn() == {"forward_key", "backward_routes"}
    for _ in range(6):
        turn()
    assert not turn()
    come = True
    assert turn() == {"forward_key", "backward_routes"}, "decided anew"
    for _ in range(6):
        turn()
    assert not turn()
