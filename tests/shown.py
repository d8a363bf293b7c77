"""Blocks of a documentation page that the project prints itself, made anew to be compared.

A comment above a block says which lines it shows, its first line where they come from (there may be
several commands, each with its lines below it):

    <!-- shown: "for step" to "dot(" -->   $ transconv ..     what that prints, without the times of passes
    ```text                                $ python NAME.py   what the page's program that begins with
    $ transconv show $P --stage naive                         `# NAME.py` prints
    for step in 0..18:                     # PATH             lines of a file
        ...
    ```

Variables stand in the page's own ``sh`` blocks (``P="mb32..."``); a command goes on behind a backslash.
Rules, separated by ``;`` and with a line of dots between what they leave:

    whole      lines 3-9      "X"  the next line with X      "X" to "Y"  from there to the next with Y
    changed    of a diff, the lines that differ; what follows counts among these
"""

from __future__ import annotations

import functools
import io
import os
import re
import shlex
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests import programs
from transconv.__main__ import main

ROOT = Path(__file__).parent.parent
FENCED = re.compile(
    r"^(?:<!-- shown: (?P<rule>.*?) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
SETTINGS = {"TRANSCONV_TUNED": "0"}  # what was tuned on some machine is not for a page
UNSET = (
    "TRANSCONV_PASSES",
    "TRANSCONV_FEATURES",
    "TRANSCONV_SCHEDULE",
    "TRANSCONV_DEBUG",
    "TRANSCONV_DUMP",
)
TIMES = re.compile(r"  \(\d+ ms\)(.*?) *-*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind (``text``, ``sh``, ``python``), its lines, and the rule of a shown one."""

    whole: str
    kind: str
    body: str
    rule: str

    @property
    def heads(self) -> list[str]:
        """What its lines come from: commands, with the lines that continue them, or a file's name."""
        return re.findall(r"^(?:\$ (?:.*\\\n)*.*\n|# .*\n)", self.body, re.MULTILINE)


def blocks(page: str) -> list[Block]:
    return [Block(m[0], m["kind"], m["body"], m["rule"] or "") for m in FENCED.finditer(page)]


def commands(block: Block) -> list[str]:
    """The lines of a ``sh`` block, each with those that continue it."""
    return [line for line in re.sub(r"\\\n\s*", " ", block.body).splitlines() if line.strip()]


def typed(head: str) -> str:
    """The command that stands above what it prints."""
    return head.removeprefix("$ ").replace("\\\n", "").strip()


def anew(block: Block, page: str) -> str:
    """The block as it has to be. Raises ValueError for a rule that finds nothing."""
    return filled(block, lambda head: source(head, page))


def filled(block: Block, printed_by: Callable[[str], str]) -> str:
    """The block with what each of its heads prints, cut by its rule."""
    heads = (
        block.heads[:1] if block.body.startswith("# ") else [h for h in block.heads if h.startswith("$ ")]
    )
    return block.whole.replace(
        block.body, "".join(head + cut(printed_by(head), block.rule) for head in heads)
    )


@functools.cache  # several blocks show parts of one kernel
def source(head: str, page: str) -> str:
    """All that the head of a block stands for."""
    if head.startswith("# "):
        return (ROOT / head[2:].strip()).read_text()
    variables = dict(re.findall(r'^(\w+)="(.*)"$', page, re.MULTILINE))
    line = re.sub(r"\$(\w+)", lambda m: variables[m[1]], typed(head))
    words = shlex.split(line)
    settings = dict(SETTINGS)
    while "=" in words[0]:
        name, _, settings[name] = words.pop(0).partition("=")
    if words[0] == "transconv":
        return TIMES.sub(r"\1", printed(words[1:], settings))
    if words[:2] == ["python", "-m"]:
        return programs.run(words[1:], cwd=ROOT).stdout
    names = [m for m in re.findall(r"^\$ python (\w+\.py)$", page, re.MULTILINE) if settings == SETTINGS]
    return executed(tuple(dict.fromkeys(names or [words[1]])), page, tuple(settings.items()))[words[1]]


def printed(words: list[str], settings: dict[str, str]) -> str:
    """What a command prints, its complaints included."""
    out = io.StringIO()
    with patch.dict(os.environ, settings), redirect_stdout(out), redirect_stderr(out):
        for name in UNSET:
            if name not in settings:
                os.environ.pop(name, None)
        main(words)
    return out.getvalue()


def program(name: str, page: str) -> str:
    return next(b.body for b in blocks(page) if b.body.startswith(f"# {name}\n"))


@functools.cache
def executed(names: tuple[str, ...], page: str, settings: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """What programs of a page print, one after another in one process, because imports take longest."""
    environment = {k: v for k, v in os.environ.items() if k not in UNSET}
    texts = [(name, program(name, page)) for name in names]
    # Registered as files, so that a program finds its own source.
    run = (
        f"import linecache\nfor name, text in {texts!r}:\n    print(end=f'\\0{{name}}\\n')\n"
        "    linecache.cache[name] = len(text), None, text.splitlines(True), name\n"
        "    exec(compile(text, name, 'exec'), {'__name__': '__main__'})"
    )
    done = programs.run(["-c", run], cwd=ROOT, env={**environment, **dict(settings)})
    if done.returncode:
        raise ValueError(f"the programs end with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(part.split("\n", 1) for part in TIMES.sub(r"\1", done.stdout).split("\0")[1:])


def cut(text: str, rule: str) -> str:
    """The lines that a rule leaves, with dots where some are left out between them."""
    lines, parts = text.splitlines(), [p.strip() for p in rule.split(";")]
    if parts[0] == "changed":
        lines = [line for line in lines if re.match(r"[+-](?![+-])", line)]
        parts = parts[1:] or ["whole"]
    kept: list[str] = []
    at = 0
    for part in parts:
        begin, end = span(lines, at, part)
        if kept and begin > at:
            kept.append(" " * indent(lines[begin]) + "...")
        kept += lines[begin:end]
        at = end
    return textwrap.dedent("\n".join(line.rstrip() for line in kept)).strip("\n") + "\n"


def span(lines: list[str], at: int, part: str) -> tuple[int, int]:
    """Where a part of a rule begins and ends. Raises ValueError if it is not there."""
    if part == "whole":
        return 0, len(lines)
    if found := re.fullmatch(r"lines (\d+)-(\d+)", part):
        return int(found[1]) - 1, int(found[2])
    found = re.fullmatch(r'"([^"]+)"(?: to "([^"]+)")?', part)
    if found is None:
        raise ValueError(f"no rule: {part}")
    begin = where(lines, at, found[1])
    return begin, (where(lines, begin, found[2]) if found[2] else begin) + 1


def where(lines: list[str], at: int, text: str) -> int:
    for i in range(at, len(lines)):
        if text in lines[i]:
            return i
    raise ValueError(f"no line with '{text}' from line {at + 1} on")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())
