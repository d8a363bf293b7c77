"""Switches, counts, warnings, explanations, threads, and what an import costs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests import programs
from transconv.calls import route_cache
from transconv.errors import Unsupported
from transconv.runtime import compiler
from transconv.target import TARGETS
from transconv.torch_ops.calls import layer_keys, lower_call
from transconv.torch_ops.calls.call_attributes import request


def problem(n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 4, 6, 6), torch.randn(4, 4, 3, 3)


def test_silent_warn_and_error() -> None:
    x, w = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transconv.conv2d(x, w)
    transconv.config.fallback = "warn"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        transconv.conv2d(x, w)
        transconv.conv2d(x, w)
        transconv.conv2d(*problem(3))
    assert [s.category for s in seen] == [transconv.FallbackWarning]
    assert "device:cpu" in str(seen[0].message)
    transconv.config.fallback = "error"
    for _ in range(2):
        with pytest.raises(Unsupported) as error:
            transconv.conv2d(x, w)
    assert error.value.reason == "device:cpu"
    with pytest.raises(Unsupported):
        torch.func.vmap(lambda x: transconv.conv2d(x, w))(x[None])


def test_an_interpreter_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"
    with pytest.raises(Unsupported, match="interpreter is off; start the program with TRITON_INTERPRET=1"):
        transconv.conv2d(*problem())


def test_every_reason_is_announced() -> None:
    x, w = (t.to(torch.int32) for t in problem())
    transconv.config.fallback = "warn"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):  # torch may have no such kernel either
            transconv.conv2d(x, w)
    told = [str(s.message) for s in seen if s.category is transconv.FallbackWarning]
    assert [any(f"({reason})" in text for text in told) for reason in ("device:cpu", "dtype:int32")] == [
        True,
        True,
    ]


def test_errors_of_ours_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch computes, and the log has what went wrong and where."""

    def broken(device: Any) -> Any:
        raise ZeroDivisionError("a planted mistake")

    transconv.config.cpu = "interpret"
    monkeypatch.setattr(lower_call, "target_of", broken)
    x, w = problem()
    assert torch.equal(transconv.conv2d(x, w), F.conv2d(x, w))
    assert transconv.stats().fallback == {"error:ZeroDivisionError": 1}
    (told,) = [r for r in caplog.records if r.name == "transconv.dispatch"]
    assert told.levelname == "WARNING" and "a planted mistake" in told.message
    assert "ic4ih6oc4oh4kh3" in told.message and " fwd: " in told.message and told.exc_info


def test_unknown_words() -> None:
    with pytest.raises(ValueError, match="expected one of: silent, warn, error"):
        transconv.config.fallback = "loud"
    with pytest.raises(AttributeError, match="no switch 'colour'"):
        transconv.config.colour = "red"
    with pytest.raises(TypeError, match="cannot be replaced"):
        transconv.config = None  # type: ignore[assignment]
    assert transconv.config.fallback == "silent"


def test_the_module_of_kernel_configs_keeps_its_name() -> None:
    from transconv.schedule.schedule import Config, Schedule

    assert transconv.config.Config is Config is Schedule
    assert "fallback=" in repr(transconv.config)


def test_the_environment_gives_the_first_value() -> None:
    """One import registers what exported programs name, and a call of bytes needs no other import."""
    registered = (
        "import transconv.functional; print(transconv.config.fallback); import torch\n"
        "ops = torch.ops.transconv; ops.convolution, ops.quantized_convolution, ops.compute\n"
        "ops.fused_convolution, ops.traced_convolution, ops.fwd, ops.function"
    )
    called = (
        "import transconv, torch; print(transconv.config.fallback)\n"
        "transconv.config.cpu = 'interpret'; x = torch.ones(1, 1, 3, 3, dtype=torch.int8)\n"
        "assert transconv.conv2d(x, x).item() == 9"
    )
    for word, wanted, code in (("error", "error", registered), ("", "warn", called)):
        env = {"TRANSCONV_FALLBACK": word, "PYTHONPATH": ":".join(sys.path)}
        found = programs.run(["-c", code], env=env)
        assert found.stdout.strip() == wanted and not found.returncode, found.stderr


def test_importing_loads_no_torch() -> None:
    code = (
        "import sys, transconv; dir(transconv); transconv.__version__\n"
        "print([m for m in ('torch', 'triton', 'sympy', 'numpy') if m in sys.modules])\n"
        "transconv.ConvProblem; print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert found.stdout.split("\n")[:2] == ["[]", "False"], found.stderr


def test_every_public_name_is_there() -> None:
    for name in transconv.__all__:
        assert getattr(transconv, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'conv4d'"):
        transconv.conv4d  # noqa: B018
    from transconv.nn import Conv2d

    assert Conv2d is transconv.nn.Conv2d


def test_counts_by_reason_and_reset() -> None:
    x, w = problem()
    transconv.conv2d(x, w)
    transconv.conv2d(x.long(), w.long())
    transconv.conv2d(x.requires_grad_(), w).sum().backward()
    seen = transconv.stats(reset=True)
    assert seen.fallback == {"device:cpu": 4} and seen.native == {}
    assert seen.native_share == 0.0 and "4 results, 0.0% native" in str(seen)
    assert transconv.stats().total == 0


def test_only_wanted_gradients_are_computed() -> None:
    x, w = problem()
    transconv.conv2d(x, w.requires_grad_()).sum().backward()
    assert transconv.stats().total == 2


def test_explain_names_every_reason_and_does_nothing() -> None:
    x, w = problem()
    found = transconv.explain(x.long(), w.long(), padding="same")
    assert found.reasons == ("device:cpu", "dtype:int64")
    assert not found.native and len(found.parts) == 3
    assert "result (fwd): torch, because device:cpu; dtype:int64" in str(found)
    assert transconv.stats().total == 0
    transconv.config.fallback = "error"
    transconv.explain(x, w)
    with pytest.raises(RuntimeError, match="non-positive stride"):
        transconv.explain(x, w, stride=0)
    with pytest.raises(TypeError):
        transconv.explain(x, w, stride=1.5)
    with pytest.raises(RuntimeError, match="3, 4 or 5 dimensions"):
        transconv.explain(x, w[0, 0])


def test_explain_names_the_plan() -> None:
    transconv.config.cpu = "interpret"
    x, w = problem()
    found = transconv.explain(x, w, torch.randn(4), stride=2)
    assert found.native and found.reasons == ()
    assert [p.direction.value for p in found.parts] == ["fwd", "bwd_d", "bwd_w"]
    assert all("mb.oh.ow" in p.schedule or "|" in p.schedule for p in found.parts)
    transposed = transconv.explain(x, w, stride=2, transposed=True, output_padding=1)
    assert [p.direction.value for p in transposed.parts] == ["bwd_d", "fwd", "bwd_w"]
    assert transposed.parts[0].problem is not None
    assert transposed.parts[0].problem.i == (14, 14)


class Refusing:
    """Stands for a compiler that fails in a given way."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        raise self.error


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unsupported("smem:232448>227000"), "smem:232448>227000"),
        (KeyError("a bug"), "error:KeyError"),
        (ImportError("no triton", name="triton"), "import:triton"),
    ],
)
def test_a_compiler_that_fails_is_a_fallback(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transconv.conv import compiler

    refusing = Refusing(error)
    monkeypatch.setattr(compiler, "question", refusing)
    transconv.config.cpu = "interpret"
    x, w = problem()
    for _ in range(3):
        assert torch.equal(transconv.conv2d(x, w), F.conv2d(x, w))
    assert refusing.asked == 1  # the refusal is kept, so that nothing is compiled again
    assert transconv.stats().fallback == {reason: 3}
    assert reason in transconv.explain(x, w).reasons[0]


def test_running_out_of_memory_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    from transconv.conv import compiler

    monkeypatch.setattr(compiler, "question", Refusing(torch.OutOfMemoryError("full")))
    transconv.config.cpu = "interpret"
    with pytest.raises(torch.OutOfMemoryError):
        transconv.conv2d(*problem())


def test_slow_first_call_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lower_call, "SLOW_CALL", -1.0)
    transconv.config.cpu = "interpret"
    with caplog.at_level("WARNING", logger="transconv"):
        transconv.explain(*problem())
    assert "building a kernel took" in caplog.text


def test_routes_are_bounded_and_counts_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_cache, "LIMIT", 8)
    for n in range(1, 30):
        transconv.conv2d(torch.randn(1, 1, 3, 3 + n), torch.randn(1, 1, 1, 1))
    assert len(route_cache.routes) <= 9
    assert transconv.stats().total == 29


def test_alignment_and_switches_are_part_of_the_key() -> None:
    w = torch.randn(2, 2, 3, 3)
    flat = torch.randn(2 * 2 * 5 * 5 + 1)
    aligned, shifted = (flat[at : at + 100].view(2, 2, 5, 5) for at in (0, 1))
    req = request("conv2d", 2, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    keys = {layer_keys.forward_key(req, x, w, None)[0] for x in (aligned, shifted)}
    assert len(keys) == 2
    torch.use_deterministic_algorithms(True)
    try:
        keys.add(layer_keys.forward_key(req, aligned, w, None)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(keys) == 3


def test_threads() -> None:
    """Eight threads, cold, with shapes they share and shapes they do not."""
    finished: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for at in range(40):
            x = torch.randn(1, 2, 4, 4 + at % 7, generator=generator, requires_grad=True)
            w = torch.randn(2, 2, 3, 3, generator=generator, requires_grad=True)
            got, wanted = transconv.conv2d(x, w), F.conv2d(x, w)
            assert torch.equal(got, wanted)
            for pair in zip(
                torch.autograd.grad(got.sum(), (x, w)),
                torch.autograd.grad(wanted.sum(), (x, w)),
                strict=True,
            ):
                torch.testing.assert_close(*pair)
        finished.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == list(range(8))
    assert transconv.stats().total == 8 * 40 * 3


def test_few_frames_lie_between_a_call_and_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call is read from the public function to the compiler: each frame is one more to read."""
    seen: list[str] = []

    def lower(*given: Any, **named: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_globals["__name__"].startswith("transconv."):
                seen.append(frame.f_code.co_name)
            frame = frame.f_back
        raise Unsupported("test:stop", "far enough")

    monkeypatch.setattr(compiler, "lower", lower)
    monkeypatch.setattr(compiler.plan_cache, "find", lambda *given: None)
    monkeypatch.setattr(lower_call, "target_of", lambda device: TARGETS["sm_90"])
    transconv.config.cpu = "interpret"
    with transconv.config.changed(compile="now", sizes="exact"):  # whatever came before
        transconv.conv2d(torch.zeros(1, 8, 6, 11), torch.zeros(8, 8, 3, 3), padding=1)
    assert transconv.stats().fallback == {"error:StageError": 1}
    assert seen[-1] == "conv2d" and len(seen) <= 9, seen
