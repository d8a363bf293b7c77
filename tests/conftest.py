"""The suite's environment, set before anything reads it: IR is verified after every pass, caches are the
suite's own, and without a GPU no tuned rows are used and Triton interprets kernels (it reads its variable
when it is imported)."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRANSCONV_VERIFY", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRANSCONV_TUNED", "0")  # tests of choices are about the estimate
# Workers inherit the environment of the process that starts them, but each needs a cache of its own.
if "TRANSCONV_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    FOLDER = tempfile.TemporaryDirectory(prefix="transconv-tests-")
    os.environ["TRANSCONV_CACHE"] = FOLDER.name

ROOT = Path(__file__).parent.parent
# Files with few tests that take long. Workers get them first, so that none ends with one of them.
LONGEST = tuple(f"tests/{name}.py" for name in (
    "docs/test_build", "docs/test_notebooks", "docs/test_pages", "test_release", "test_readme",
    "test_tune_session", "test_stopping", "test_without_libraries", "standalone/test_python_files",
    "standalone/test_machine_code", "bench/test_bench_dropin", "bench/test_bench_report",
    "bench/test_bench_ablation", "bench/test_bench_graphs", "bench/test_bench_issues",
    "bench/test_bench_sizes", "verify/test_bisect", "verify/test_fuzz", "verify/test_fuzz_compute",
    "verify/test_matrix", "verify/test_mutants", "verify/test_check", "verify/test_planted",
    "verify/test_byte_copies", "verify/test_small_types", "verify/test_oracle", "verify/test_precision",
    "graph/test_any_size", "graph/test_drawn", "graph/test_schedules", "torch_ops/test_any_size",
    "torch_ops/test_docs", "torch_ops/test_interpreted", "test_pipeline", "test_sized_boxes",
    "simplify/test_soundness", "compute/test_any_size", "compute/test_docs",
    "backend_triton/test_flaws", "backend_triton/test_offline", "backend_triton/test_offline_packing",
    "backend_triton/test_triton_interpreter", "test_cli", "test_plans", "test_packing", "test_spotcheck",
    "functional/test_samples", "functional/test_calls", "torch_ops/test_library", "torch_ops/test_ready",
    "simplify/test_exhaustive", "distributed/test_sharded"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite tests/golden from what is generated now")
    parser.addoption("--part", metavar="K/N", default="1/1",
                     help="of the selected tests every N-th, from the K-th on: a machine for each part")


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of a test marked ``every(n)`` each n-th case runs in ``make test``, all in ``make check-all``. With
    several workers, files that take long come first, so that all workers end at about the same time.
    A part has every N-th of what other options select, so that cases of one test come into all parts."""
    seen: Counter[str] = Counter()
    for item in items:
        every = item.get_closest_marker("every")
        name = item.nodeid.partition("[")[0]
        if every is not None and seen[name] % every.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    yield
    part, parts = (int(number) for number in config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {part}/{parts}: not a part from 1/{parts} to {parts}/{parts}")
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1::parts]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there once all files are imported stays: no garbage collection looks at it again. The
    others come less often, since kernels leave many nodes and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """Problems are small, so that more threads would be slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def kept_compilers() -> Iterator[None]:
    """Offline compiles of all tests share child processes, whose start takes longer than most compiles."""
    from transconv.backend_triton import offline

    made, idle = offline._child, defaultdict(list)

    @contextmanager
    def kept(triton: Path | None) -> Iterator[offline.Child]:
        child = idle[triton].pop() if idle[triton] else made(triton)
        try:
            yield child
        finally:
            idle[triton].append(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "_child", kept)
        yield
    for children in idle.values():
        for child in children:
            child.close()


@pytest.fixture(autouse=True)
def own_switches() -> Iterator[None]:
    """A trial of the fuzzer switches passes for its process, which must not affect the next tests."""
    from transconv import knobs

    before = os.environ.get(knobs.passes.name)
    yield
    if before is None:
        os.environ.pop(knobs.passes.name, None)
    else:
        os.environ[knobs.passes.name] = before


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of the test's own, and none of the tuned rows that the package brings."""
    from transconv.conv import compiler
    from transconv.disk_cache import files as keep
    from transconv.selection import store

    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    monkeypatch.setattr(store, "_package", list)
    for forget in (store.forget, keep.forget, compiler.forget):
        forget()
