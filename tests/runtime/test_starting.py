"""The function that starts all kernels of a plan: what each is started with, in which order, and when a
launch uses it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from transconv.backend_triton import KernelStart
from transconv.runtime import first_run_check
from transconv.runtime import launch as runtime_launch
from transconv.runtime.launch import Launch
from transconv.runtime.plans import StartWriter, StepStart


class Memory:
    def __init__(self, address: int, log: list[Any]) -> None:
        self.address, self.log = address, log

    def data_ptr(self) -> int:
        return self.address

    def zero_(self) -> None:
        self.log.append(("zero", self.address))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: f"on {device}", raising=False
    )


KERNEL = SimpleNamespace(function="f", packed_metadata="m")


def test_a_start_is_written_out() -> None:
    """A copy into memory of the call's own, a kernel with boxes that lie as sizes say, one whose boxes lie
    as they did when it was compiled, and one that Triton starts; what is added to is cleared before."""
    log: list[Any] = []

    def raw(name: str) -> Any:
        return lambda *given: log.append((name, given[0], given[3], given[13:]))

    def encoder(name: str) -> Any:
        return type(
            "E",
            (),
            {
                "calls": {},
                "__call__": lambda self, at, places: (log.append((name, at, places)), (*at, "map"))[1],
            },
        )()

    def begun(name: str, of: Any, sizes: int) -> KernelStart:
        return KernelStart(raw(name), KERNEL, False, of, sizes=sizes)

    def by_triton(name: str) -> Any:
        return SimpleNamespace(
            function="f",
            packed_metadata="m",
            run=lambda grid, y, z, stream, *given: log.append(
                (name, grid, stream, [getattr(t, "address", t) for t in given[5:]])
            ),
        )

    steps = [
        (begun("copy", None, 2), (0, 3), None),
        (begun("boxes", encoder("boxes"), 2), (3, 1), 2),
        (begun("fixed", encoder("fixed"), 0), (1, 2), None),
        (KernelStart(None, by_triton("sized"), sizes=2), (2, 3), 3),
        (KernelStart(None, by_triton("not sized")), (2,), None),
    ]
    writer = StartWriter(
        lambda n, m: ((n, ()), (m, ("at", n)), (5, ("lies",)), (6, ()), (7, ()), ((n * m,),)),
        4,
        3,
        2,
        ["f16"],
        lambda shape, strides, dtype: Memory(1000 + shape[0], log),
    )
    made = writer.starter([StepStart(*step) for step in steps])((8, 9))
    tensors = [Memory(at, log) for at in (2, 3, 7)]
    made(*tensors)
    assert log == [
        ("copy", 8, "on 4", (2, 1072, 8, 9)),
        ("zero", 7),
        ("boxes", (1072, 3, 8, 9), ("at", 8)),
        ("boxes", 9, "on 4", (1072, 3, 8, 9, "map")),
        ("fixed", (3, 7), ("lies",)),
        ("fixed", 5, "on 4", (3, 7, "map")),
        ("zero", 1072),
        ("sized", 6, "on 4", [7, 1072, 8, 9]),
        ("not sized", 7, "on 4", [7]),
    ]


def test_what_is_encoded_already_is_passed() -> None:
    log: list[Any] = []
    known = SimpleNamespace(calls={(2,): ("map",)})
    encoder: Any = known
    one = KernelStart(lambda *given: log.append(given[13:]), KERNEL, True, encoder)
    StartWriter(lambda: ((1, ()), ()), 0, 1).starter([StepStart(one, (0,))])(())(Memory(2, log))
    assert log == [("map",)]


# -- when it is used ----------------------------------------------------------------------------------


def launch(monkeypatch: pytest.MonkeyPatch, trusted: bool = True, **plan: Any) -> Launch:
    """A launch on device 3 of a stand-in for a plan, which is found right or not."""
    made = object.__new__(Launch)
    monkeypatch.setattr(first_run_check, "is_trusted", lambda plan, aligned: trusted)
    made.plan = cast(
        Any,
        SimpleNamespace(
            **{
                "steps": (SimpleNamespace(zero=None),),
                "required": None,
                "in_order": lambda sizes: sizes,
                "starter_at": lambda *given: lambda sizes: ("starter", given[3]),
                **plan,
            }
        ),
    )
    made.sizes, made.starts = None, {}
    made.aligned, made.names, made.device, made.current = True, (), 3, lambda: 3
    made.begin = lambda *tensors: None
    made.divided = cast(Any, SimpleNamespace(plan=made.plan, copied=()))
    return made


@pytest.mark.parametrize("current", [3, 4])
@pytest.mark.parametrize("verify", ["0", "1"])
@pytest.mark.parametrize("trusted", [False, True])
def test_kernels_that_take_sizes_start_unchecked_where_they_are_known_to_be_right(
    trusted: bool, verify: str, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSCONV_VERIFY", verify)
    made = launch(monkeypatch, trusted)
    made.begin, made.device = None, -1
    found = made._begun_before(torch.device("cuda", current))
    assert (found is not None) is (trusted and verify == "0" and current == 3)
    assert (made.begin, made.device) == ((found, 3) if found else (None, -1))


def test_a_launch_of_a_capture_is_judged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts kernels unseen that no launch could look at."""
    made, judged = launch(monkeypatch), list[Any]()
    made.begin, made.sizes, made.indexed, made.device = None, None, False, -1
    monkeypatch.setattr(Launch, "views", lambda self, tensors: {})
    monkeypatch.setattr(runtime_launch, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(first_run_check, "run", lambda plan, views, judge: judged.append(judge) or plan)
    judge: Any = object()
    for trusted in (False, False, True):
        monkeypatch.setattr(first_run_check, "is_trusted", lambda *_, trusted=trusted: trusted)
        made.start([SimpleNamespace(device=torch.device("cuda", 3))], judge)
        assert (made.begin is not None) is trusted and made.device == (3 if trusted else -1)
    assert judged == [judge] * 3


@pytest.mark.parametrize(("trusted", "steps"), [(True, 1), (True, 2), (False, 1)])
def test_one_kernel_that_is_right_is_known(
    trusted: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(monkeypatch, trusted, steps=(None,) * steps).is_known() is (trusted and steps == 1)


def test_workspaces_are_the_caller_s_where_a_starter_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = SimpleNamespace(zero=SimpleNamespace(name="parts"))

    def begun(**plan: Any) -> tuple[Any, Any]:
        made = launch(monkeypatch, spaces=lambda: ("parts of 4",), **plan)
        begin, spaces = made.begun()
        return "own" if begin is made.begin else begin, spaces

    taken = {"workspaces": {"parts": 4}}
    assert begun(**taken) == (("starter", True), ("parts of 4",))
    assert begun(**taken, starter_at=lambda *_: None) == ("own", ())
    assert begun(workspaces={}) == ("own", ())
    assert begun(**taken, steps=(zero,)) == ("own", ())
    without = launch(monkeypatch, **taken)
    without.divided = None
    assert without.begun() == (None, ())
