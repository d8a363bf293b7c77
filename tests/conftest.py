"""The suite's environment, set before anything reads it: verified IR, a cache of its own, and,
where there is no GPU, no tuned configs, and Triton's interpreter (it looks at its variable when it
is imported)."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRANSCONV_VERIFY", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRANSCONV_TUNED", "0")  # tests of choices are about the estimate
# Workers inherit what the process that starts them has set: verdicts of one are not for the others.
if "TRANSCONV_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    FOLDER = tempfile.TemporaryDirectory(prefix="transconv-tests-")
    os.environ["TRANSCONV_CACHE"] = FOLDER.name

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite tests/golden from what is generated now")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``every(n)`` each n-th case runs in ``make test``, all in ``make check-all``."""
    seen: Counter[str] = Counter()
    for item in items:
        every = item.get_closest_marker("every")
        name = item.nodeid.partition("[")[0]
        if every is not None and seen[name] % every.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """Small problems: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_switches() -> Iterator[None]:
    """A trial of the fuzzer switches passes for its process: not for the tests after it."""
    from transconv import knobs

    before = os.environ.get(knobs.passes.name)
    yield
    if before is None:
        os.environ.pop(knobs.passes.name, None)
    else:
        os.environ[knobs.passes.name] = before


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of the test's own, and no tuned row: what ships is another test's matter."""
    from transconv.conv import compiler
    from transconv.disk_cache import files as keep
    from transconv.selection import store

    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    monkeypatch.setattr(store, "_package", list)
    for forget in (store.forget, keep.forget, compiler.forget):
        forget()
