"""``doctor``: checks whether transconv works on this machine, and prints one line for each check."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transconv import knobs
from transconv.cli import execute
from transconv.cli.arguments import options
from transconv.cli.diagnosis import installation, machine, storage
from transconv.cli.diagnosis.findings import BAD, Finding, guarded, printed
from transconv.errors import Unsupported
from transconv.target import Target, detect


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "doctor", "check whether transconv works on this machine",
        "Checks the installed packages, the chip and its features, the caches, the environment variables\n"
        "and the tuned schedules, and runs a convolution and an elementwise map. Prints one line for\n"
        "each check, which begins with ok, note (it works, but is unusual) or bad. Needs no network. The\n"
        "exit code is 1 if a line is bad.",
        ("doctor", "doctor --json"), doctor)
    made.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def doctor(words: argparse.Namespace) -> int:
    with _quiet():
        return printed(findings(), words.json)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warnings: ``doctor`` has a line for each."""
    log = logging.getLogger("transconv")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def findings() -> Iterator[Finding]:
    """All findings, each after those that it depends on."""
    given = knobs.given("TRANSCONV_", "TRITON_")  # before the interpreter is switched on
    where = _device()
    yield from guarded("software", installation.software)
    yield from guarded("chip", machine.chip)
    yield from guarded("settings", lambda: installation.settings(given))
    yield from guarded("cache", storage.caches)
    yield from guarded("tuned", lambda: storage.tuned(_target()))
    if where:
        yield from guarded("self-test", lambda: machine.selftest(where))
    else:
        yield Finding("self-test", BAD, "not tried: torch cannot be imported or its GPU not be used",
                      "see the lines above")


def _device() -> str:
    """Where kernels run; empty where that is unknown, for reasons that other lines give."""
    try:
        return execute.device()
    except Exception:  # torch is missing or broken in one of many ways, or no record fits the chip
        return ""


def _target() -> Target:
    try:
        return detect()
    except Unsupported:
        return Target.parse("interpreter")

