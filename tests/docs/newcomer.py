"""README, every page of docs/ and the notebooks, typed as by a newcomer.

``python -m tests.docs.newcomer [PAGE ..]`` builds the wheel, installs it in an empty environment, and does
what each page says in a folder of its own: programs are pasted into files, commands typed into a shell, in
the order of the page, with no variable of the package or of Triton set but those that the page sets.
Folders have the data and recipes of a checkout beside them, never its sources. A step passes if it ends
well and, on a machine without a GPU, as the pages were written on, prints what the page shows. The row of
a page is printed as soon as it is done, and then what failed; ``--out`` keeps the rows as CSV.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import installed
from tests.shown import ROOT, TIMES, Block, blocks, commands, filled, typed

PAGES = (
    ROOT / "README.md",
    # `make integrations` types the other page, with the packages of others.
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "integrations.md"),
    *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")),
)
BESIDE = ("Makefile", "bench", "constraints.txt", "docs", "examples")  # of a checkout
LONGEST_S = 600
# What no one types while reading, with the reason.
LEFT_OUT = (
    (r"(python -m )?pip |rm -rf ", "installing is what the script itself does"),
    (r"make \.xpu|apt-get |.*--engine=opencl", "asks for Intel's packages"),
    (r"make (test|release|matrix|measure)\b", "a part of `make check-all`, or of a GPU's hours"),
    (r"python -m bench (?!issues --small)", "measures, for minutes, on a GPU"),
    (r".* # on a GPU$", "asks for a GPU"),
    (r"transconv matrix ", "`make matrix` has it"),
    (r"python -m tests\.", "reads the sources of a checkout: tests/docs has it"),
)
SETTING = re.compile(r'(?:export )?\w+=("[^"]*"|\S*)(?:\s+#.*)?$')


@dataclass(frozen=True)
class Step:
    """What a newcomer does at one place: lays a file, types a line, or compares what a block shows."""

    line: str = ""
    file: tuple[str, str] | None = None
    shown: Block | None = None

    @property
    def left_out(self) -> str:
        """Why it is not done, if it is not."""
        lines = [self.line, *(typed(h) for h in (self.shown.heads if self.shown else ()))]
        return next((why for words, why in LEFT_OUT if any(re.match(words, line) for line in lines)), "")


def steps(page: Path) -> list[Step]:
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        return [Step("python notebook.py", ("notebook.py", "\n".join("".join(cell) for cell in cells)))]
    return [step for number, block in enumerate(blocks(text)) for step in _of_block(block, number, text)]


def _of_block(block: Block, number: int, page: str) -> Iterator[Step]:
    if block.kind == "python" and not block.rule:
        named = re.match(r"# (\w+\.py)\n", block.body)
        name = named[1] if named else f"program_{number}.py"
        shown = named and re.search(rf"^\$ .*\b{re.escape(name)}\b", page, re.MULTILINE)
        yield Step("" if shown else f"python {name}", (name, block.body))
    elif block.kind == "sh" and not block.rule:
        yield from (Step(line) for line in commands(block))
    elif block.body.startswith("$ "):
        if block.rule:
            yield Step(shown=block)
        else:
            yield from (Step(typed(h)) for h in block.heads if h.startswith("$ "))


@dataclass
class Visit:
    """A newcomer at one page, with what was typed so far."""

    page: Path
    folder: Path
    beside: Path
    environment: dict[str, str]
    compares: bool
    settings: list[str] = field(default_factory=list)
    printed: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return str(self.page.relative_to(ROOT))

    @property
    def tried(self) -> int:
        return self.passed + len(self.failures)

    def typed(self) -> Visit:
        for path in self.beside.iterdir():
            (self.folder / path.name).symlink_to(path)
        began = time.monotonic()
        for step in steps(self.page):
            if step.left_out:
                self.left_out.append((step.line or typed(step.shown.heads[0]), step.left_out))
            else:
                self._take(step)
        self.seconds = time.monotonic() - began
        return self

    def _take(self, step: Step) -> None:
        if step.file is not None:
            (self.folder / step.file[0]).write_text(step.file[1], "utf-8")
        if SETTING.match(step.line):
            self.settings.append(step.line)
        elif step.line or step.shown:
            try:
                self._do(step)
                self.passed += 1
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                self.failures.append(f"{self.name}: {step.line or step.shown.heads[0].strip()}\n{error}")

    def _do(self, step: Step) -> None:
        """Raises ValueError if it does not end well, or does not print what is shown."""
        if step.shown is None:
            self._output(step.line)
            return
        now = filled(step.shown, lambda head: self._output(typed(head), shown=True))
        if self.compares and now != step.shown.whole:
            raise ValueError(f"it prints\n{now}\nand the page shows\n{step.shown.whole}")

    def _output(self, line: str, shown: bool = False) -> str:
        """What a command prints; it runs once, however often the page shows parts of it. Where the page
        shows a refusal, that is what has to be printed."""
        if line not in self.printed:
            done = subprocess.run(
                ["bash", "-c", "\n".join([*self.settings, line])],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
            )
            both = done.stdout + done.stderr
            if done.returncode and not shown:
                raise ValueError(f"it ends with {done.returncode}\n{both[-3000:]}")
            self.printed[line] = TIMES.sub(r"\1", both if done.returncode else done.stdout)
        return self.printed[line]


def visits(folder: Path, pages: list[Path], jobs: int) -> Iterator[Visit]:
    """What came of every page, as soon as it is known, from a folder that may be filled."""
    sources, home, beside = folder / "sources", folder / "home", folder / "beside"
    for made in (sources, home, beside):
        made.mkdir()
    for name in BESIDE:  # a copy, as some commands write into it
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, beside / name)
    installed.copy_sources(sources)
    (wheel,) = installed.build(sources, "--wheel").glob("*.whl")
    shutil.rmtree(sources / "transconv")
    commands_of = installed.environment(wheel, folder / "environment").parent
    own = {**installed.clean(), "HOME": str(home), "PYTHON": "python"}  # make's: no environment of its own
    own["PATH"] = f"{commands_of}{os.pathsep}{own['PATH']}"
    alike = shutil.which("nvidia-smi") is None
    visit = functools.partial(Visit, beside=beside, environment=own, compares=alike)
    with ThreadPoolExecutor(jobs) as pool:
        asked = []
        for number, page in enumerate(pages):
            (own_folder := folder / f"page_{number}").mkdir()
            asked.append(pool.submit(visit(page, own_folder).typed))
        yield from (future.result() for future in asked)


ROW = "{:40} {:>8} {:>6} {:>7}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.newcomer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/graphs.md; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="pages at once; default: 2")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    given = parser.parse_args(words)
    pages = [ROOT / name for name in given.pages] or [page for page in PAGES if steps(page)]
    print(ROW.format("page", "programs", "passed", "seconds"))
    done: list[Visit] = []
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for visit in visits(Path(folder), pages, given.jobs):
            done.append(visit)
            print(ROW.format(visit.name, visit.tried, visit.passed, f"{visit.seconds:.0f}"), flush=True)
    tried, passed = sum(v.tried for v in done), sum(v.passed for v in done)
    print(ROW.format(f"{len(done)} pages", tried, passed, f"{sum(v.seconds for v in done):.0f}"))
    for line, why in sorted({left for v in done for left in v.left_out}, key=lambda left: left[::-1]):
        print(f"left out ({why}): {line}")
    for failure in (f for v in done for f in v.failures):
        print(f"\nFAILED {failure}")
    if given.out:
        with given.out.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("page", "programs", "passed", "seconds"))
            rows.writerows((v.name, v.tried, v.passed, f"{v.seconds:.1f}") for v in done)
    return int(passed != tried)


if __name__ == "__main__":
    sys.exit(main())
