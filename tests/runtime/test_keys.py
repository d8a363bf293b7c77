"""Requests for different kernels or choices have different keys; `make mutants` leaves out parts of
keys and runs these tests."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transconv import runtime
from transconv.calls import guard, route_cache
from transconv.compute import parse
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.conv.relation import marked
from transconv.ir import f16, f32
from transconv.runtime import check_records, plan_cache, steps
from transconv.runtime import compiler as planning
from transconv.schedule import Schedule, Scheduled
from transconv.selection import candidates
from transconv.selection.tuning_db import TuningRecord
from transconv.support import Drawer, records
from transconv.target import TARGETS
from transconv.torch_ops.calls import call_entries, layer_keys, lower_call, select_impl
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.fused import fused_route

Tensor = torch.Tensor
SM90 = TARGETS["sm_90"]
FWD = ConvWorkload(ConvProblem.parse("mb2ic8ih5oc8oh5kh3ph1 dt=f16"), Prop.FWD, Epilogue.parse("bias"))
WIDE = ConvProblem.parse("mb2ic8ih5oc8oh5kh3ph1 dt=f32")
NUMBERS = ("conv2d", 2, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)


# -- calls of torch ---------------------------------------------------------------------------------


def _larger(t: Tensor) -> Tensor:
    """Of the same strides."""
    return torch.empty(4096, dtype=t.dtype).as_strided((t.shape[0] + 1, *t.shape[1:]), t.stride())


def _strided(t: Tensor) -> Tensor:
    return torch.empty(4096, dtype=t.dtype).as_strided(t.shape, [2 * s for s in t.stride()])


def _shifted(t: Tensor) -> Tensor:
    return torch.empty(4096, dtype=t.dtype)[1:].as_strided(t.shape, t.stride())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "size": _larger,
    "strides": _strided,
    "type": lambda t: t.half(),
    "place": _shifted,
    "device": lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
}


class Asked(dict[Hashable, Any]):
    """Routes that are all known: what is asked for is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: list[Hashable] = []

    def get(self, key: Hashable, default: Any = None) -> Any:
        self.keys_asked.append(key)
        return object()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    known = Asked()
    monkeypatch.setattr(route_cache, "routes", known)
    return known.keys_asked


def _forward(x: Tensor, w: Tensor, b: Tensor | None = None) -> None:
    key, _flags, _aligned = layer_keys.forward_key(REQUEST, x, w, b)
    route_cache.find(key)


def _backward(grad: Tensor, x: Tensor, w: Tensor) -> None:
    _found, *_ = select_impl.backward_routes(PARAMS, grad, x, w, (True, True, False), "now")


def _fused(x: Tensor, w: Tensor, b: Tensor, res: Tensor) -> None:
    fused_route.find(REQUEST, (x, w, b, res), "relu", "now")


REQUEST: Any = request(*NUMBERS)
PARAMS: Any = (1, 2)
CALLS = {
    "forward": (_forward, 2),
    "biased": (_forward, 3),
    "backward": (_backward, 3),
    "fused": (_fused, 4),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", CALLS)
def test_tensors(name: str, what: str, asked: list[Hashable]) -> None:
    call, count = CALLS[name]
    # Of f64 and of f16 torch's switches say the same.
    given, like = ([torch.empty(2, 3, 4, 4, dtype=torch.float64) for _ in range(count)] for _ in "ab")
    call(*given)
    call(*like)
    for n, t in enumerate(given):
        call(*given[:n], CHANGES[what](t), *given[n + 1 :])
    same, again, *others = asked
    assert same == again and same not in others and len(others) == count


@pytest.mark.parametrize("name", CALLS)
def test_switches(name: str, asked: list[Hashable], monkeypatch: pytest.MonkeyPatch) -> None:
    call, count = CALLS[name]
    given = [torch.empty(2, 3, 4, 4) for _ in range(count)]
    for math, deterministic in (("ieee", False), ("tf32", False), ("ieee", True)):
        flags = lower_call.Flags(math, deterministic)
        with monkeypatch.context() as patch:
            patch.setattr(lower_call, "flags", lambda dtype, flags=flags: flags)
            call(*given)
    assert len(set(asked)) == 3


def test_numbers_and_what_is_wanted(asked: list[Hashable]) -> None:
    x, w = torch.empty(2, 3, 4, 4), torch.empty(2, 3, 4, 4)
    other: Any = request(*NUMBERS[:-1], 2)
    for req in (REQUEST, other):
        route_cache.find(layer_keys.forward_key(req, x, w, None)[0])
        route_cache.find(layer_keys.forward_key(req, x, w, w)[0])
        for activation in ("", "relu"):
            fused_route.find(req, (x, w, None, None), activation, "now")
        fused_route.find(req, (x, w, x, None), "", "now")
        fused_route.find(req, (x, w, None, x), "", "now")
    for mask in ((True, True, False), (True, False, False), (False, True, False), (True, True, True)):
        select_impl.backward_routes(PARAMS, x, x, w, mask, "now")
    other = (2, 2)
    select_impl.backward_routes(other, x, x, w, (True, True, False), "now")
    assert len(set(asked)) == len(asked) == 17


@pytest.mark.parametrize("at", range(len(NUMBERS)))
def test_requests(at: int) -> None:
    other = ("conv3d", 3, (2, 1), (1, 0), (1, 2), True, (0, 1), 2)[at]
    changed: Any = (*NUMBERS[:at], other, *NUMBERS[at + 1 :])
    assert request(*NUMBERS) is request(*NUMBERS) is not request(*changed)


# -- entries of repeated calls ----------------------------------------------------------------------


def _entered(monkeypatch: pytest.MonkeyPatch, aligned: bool, now: dict[str, Any]) -> Callable[..., Any]:
    """An entry of two tensors, of which the first one's address does not count. ``now``: what is asked for
    at every call: it may change."""
    for name in ("modes", "function_modes", "grad_enabled", "_deterministic", "_cudnn_deterministic"):
        monkeypatch.setattr(guard, name, lambda name=name: now[name])
    monkeypatch.setattr(guard, "current_device", lambda: now["current_device"])
    conditions = (
        *(
            guard.Condition(c.text, {n: getattr(guard, n) for n in c.known})
            for c in (guard.NO_MODES, guard.NO_FUNCTION_MODES, guard.NO_GRADIENTS)
        ),
        guard.deterministic(True, cudnn=True),
    )
    found = guard.CallGuard(lambda x, w: now["check"], conditions, aligned, 1)
    return guard.written(
        "call(x, w)", [found.tests(["x", "w"], ["w"]), "return True"], "return False", found.known()
    )


@pytest.mark.parametrize("aligned", [True, False])
def test_entries(aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = {
        "modes": 0,
        "function_modes": False,
        "grad_enabled": False,
        "current_device": 1,
        "_deterministic": False,
        "_cudnn_deterministic": True,
        "check": True,
    }
    other = {
        "modes": 1,
        "function_modes": True,
        "grad_enabled": True,
        "_cudnn_deterministic": False,
        "current_device": 0,
        "check": False,
    }
    call = _entered(monkeypatch, aligned, now)
    even, odd = torch.empty(64), torch.empty(64)[1:]
    right, wrong = (even, odd) if aligned else (odd, even)
    assert call(even, right) and call(odd, right) and not call(even, wrong)
    for name, value in other.items():
        now[name], before = value, now[name]
        assert not call(even, right), name
        now[name] = before
    now |= {"_deterministic": True, "_cudnn_deterministic": False}  # either says so
    assert call(even, right)
    of_none = guard.CallGuard(lambda: True, (guard.deterministic(False, cudnn=False),), True, None)
    call = guard.written("call()", [of_none.tests([]), "return True"], "return False", of_none.known())
    assert not call()
    now["_deterministic"] = False
    assert call()


def test_entries_ask_for_the_switches_that_kernels_obey() -> None:
    """All of them where torch computes."""

    def asked(obeyed: frozenset[str] | None, dtype: torch.dtype = torch.float32) -> set[str]:
        route: Any = SimpleNamespace(compiled=None if obeyed is None else SimpleNamespace(obeys=obeyed))
        flags = lower_call.Flags("ieee", True)
        return {n for c in call_entries.switches(flags, dtype, route) for n in c.known}

    bits, precision = {"_deterministic", "_cudnn_deterministic"}, {"precision"}
    assert asked(None) == bits | precision and asked(None, torch.float16) == bits
    assert asked(frozenset()) == set() and asked(frozenset({"deterministic"})) == bits
    assert asked(frozenset({"precision"})) == precision
    assert {
        n for c in call_entries.switches(lower_call.Flags("ieee", True), torch.float32) for n in c.known
    } == bits | precision
    told = [
        call_entries.switches(lower_call.Flags(math, det), torch.float32)
        for math in ("ieee", "tf32")
        for det in (False, True)
    ]
    assert len({tuple(c.text for c in one) for one in told}) == 4


# -- plans, kernels, verdicts -----------------------------------------------------------------------


@dataclass
class Kind:
    """A plan that is never run; its sums differ from run to run."""

    deterministic: bool = False
    steps = (SimpleNamespace(schedule=SimpleNamespace(varies=True)),)


class Other(Kind):
    pass


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(planning, "_plans", {})
    monkeypatch.setattr(planning.plan_cache, "find", lambda *given: None)
    monkeypatch.setattr(planning.plan_cache, "keep", lambda plan: None)
    monkeypatch.setattr(planning, "build", lambda *given: made.append(given) or Kind())
    base = {"workload": FWD, "target": SM90, "schedule": None, "deterministic": False, "kind": Kind}
    changes = [
        {},
        {"workload": replace(FWD, prop=Prop.BWD_D)},
        {"target": TARGETS["sm_80"]},
        {"workload": replace(FWD, epilogue=Epilogue.parse("bias+relu"))},
        {"workload": replace(FWD, epilogue=Epilogue.parse("bias", f32))},
        {"workload": replace(FWD, epilogue=Epilogue.parse("bias", f16))},
        {"workload": replace(FWD, problem=WIDE)},
        {"workload": replace(FWD, problem=replace(WIDE, math="ieee"))},
        {"target": replace(SM90, features=SM90.features - {"box"})},
        {"schedule": Schedule.parse("mb:4 | fma")},
        {"kind": Other},
        {"deterministic": True},
    ]
    for _ in range(2):
        for change in changes:
            runtime.plan(**{**base, **change})  # type: ignore[arg-type]
    assert len(made) == len(changes)


def test_the_same_kernels_do_for_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose sums never vary is not made again where the same bits are asked for."""
    made = Kind()
    made.steps = ()
    monkeypatch.setattr(planning, "_plans", {})
    monkeypatch.setattr(planning.plan_cache, "find", lambda *given: None)
    monkeypatch.setattr(planning.plan_cache, "keep", lambda plan: None)
    monkeypatch.setattr(planning, "build", lambda *given: made)
    assert runtime.plan(FWD, SM90, None, False, Kind) is made  # type: ignore[type-var]
    monkeypatch.setattr(planning, "build", None)
    monkeypatch.setattr(Kind, "steps", ())
    assert runtime.plan(FWD, SM90, None, True, Kind).deterministic  # type: ignore[type-var]


def test_kernels_and_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, schedule = FWD.computations[0], Schedule.parse("mb.oh.ow:32 oc:16 ic:16 | mma")
    behind = replace(FWD, epilogue=Epilogue.parse("bias+relu")).computations[0]
    larger = replace(FWD, problem=FWD.problem.with_layout("nhwc"))
    given = [
        (FWD, compute, schedule, SM90),
        (larger, compute, schedule, SM90),
        (FWD, behind, schedule, SM90),
        (FWD, compute, replace(schedule, group_m=2), SM90),
        (FWD, compute, schedule, TARGETS["sm_80"]),
        (FWD, replace(compute, name="fwd_1"), schedule, SM90),
    ]
    assert len({steps.kernel_name(*words) for words in given}) == len(given)
    with monkeypatch.context() as patch:
        patch.setattr(type(FWD), "shape_text", "ic\u00b2-8_x")
        assert "_ic8_x_" in steps.kernel_name(FWD, compute, schedule, SM90)
    digests = {check_records.digest(source, machine) for source in "ab" for machine in "cd"}
    monkeypatch.setattr(check_records, "triton_version", lambda: "another")
    digests.add(check_records.digest("a", "c"))
    monkeypatch.setattr(check_records, "SCHEMA", check_records.SCHEMA + 1)
    digests |= {check_records.digest("a", "c"), *(check_records.variant(key, False) for key in "ab")}
    assert len(digests) == 8


def test_kernels_that_workloads_share() -> None:
    """A copy is that of its tensor, and what adds up parts does not know the example of sizes: both have
    one name in each workload, and what computes something else has another."""
    schedule = Schedule.parse("mb.oh.ow:32 oc:16 ic:16 | mma | pack=b")
    copy = Scheduled(FWD.computations[0], schedule, SM90).copies[0]
    less = replace(FWD, problem=ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=f16"))
    assert len({steps.kernel_name(w, copy, schedule, SM90) for w in (FWD, less)}) == 1
    texts = [marked(f"mb{n}?ic8ih5oc8oh5kh3ph1 dt=f16") for n in (2, 3)]
    sized = [ConvWorkload(ConvProblem.parse(text), Prop.FWD, Epilogue(), names) for text, names in texts]
    added = [parse(f"compute sum\n axes n=4\n read x = P[n]\n store Y[n] = x*{by}") for by in (2, 3)]
    names = [{steps.kernel_name(w, c, Schedule.parse("n:4 | fma"), SM90) for c in added} for w in sized]
    assert names[0] == names[1] and len(names[0]) == 2


# -- what is kept on disk ---------------------------------------------------------------------------


ROW = TuningRecord("a problem", "fwd", "", "sm_90x132", "n:64 | fma", 1.0, 1, 1, "3.6.0")


def test_shortlists(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = FWD.computations[0]
    given = [
        (8, compute, SM90, FWD),
        (7, compute, SM90, FWD),
        (8, replace(compute, math="ieee"), SM90, FWD),
        (8, compute, SM90, replace(FWD, prop=Prop.BWD_D)),
        (8, compute, SM90, replace(FWD, problem=FWD.problem.with_layout("nhwc"))),
        *(
            (8, compute, other, FWD)
            for other in (replace(SM90, sms=SM90.sms + 1), replace(SM90, features=SM90.features - {"box"}))
        ),
    ]
    keys = [candidates._key(*words) for words in given]
    twin = FWD.innermost()
    assert twin is not None and twin.group("sm_90x132") != FWD.group("sm_90x132")
    for name, value in (("__version__", "another"), ("files_digest", lambda: "other files")):
        with monkeypatch.context() as patch:
            patch.setattr(candidates, name, value)
            keys.append(candidates._key(*given[0]))
    rows_of = candidates.tuning_db.rows_of
    for group in (FWD.group("sm_90x132"), twin.group("sm_90x132")):
        with monkeypatch.context() as patch:
            patch.setattr(
                candidates.tuning_db,
                "rows_of",
                lambda name, group=group: [ROW] if name == group else rows_of(name),
            )
            keys.append(candidates._key(*given[0]))
    assert keys.pop(3) == keys[0]  # neither workload has tuned rows, and the computation is one
    assert len(set(keys)) == len(keys) == 10
    features = frozenset(f"feature{n}" for n in range(40))
    backwards = frozenset(sorted(features, reverse=True))
    told = [candidates.told_by(replace(SM90, features=f)) for f in (features, backwards)]
    assert told[0] == told[1]


class Differing:
    """A workload of which some properties differ."""

    def __init__(self, workload: ConvWorkload, **changed: object) -> None:
        self.workload, self.changed = workload, changed

    def __getattr__(self, name: str) -> object:
        return self.changed[name] if name in self.changed else getattr(self.workload, name)


def test_shortlists_where_rows_were_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are chosen by what the computation is called, what stands behind it and which axes it lacks."""
    compute = FWD.computations[0]
    given: list[tuple[Any, Any]] = [
        (compute, FWD),
        (replace(compute, name="fwd_1"), FWD),
        (compute, Differing(FWD, kind="residual")),
        (compute, Differing(FWD, lacks=frozenset({"ow"}))),
    ]

    def keys() -> set[str]:
        return {candidates._key(8, c, SM90, w) for c, w in given}

    assert len(keys()) == 1, "there are none"
    monkeypatch.setattr(candidates.tuning_db, "rows_of", lambda name: [ROW])
    assert len(keys()) == 4


def test_plans_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on the user's tuned rows of both groups, and on whether any rows count."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    twin = FWD.innermost()
    assert twin is not None
    keys = [plan_cache.key(FWD, SM90, False), plan_cache.key(FWD, SM90, True)]
    users_rows = candidates.tuning_db.users_rows
    for group in (FWD.group("sm_90x132"), twin.group("sm_90x132")):
        with monkeypatch.context() as patch:
            patch.setattr(
                candidates.tuning_db,
                "users_rows",
                lambda name, group=group: [ROW] if name == group else users_rows(name),
            )
            keys.append(plan_cache.key(FWD, SM90, False))
    for name, value in (("triton_version", lambda: "0.0"), ("files_digest", lambda: "other files")):
        with monkeypatch.context() as patch:
            patch.setattr(candidates, name, value)
            keys.append(plan_cache.key(FWD, SM90, False))
    monkeypatch.setenv("TRANSCONV_TUNED", "0")
    keys.append(plan_cache.key(FWD, SM90, False))
    assert all(keys) and len(set(keys)) == 7


def test_records(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    drawers = [Drawer("one", 1), Drawer("one", 2), Drawer("two", 1)]
    assert len({d.path(key) for d in drawers for key in "ab"}) == 6
    with pytest.raises(ValueError, match="'a b' cannot name a record of one-1"):
        drawers[0].path("a b")
    sealed = Drawer("one", 1, sealed=True)
    assert sealed.path("a") == drawers[0].path("a")
    with monkeypatch.context() as patch:
        patch.setattr(records, "user_key", lambda: None)
        assert sealed.path("a") is None and drawers[0].path("a") is not None
    with monkeypatch.context() as patch:
        patch.setattr(records, "folder", lambda *inside: None)
        assert drawers[0].path("a") is None
    sums = {records._checksum(c) for c in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 2})}
    assert len(sums) == 4 and records._checksum({"a": 1, "b": 2}) == records._checksum({"b": 2, "a": 1})
