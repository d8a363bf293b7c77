"""The suite's environment, set before anything reads it: IR is verified after every pass, caches are the
suite's own, and without a GPU no tuned rows are used and Triton interprets kernels (it reads its variable
when it is imported)."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import resource
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs
from _pytest.runner import runtestprotocol
from hypothesis import settings

from tests import programs

ROOT = Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"
FOLDER: list[tempfile.TemporaryDirectory[str]] = []  # of this process's caches, as long as it lives
# Seconds that each file takes, where that is one or more; workers get the longest first.
DURATIONS = Path(__file__).with_name("durations.json")
PROCESSOR = pytest.StashKey[list[float]]()  # seconds of each process that has ended its tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what is generated now"
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        default="1/1",
        help="of the selected tests every N-th, from the K-th on: a machine for each part",
    )
    parser.addoption(
        "--update-durations",
        action="store_true",
        help="write how long each file of this run took into tests/durations.json, the "
        "order of files in `make test`",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROCESSOR] = []
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        _prepare_process()  # one that only starts workers needs no torch


def _prepare_process() -> None:
    gc.disable()  # until all files are imported
    import torch

    os.environ.setdefault("TRANSCONV_VERIFY", "1")
    if torch.cuda.is_available():  # each call has its own kernel, here and in processes that tests start
        os.environ.setdefault("TRANSCONV_COMPILE", "now")
        os.environ.setdefault("TRANSCONV_SIZES", "exact")
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("TRANSCONV_TUNED", "0")  # tests of choices are about the estimate
        # A graph of a test is traced once, and what torch keeps for another time takes a third of that.
        os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
    # Of devices that are not there a seed is kept for later, with the stack of the call.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    # After each compile it would look for garbage in all that the tests have made.
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    if "attached_loggers" in catching_logs.__slots__:
        catching_logs.__enter__ = _catch_logs
    # Workers inherit the environment of the process that starts them, but each needs a cache of its own.
    if "TRANSCONV_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        FOLDER.append(tempfile.TemporaryDirectory(prefix="transconv-tests-"))
        os.environ["TRANSCONV_CACHE"] = f"{FOLDER[-1].name}/cache"
        os.environ["TRANSCONV_KEY"] = f"{FOLDER[-1].name}/key"


def _catch_logs(self: catching_logs[Any]) -> Any:
    """As pytest does, but for loggers that pass on what they are told: it looks for the others, some forty
    of torch, in each part of each test."""
    root = logging.getLogger()
    if self.level is not None:
        self.orig_level = root.level
        self.handler.setLevel(self.level)
        root.setLevel(min(root.level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The folder of tests that need a GPU is not imported where they are left out."""
    return True if collection_path == GPU and config.getoption("-m").startswith("not gpu and ") else None


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of a test marked ``every(n)`` each n-th case runs in ``make test``, all in ``make check-all``. With
    several workers, files that take long come first, so that all workers end at about the same time.
    Drawn tests have a third of their examples in ``make test``, all of them in ``make check-all``.
    A part has every N-th of what other options select, so that cases of one test come into all parts.
    Hypothesis draws no numbers that stand in source files, all of which its own hook would read."""
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        providers._get_local_constants = providers.Constants
    seen: Counter[str] = Counter()
    for item in items:
        every = item.get_closest_marker("every")
        name = item.nodeid.partition("[")[0]
        if every is not None and seen[name] % every.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
    if "not slow" in config.getoption("-m"):
        _draw_fewer({getattr(item, "obj", None) for item in items})
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds: dict[str, int] = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))
    yield
    part, parts = (int(number) for number in config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {part}/{parts}: not a part from 1/{parts} to {parts}/{parts}")
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1 :: parts]


def _draw_fewer(tests: set[Any]) -> None:
    """A third of the examples of tests that Hypothesis draws for."""
    for test in tests:
        if drawn := getattr(test, "_hypothesis_internal_use_settings", None):
            few = settings(drawn, max_examples=-(-drawn.max_examples // 3))
            test._hypothesis_internal_use_settings = few


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there once all files are imported stays: no garbage collection looks at it again. They
    come less often than by default, since kernels leave many nodes and few cycles. Dynamo's log lacks the
    names of functions, for which it reads whole files."""
    if dynamo := sys.modules.get("torch._dynamo.symbolic_convert"):
        dynamo.get_funcname = lambda file, line: None
    gc.freeze()
    gc.enable()
    gc.set_threshold(500_000, 50, 100)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker sends one report of a test that passed, with the time of set-up and tear-down in it:
    messages take longer than many tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    telling = [r for r in reports if r.when == "call" or not r.passed]
    telling[0].duration = sum(r.duration for r in reports)
    for report in telling:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what its processes took. No garbage is looked for in what tests have left."""
    if output := getattr(session.config, "workeroutput", None):
        output["processor"] = _processor(resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A worker that has sent its reports ends without freeing memory, which takes seconds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit._run_exitfuncs()
        os._exit(0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that was killed tells nothing."""
    told = getattr(node, "workeroutput", {})
    node.config.stash[PROCESSOR] += [told["processor"]] if "processor" in told else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how much of a processor the run took; ``--update-durations`` keeps what each file took."""
    own = resource.RUSAGE_SELF, *(() if config.stash[PROCESSOR] else (resource.RUSAGE_CHILDREN,))
    total = _processor(*own) + sum(config.stash[PROCESSOR])
    terminalreporter.write_line(f"user and system time of all processes: {total:.0f} s")
    if not config.getoption("--update-durations"):
        return
    took: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid.partition("::")[0]] += report.duration
    kept = {
        name: seconds
        for name, seconds in json.loads(DURATIONS.read_text()).items()
        if name not in took and (ROOT / name).exists()
    }
    kept |= {name: round(seconds) for name, seconds in took.items() if seconds >= 1}
    ordered = dict(sorted(kept.items(), key=lambda item: (-item[1], item[0])))
    DURATIONS.write_text(json.dumps(ordered, indent=0) + "\n")


def _processor(*whose: int) -> float:
    """User and system seconds."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


@pytest.fixture(scope="session", autouse=True)
def ended_programs() -> Iterator[None]:
    """The process that forks programs ends before the tests do, so that its time is counted."""
    yield
    programs.end()


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers of pools start without importing torch."""
    from tests import forked_workers

    with forked_workers.forked_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """Problems are small, so that more threads would be slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def kept_compilers() -> Iterator[None]:
    """Offline compiles of all tests share child processes, whose start takes longer than most compiles."""
    from transconv.backend_triton import offline_compilation

    made, idle = offline_compilation._child, defaultdict(list)

    @contextmanager
    def kept(triton: Path | None) -> Iterator[offline_compilation.Child]:
        child = idle[triton].pop() if idle[triton] else made(triton)
        try:
            yield child
        finally:
            idle[triton].append(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_compilation, "_child", kept)
        yield
    for children in idle.values():
        for child in children:
            child.close()


@pytest.fixture(autouse=True)
def own_switches() -> Iterator[None]:
    """Passes that a trial of the fuzzer switches and the words of transconv.config are as before in the
    next test, which does not depend on those before it."""
    from transconv.support import knobs

    before, words = os.environ.get(knobs.passes.name), _words()
    yield
    for name, word in (words or {"cpu": "fallback"}).items():
        if _words().get(name, word) != word:
            setattr(sys.modules["transconv.calls.settings"].settings, name, word)
    if before is None:
        os.environ.pop(knobs.passes.name, None)
    else:
        os.environ[knobs.passes.name] = before


def _words() -> dict[str, str | bool]:
    """Those of transconv.config, where something has imported it."""
    module = sys.modules.get("transconv.calls.settings")
    return {name: getattr(module.settings, name) for name in module.WORDS} if module else {}


@pytest.fixture
def own_garbage() -> None:
    """Collections of garbage look at what the test makes, not at what others have left."""
    gc.freeze()


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of the test's own, and none of the tuned rows that the package brings."""
    from transconv.conv import compiler
    from transconv.selection import tuning_db
    from transconv.support import files as keep

    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    monkeypatch.setattr(tuning_db, "_package", list)
    for forget in (tuning_db.forget, keep.forget, compiler.forget):
        forget()
