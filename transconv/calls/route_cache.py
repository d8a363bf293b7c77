"""Routes and their cache: who computes calls of one kind, kernels or torch and why, found by what such
calls have in common.

A key holds all that the answer depends on: shapes, strides, types, devices, numbers, alignment, torch's
switches. Its value is a route, or the routes of several results, made once by checks, the compiler and the
policy, and run with nothing more to decide. Calls that come back are found faster still (guard.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from transconv.calls import guard, size_policy, stats
from transconv.calls.settings import settings
from transconv.runtime import COMPILING, Waiting, expect
from transconv.support import Unsupported

LIMIT = 4096  # routes kept; beyond it the oldest quarter goes
PASSING = ("capture:cold", COMPILING)  # temporary reasons: the next call is decided anew


class Route:
    """Who computes calls of one kind: kernels, or torch for a ``reason``. ``over``: torch, or kernels that
    are not meant for it, compute until this says that others may be there; ``aligned``: all tensors begin
    at multiples of 16 bytes; ``device``: the one that kernels are bound to. A plain ``calls += 1`` on it
    holds no call, so threads of one interpreter lose no count."""

    __slots__ = ("aligned", "calls", "device", "functions", "over", "reason")

    def __init__(self, reason: str = "") -> None:
        self.reason, self.calls, self.aligned, self.device = reason, 0, False, -1
        self.over: Callable[[], bool] | None = None
        self.functions: dict[Any, Callable[..., Any]] = {}  # what runs it without look-ups

    @property
    def name(self) -> str:
        """What its kernels compute."""
        raise NotImplementedError

    @property
    def any_size(self) -> bool:
        """Whether sizes are arguments of all its kernels."""
        raise NotImplementedError

    @property
    def does(self) -> str:
        """The name that its calls are counted under: what kernels compute, or the reason for torch."""
        return self.reason or self.name + " any size" * self.any_size

    def routes(self) -> Sequence[Route]:
        """Those that are kept under one key: itself."""
        return (self,)

    def count(self) -> None:
        """Move the calls so far into the totals."""
        calls, self.calls = self.calls, 0
        if calls:
            stats.add(not self.reason, self.does, calls)

    def settle(self, why: Sequence[str], message: str = "", what: str = "convolution") -> None:
        """Send calls to torch, as far as the policy allows. ``what``: the operation."""
        self.reason, self.over = why[0], None
        for reason in why:
            stats.announce(reason, message, what)

    def refuse(self, error: Unsupported, what: str = "convolution") -> None:
        """Send calls to torch, because there is no kernel, or none yet."""
        self.settle([error.reason], error.message, what)
        self.over = error.over if isinstance(error, Waiting) else None


routes: dict[Hashable, Any] = {}
# Those whose kernels are not there yet, each with what says that they may be.
_waiting: dict[Hashable, tuple[Any, tuple[Callable[[], bool], ...]]] = {}
_layers: dict[Hashable, Any] = {}  # what routes of further sizes are made from, which count their calls
find_layer = _layers.get


def find(key: Hashable) -> Any:
    """The route under a key, or None."""
    found = routes.get(key)
    return waiting(key) if found is None and _waiting else found


def waiting(key: Hashable) -> Any:
    """The route under a key that waits for a kernel; None if there is none, or the wait is over."""
    found = _waiting.get(key)
    if found is None:
        return None
    if any([over() for over in found[1]]) or _is_on_time(found[0]):  # each of them may count its calls
        with stats.lock:
            gone = _waiting.pop(key, None)
        if gone is not None:
            _count([gone[0]])
        return None
    return found[0]


def _is_on_time(value: Any) -> bool:
    """Whether calls wait for kernels here, on another stream, where torch answered before."""
    return settings.compile == "auto" and any(r.reason for r in value.routes()) and settings.mode == "now"


def keep(key: Hashable, value: Any) -> Any:
    """Sets the entry of a key to ``value``, unless another came first."""
    each: Sequence[Route] = value.routes()
    waits = [r.over for r in each if r.over is not None]
    if any(r.over is None and r.reason in PASSING for r in each):
        for r in each:
            stats.add(not r.reason, r.does, 1)
        return value  # a kernel may be ready later
    dropped: list[Any] = []
    if waits:
        with stats.lock:
            if len(_waiting) >= LIMIT:
                dropped = [v for v, _ in _waiting.values()]
                _waiting.clear()
            _waiting[key] = value, tuple(waits)
        _count(dropped)
        return value
    with stats.lock:
        value = routes.setdefault(key, value)
        old = list(routes)[: LIMIT // 4] if len(routes) > LIMIT else []
        dropped = [routes.pop(k) for k in old]
    if dropped:
        guard.forget()
    _count(dropped)
    return value


def keep_layer(key: Hashable, layer: Any) -> None:
    """Keep what calls that differ in their sizes alone share; its ``routes`` count their calls."""
    if len(_layers) >= size_policy.LIMIT:
        forget(registries=False)
    with stats.lock:
        _layers[key] = layer


def _all() -> list[Any]:
    """What has routes."""
    return [*routes.values(), *(v for v, _ in _waiting.values()), *_layers.values()]


def _count(items: Sequence[Any]) -> None:
    for item in items:
        for route in item.routes():
            route.count()


def forget(registries: bool = True) -> None:
    """Drop every route; counts stay. Compiled kernels stay with the compiler. ``registries``: also the
    plans that calls of any size share."""
    if registries:
        size_policy.forget()
    with stats.lock:
        dropped = _all()
        routes.clear()
        _waiting.clear()
        _layers.clear()
    if dropped:
        guard.forget()
    _count(dropped)


def counted(reset: bool = False) -> stats.Stats:
    """Who computed how many results: see Stats."""
    with stats.lock:
        items = _all()
    _count(items)
    return stats.totals(reset)


def _expect() -> None:
    """The first call in the background is not to wait for what it can be told before."""
    if settings.mode == "background":
        expect()


settings.on_change(forget)
settings.on_change(_expect)
_expect()  # the environment may have said so
