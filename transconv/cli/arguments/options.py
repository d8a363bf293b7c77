"""Options that several verbs share: problems, directions, schedules and targets, and FILE:NAME, what
a user's Python file defines; the variables of the environment, which are checked before a verb starts."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from os.path import exists  # unlike Path.exists, it takes a name of any length
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from transconv.conv import ConvProblem, Epilogue, Prop, computable, iter_problems
from transconv.schedule import Schedule
from transconv.selection import schedule_of_user
from transconv.support import ProblemError, Unsupported, knobs, nearest, one_line
from transconv.target import Target, detect, why_no_switches

EXAMPLE = "mb32ic64ih56oc128oh28kh3sh2ph1"
PROPS = [p.value for p in Prop]
# What oneDNN and others call the directions.
ELSEWHERE = {
    **dict.fromkeys(("forward", "fwd_b", "fwd_d", "fwd_i", "fprop"), "fwd"),
    **dict.fromkeys(("backward", "bwd", "dgrad"), "bwd_d"),
    **dict.fromkeys(("bwd_wb", "wgrad"), "bwd_w"),
}


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line. ``given``: the words that it reads."""

    given: Sequence[str] = ()

    def parse_known_args(self, given: Any = None, namespace: Any = None) -> Any:
        self.given = given or ()
        return super().parse_known_args(given, namespace)

    def option(
        self,
        name: str,
        metavar: str,
        help: str,
        default: Any = None,
        kind: Callable[[str], Any] = str,
        former: Sequence[str] = (),
    ) -> None:
        """An option with one value of a kind (``ranges``). ``former``: names read for one release."""
        dest = name.removeprefix("--").replace("-", "_")
        self.add_argument(name, *former, dest=dest, metavar=metavar, help=help, default=default, type=kind)

    def flag(self, name: str, help: str) -> None:
        """An option without a value."""
        self.add_argument(name, help=help, action="store_true")

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required") and (left := self.unknown()):
            message = self.unrecognized(left)
        meant = ""
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", choice[2])
            meant = nearest(choice[1], known, {k: v for k, v in ELSEWHERE.items() if v in known})
        self.exit(2, f"{self.prog}: error: {one_line(message)}{meant} (--help says what is expected)\n")

    def parse_args(self, given: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """The words of a command line. Of an option that its verb does not have: which was meant."""
        words: argparse.Namespace
        words, left = self.parse_known_args(given)
        if left:
            self.error(self.unrecognized(left, words.usage()))
        return words

    def unknown(self) -> list[str]:
        """The options that were given and that it does not have."""
        known = [o for a in self._actions for o in a.option_strings]
        named = [w.partition("=")[0] for w in self.given if w.startswith("--")]
        return [w for w in named if not any(o.startswith(w) for o in known)]

    def unrecognized(self, left: Sequence[str], usage: str = "") -> str:
        """What is wrong with such options, and which was meant."""
        known = ["--help", *re.findall(r"--[\w-]+", usage or self.format_usage())]
        theirs = {"--dir": "--prop"} if "--prop" in known else {}  # oneDNN's
        return (
            f"unrecognized arguments: {' '.join(left)}{nearest(left[0].partition('=')[0], known, theirs)}"
        )


def refusal(error: BaseException) -> str:
    """The error of a command, in one line."""
    return one_line(f"{type(error).__name__}: {error}")


def add_verb(
    verbs: Any, name: str, help: str, about: str, examples: tuple[str, ...], action: Any
) -> Parser:
    """A verb. Its ``--help`` states the purpose and ends with examples to paste."""
    made: Parser = verbs.add_parser(
        name,
        help=help,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "\n".join(f"  transconv {e}" for e in examples),
    )
    made.set_defaults(action=action, usage=made.format_usage)
    return made


def add_problem(to: Parser, or_file: bool = False, least: int = 1) -> None:
    what = (
        "a problem in benchdnn's grammar, then optionally dt= (default f32), tag= (nchw) and "
        f"math= (tf32): {EXAMPLE} dt=f16 tag=nhwc; or a file with a computation as text"
    )
    to.add_argument(
        "problem",
        nargs="+" if least else "*",
        metavar="PROBLEM|FILE" if or_file else "PROBLEM",
        help=what + (", or with problems (a benchdnn batch)" if or_file else ""),
    )
    to.option("--dtype", "T", "element type: f32, f16, bf16, f64, or three as src:wei:dst")
    to.option("--layout", "TAG", "memory order: nchw, nhwc, nChw16c, or three as src:wei:dst")


def add_schedule(to: Parser) -> None:
    to.option(
        "--schedule",
        "S",
        "one line such as 'mb.oh.ow:128 oc:128 ic:64 | mma | stages=3 warps=8'; "
        "`transconv words` explains each word; default: chosen by transconv",
        former=["--config"],
    )


def add_chip(to: Parser) -> None:
    to.option(
        "--target", "TARGET", "the chip: sm_90, gfx942, ...; default: the GPU here, sm_90 without one", ""
    )


def add_epilogue(to: Parser) -> None:
    to.option("--epilogue", "E", "operations on the sum before it is stored: bias+relu, bias+res+silu", "")


def add_props(to: argparse.ArgumentParser, default: str) -> None:
    to.add_argument(
        "--prop",
        choices=[*PROPS, "all"],
        default=default,
        help="fwd: the result (dst), bwd_d: the gradient of the input (src), bwd_w: the "
        f"gradient of the weight (wei) (default: {default})",
    )
    to.set_defaults(usual_prop=default)


def dressed(problem: ConvProblem, words: argparse.Namespace) -> ConvProblem:
    """The problem with ``--dtype`` and ``--layout`` in place of its own."""
    if words.dtype:
        problem = problem.with_dtype(words.dtype)
    return problem.with_layout(words.layout) if words.layout else problem


def problem(words: argparse.Namespace) -> ConvProblem:
    """The one problem of the command line. Raises ProblemError."""
    if exists(words.problem[0]):
        raise ProblemError(
            f"'{words.problem[0]}' is a file; {words.verb} takes one problem, such as {EXAMPLE}, or a "
            "file with a computation, whose first line is compute NAME (run and tune take lists)"
        )
    return dressed(described(words.problem), words)


def described(words: Sequence[str]) -> ConvProblem:
    """The problem of some words. Raises ProblemError; FileNotFoundError if they look like a path."""
    text = " ".join(words)
    try:
        return ConvProblem.parse(text)
    except ProblemError:
        if '"' not in text and any(c in text for c in "./"):  # not in any descriptor
            raise FileNotFoundError(
                f"no such file: {text}; expected a problem such as {EXAMPLE}, "
                "or a file with a computation as text"
            ) from None
        raise


def each_described(words: Sequence[str]) -> list[ConvProblem]:
    """The problems of some words, each a descriptor and the words with ``=`` behind it; those in front of
    the first belong to that. Raises as ``described``."""
    found: list[list[str]] = [[]]
    for word in words:
        if "=" not in word and any("=" not in w for w in found[-1]):
            found.append([])
        found[-1].append(word)
    return [described(one) for one in found]


def problems(words: argparse.Namespace) -> list[tuple[ConvProblem, Prop]]:
    """Every problem of the command line or of the files that it names, with every requested direction.
    Raises ProblemError where there is none."""
    if all(exists(w) for w in words.problem):
        listed = [pair for w in words.problem for pair in iter_problems(Path(w))]
    else:
        listed = [(p, None) for p in each_described(words.problem)]
    directions = props(words)
    found = [
        (dressed(p, words), prop) for p, way in listed for prop in directions if way is None or way is prop
    ]
    if not found:
        named = " ".join(words.problem)
        raise ProblemError(f"{named} has no problem with --prop {words.prop}; expected at least one")
    return found


def some_computable(found: Sequence[tuple[ConvProblem, Prop]]) -> None:
    """Raises Unsupported where no kernel computes with the types of any of these directions."""
    refused = []
    for p, prop in found:
        try:
            return computable(p, prop)
        except Unsupported as error:
            refused.append(error)
    if refused:
        raise refused[0]


def props(words: argparse.Namespace) -> tuple[Prop, ...]:
    return tuple(Prop) if words.prop == "all" else (Prop(words.prop),)


def schedule(words: argparse.Namespace) -> Schedule | None:
    return Schedule.parse(words.schedule) if words.schedule else None


def epilogue(words: argparse.Namespace) -> Epilogue:
    return Epilogue.parse(words.epilogue)


def target(name: str) -> Target:
    """The target of a name; ``auto`` is this machine's GPU, or the interpreter."""
    return detect() if name in ("", "auto") else Target.parse(name)


def chip(name: str) -> Target:
    """The target of a name, for kernels that are read, not run; ``auto`` is sm_90 without a GPU."""
    found = target(name)
    return found if name or found.backend != "interpreter" else Target.parse("sm_90")


def loaded(text: str) -> tuple[ModuleType, str]:
    """The module that a file is, and the name behind the colon. The file can import others of its folder.
    Raises ValueError where there is no file, and where running it fails, with its line."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file:
        raise ValueError(f"{text!r} names no file; expected FILE:NAME")
    if not path.is_file():
        raise ValueError(f"there is no file {file!r} here; expected FILE:NAME")
    loader = SourceFileLoader(path.stem, str(path))  # whatever the file's name ends in
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses look for the types of their fields
    sys.path.append(str(path.parent.resolve()))
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file}{_line(error, path)}: {type(error).__name__}: {error}") from error
    return module, name


def _line(error: Exception, path: Path) -> str:
    """The line of the file at which it failed."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def check_variables() -> None:
    """Raises ValueError for a variable of the environment with an invalid value (knobs.py), ScheduleError
    for unknown features and schedule words; one that nothing reads is named."""
    knobs.name_unknown()
    for knob in knobs.KNOBS:
        with suppress(OSError, RuntimeError):  # an unreachable cache, which is reported at its use
            knob.checked()
    if reason := why_no_switches():
        raise ValueError(reason)
    schedule_of_user()
