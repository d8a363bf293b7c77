"""A pytest plugin: several pytest processes share one list of tests without a master.

Every process collects the same list and walks through it from the front. The process that
creates a test's claim file runs it. Each result is appended to the process's own record file, one
JSON line each. After a fault of the GPU the process ends, because every later call would fail too; the
driver (bench.dropin) starts another.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

FATAL_EXIT = 75
FATAL = (
    "CUDA error",
    "AcceleratorError",
    "illegal memory access",
    "device-side assert",
    "CUDA driver error",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", default="", help="folder of claim and record files")
    parser.addoption("--claim-as", default="0", help="name of this process's record file")
    parser.addoption(
        "--claim-until", type=float, default=float("inf"), help="unix time after which no test starts"
    )


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--claims"):
        config.pluginmanager.register(Claims(Path(folder), config), "transconv-claims")


class Claims:
    """Runs the tests that no other process has claimed, and records their results."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        self.folder, self.name = folder, config.getoption("--claim-as")
        self.until = config.getoption("--claim-until")
        self.record = folder / f"{self.name}.jsonl"
        self.phases: dict[str, Any] = {}
        self.fatal = False

    def write(self, **row: Any) -> None:
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def claim(self, at: int) -> bool:
        try:
            os.close(os.open(self.folder / f"{at}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.write(event="collected", tests=len(session.items))
        for at, item in enumerate(session.items):
            if time.time() > self.until:
                self.write(event="late")
                break
            if not self.claim(at):
                continue
            self.write(event="start", test=item.nodeid, time=time.time())
            self.phases = {"outcome": "passed", "text": "", "cases": {}}
            start = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self.write(
                event="end", test=item.nodeid, seconds=round(time.monotonic() - start, 2), **self.phases
            )
            if self.fatal:
                os._exit(FATAL_EXIT)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases["cases"] |= dict(report.user_properties).get("cases", {})
        if report.skipped:
            self.phases["outcome"] = "skipped"
        elif report.failed:
            text = str(report.longrepr)
            self.phases.update(outcome="failed", text=text[-3000:])
            self.fatal = self.fatal or any(word in text for word in FATAL)
