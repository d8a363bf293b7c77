"""The suite's environment, set before anything reads it: IR is verified after every pass, caches are the
suite's own, and without a GPU no tuned rows are used and Triton interprets kernels (it reads its variable
when it is imported)."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRANSCONV_VERIFY", "1")
if torch.cuda.is_available():  # each call has its own kernel, here and in processes that tests start
    os.environ.setdefault("TRANSCONV_COMPILE", "now")
    os.environ.setdefault("TRANSCONV_SIZES", "exact")
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRANSCONV_TUNED", "0")  # tests of choices are about the estimate
# Workers inherit the environment of the process that starts them, but each needs a cache of its own.
if "TRANSCONV_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    FOLDER = tempfile.TemporaryDirectory(prefix="transconv-tests-")
    os.environ["TRANSCONV_CACHE"] = f"{FOLDER.name}/cache"
    os.environ["TRANSCONV_KEY"] = f"{FOLDER.name}/key"

ROOT = Path(__file__).parent.parent
# Files that take longest, more than about 3 s of a processor, from the longest on. Workers get them first,
# so that none ends with one of them.
LONGEST = {f"tests/{name}.py": place for place, name in enumerate((
    "docs/test_build", "verify/test_fuzz", "docs/test_pages", "backend_triton/test_offline",
    "torch_ops/test_library", "torch_ops/test_interpreted", "test_plans", "test_tune_session",
    "test_sized_boxes", "test_sized_copies", "compute/test_views", "graph/test_schedules",
    "torch_ops/test_any_size", "test_cli", "passes/test_phases_in_one_launch", "bench/test_bench_pages",
    "verify/test_check", "verify/test_planted", "verify/test_bisect", "simplify/test_soundness",
    "bench/test_bench_report", "backend_triton/test_triton_interpreter", "functional/test_samples",
    "kernel/test_drawn", "test_pipeline", "test_heuristics", "functional/test_calls",
    "graph/test_quantized_models", "standalone/test_python_files", "graph/test_any_size",
    "test_packing", "test_tune_database", "test_hostile_cache", "docs/test_notebooks", "test_merging",
    "graph/test_rows", "test_sliding", "test_explicit", "simplify/test_exhaustive",
    "verify/test_zero_points", "test_sliding_boxes", "torch_ops/test_quantized",
    "bench/test_bench_maps", "test_boxes", "torch_ops/test_warm_fused", "passes/test_tiles_at_edges",
    "kernel/test_examples", "test_registry", "torch_ops/test_ready", "bench/test_bench_sizes",
    "conv/test_relation", "test_result_boxes", "test_trust", "torch_ops/test_convert",
    "cost/test_fitted_numbers", "kernel/test_engines", "torch_ops/test_opinfo", "test_packing_plans",
    "verify/test_fuzz_compute", "verify/test_small_types", "test_stopping", "test_release",
    "test_readme", "bench/test_bench_dropin", "bench/test_bench_graphs", "bench/test_bench_issues",
    "graph/test_drawn", "verify/test_byte_copies", "verify/test_matrix", "verify/test_precision",
    "compute/test_any_size", "compute/test_docs", "functional/test_any_size",
    "distributed/test_sharded", "backend_triton/test_flaws", "test_spotcheck", "test_without_libraries",
    "standalone/test_machine_code"))}


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
        items.sort(key=lambda item: LONGEST.get(str(item.path).removeprefix(f"{ROOT}/"), len(LONGEST)))
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
    gc.set_threshold(500_000, 50, 100)


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
    from transconv.backend_triton.offline import compilation

    made, idle = compilation._child, defaultdict(list)

    @contextmanager
    def kept(triton: Path | None) -> Iterator[compilation.Child]:
        child = idle[triton].pop() if idle[triton] else made(triton)
        try:
            yield child
        finally:
            idle[triton].append(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_child", kept)
        yield
    for children in idle.values():
        for child in children:
            child.close()


@pytest.fixture(autouse=True)
def own_switches() -> Iterator[None]:
    """Passes that a trial of the fuzzer switches, and what calls on a CPU mean, are as before in the next
    test."""
    from transconv import knobs

    before, settings = os.environ.get(knobs.passes.name), sys.modules.get("transconv.calls.settings")
    cpu = settings.settings.cpu if settings else "fallback"
    yield
    settings = sys.modules.get("transconv.calls.settings")
    if settings and settings.settings.cpu != cpu:
        settings.settings.cpu = cpu
    if before is None:
        os.environ.pop(knobs.passes.name, None)
    else:
        os.environ[knobs.passes.name] = before


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of the test's own, and none of the tuned rows that the package brings."""
    from transconv.conv import compiler
    from transconv.disk_cache import files as keep
    from transconv.selection.tuning_db import store

    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    monkeypatch.setattr(store, "_package", list)
    for forget in (store.forget, keep.forget, compiler.forget):
        forget()
