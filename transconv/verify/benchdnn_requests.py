"""Parses benchdnn's options and batch files into requests.

benchdnn is a state machine (see problem_lists.py): options set lists of alternatives, a problem is
asked for with every combination of them, ``--reset`` puts the options back. What a request means
here, or why it means nothing, is said by benchdnn_job.py; this file knows words only."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from transconv.conv import KEYS, parse_descriptor, take
from transconv.support import ProblemError, ScheduleError, knobs, nearest
from transconv.target import Target

DIRECTIONS = ("FWD_B", "FWD_D", "FWD_I", "BWD_D", "BWD_W", "BWD_WB")
# Options with alternatives, by their defaults; the first varies slowest. Those after ``mb`` that
# are not attributes are ours.
OPTIONS = {
    "dir": "FWD_B",
    "dt": "f32",
    "cfg": "",
    "bia-dt": "",
    "tag": "",
    "stag": "any",
    "wtag": "any",
    "dtag": "any",
    "strides": "",
    "alg": "DIRECT",
    "mb": "0",
    "attr-scales": "",
    "attr-zero-points": "",
    "attr-post-ops": "",
    "attr-fpmath": "strict",
    "attr-acc-mode": "strict",
    "attr-rounding-mode": "",
    "attr-deterministic": "false",
    "attr-dropout": "",
    "epilogue": "",
    "data": "exact+float",
    "misalign": "0",
    "strided": "",
    "seed": "0",
    "target": "",
    "schedule": "",
}
FORMER = {"config": "schedule"}  # names that are read for one release
MODES = "LIRCBPFS"
LARGEST = 2**63 - 1
ENGINES = ("gpu", "cpu", "numpy", "opencl", "auto")
# Options of benchdnn's files that change no result here, and why. Each is reported once, at the end.
WITHOUT_EFFECT = {
    "impl": "there is one implementation",
    "skip-impl": "there is one implementation",
    "global-impl": "there is one implementation",
    "global-skip-impl": "there is one implementation",
    "check-ref-impl": "there is one implementation",
    "attr-scratchpad": "torch's allocator makes every workspace",
    "allow-enum-tags-only": "tags of any form are read",
    "ctx-init": "contexts of threads are oneDNN's",
    "ctx-exe": "contexts of threads are oneDNN's",
    "fast-ref": "the reference is the same on every machine",
    "fast-ref-gpu": "the reference is the same on every machine",
    "mem-check": "problems that do not fit are skipped with that reason",
    "memory-kind": "tensors are torch's",
    "inplace": "a convolution is never in place",
    "attr-same-pd-check": "layouts are given, never chosen",
    "cpu-isa-hints": "kernels are made for the device at hand",
    "buffer-prefill": "every buffer is filled with poison",
    "stream-kind": "launches go to torch's stream",
    "num-streams": "launches go to torch's stream",
    "execution-mode": "kernels are launched directly",
    "canonical": "lines are printed as they are",
    "perf-template": "nothing is timed",
    "max-ms-per-prb": "nothing is timed",
    "fix-times-per-prb": "nothing is timed",
    "repeats-per-prb": "nothing is timed",
    "cold-cache": "nothing is timed",
    "summary": "the summary is always printed",
    "verbose": "",
    "conv": "",
    "test-start": "",
    "start": "",
}
_SPELLED = re.compile(rf"((?:{'|'.join(sorted(KEYS, key=len, reverse=True))})\d+|_)+(n\S*)?")
_COMMA = re.compile(r",(?![^(]*\))")  # not inside of strides(8,4,1)


@dataclass(frozen=True, slots=True)
class BenchdnnRequest:
    """One problem as it was asked for: the descriptor, one alternative of each option, the mode,
    and where it was read (``file:line``)."""

    descriptor: str
    options: tuple[tuple[str, str], ...]
    mode: str = "C"
    engine: str = "auto"
    where: str = field(default="", compare=False)

    def __getitem__(self, option: str) -> str:
        return dict(self.options)[option]

    def words(self, schedule: str = "") -> list[str]:
        """The arguments of ``check`` that ask for this alone, with another schedule if one is given:
        every option that is not at its default, and the descriptor."""
        chosen = dict(self.options) | ({"schedule": schedule} if schedule else {})
        made = [f"--{name}={value}" for name, value in chosen.items() if value != OPTIONS[name]]
        made = ([f"--mode={self.mode}"] if self.mode != "C" else []) + made
        made = ([f"--engine={self.engine}"] if self.engine != "auto" else []) + made
        return [*made, self.descriptor]

    def repeat(self, schedule: str = "") -> str:
        """The shell command that checks this again, with the passes that are switched off now."""
        switches = ",".join("-+"[on] + name for name, on in knobs.passes())
        variable = f"{knobs.passes.name}={shlex.quote(switches)} " if switches else ""
        return variable + shlex.join(["transconv", "check", *self.words(schedule)])


def _direction(word: str) -> str:
    word = word.upper()  # oneDNN's files have both
    if word and word not in DIRECTIONS:
        raise ProblemError(f"direction '{word}' is unknown; expected one of {' '.join(DIRECTIONS)}")
    return word


def _number(most: int) -> Callable[[str], str]:
    def read(word: str) -> str:
        text = word or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise ProblemError(
                f"'{word}' is no number up to {most}; expected a whole number, 0 for the default"
            )
        return word

    return read


def _one_of(*legal: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word and word not in legal:
            raise ProblemError(f"'{word}' is unknown; expected one of {' '.join(legal)}")
        return word

    return read


def _target(word: str) -> str:
    try:
        Target.parse(word or "sm_90")
    except ScheduleError as error:
        raise ProblemError(str(error)) from error
    return word


# Options whose words are refused where they are read; others are judged with the problem.
READERS: dict[str, Callable[[str], str]] = {
    "dir": _direction,
    "mb": _number(LARGEST),
    "misalign": _number(1 << 20),
    "seed": _number(LARGEST),
    "alg": _one_of("DIRECT", "WINO", "AUTO", "direct", "wino", "auto"),
    "data": _one_of("exact", "float", "exact+float"),
    "strided": _one_of("rows", "steps", "expanded"),
    "attr-deterministic": _one_of("true", "false"),
    "target": _target,
}


@dataclass(slots=True)
class Driver:
    """The state of the options, and those read that have no effect here (``remarks``)."""

    options: dict[str, list[str]] = field(default_factory=dict)
    mode: str = "C"
    match: str = ""
    engine: str = "auto"
    start: int = 0
    remarks: dict[str, str] = field(default_factory=dict)
    _seen: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Put the options of problems back; mode, match and engine are the run's and stay."""
        self.options = {name: [default] for name, default in OPTIONS.items()}

    def requests(self, words: Iterable[str]) -> Iterator[BenchdnnRequest]:
        """Everything that the words of a command line ask for, in order. Raises ProblemError with
        file and line for what cannot be read, OSError for a batch file that is not there."""
        for place, word in enumerate(words, start=1):
            yield from take(word, self.set, self.ask, None, f"argument {place}")

    def set(self, name: str, value: str) -> None:
        """Take one option. Raises ProblemError if it is unknown or its value unreadable."""
        if name == "reset":
            self.reset()
        elif (name := FORMER.get(name, name)) in OPTIONS:
            read = READERS.get(name, str)
            self.options[name] = [read(word) or OPTIONS[name] for word in _COMMA.split(value)]
        elif name == "mode":
            self.mode = _mode(value)
        elif name == "match":
            self.match = _pattern(value)
        elif name == "engine":
            self.engine = _one_of(*ENGINES)(value.partition(":")[0]) or "auto"
        elif name in ("start", "test-start"):
            self.start = int(_number(LARGEST)(value) or 0)
        elif name in WITHOUT_EFFECT:
            if reason := WITHOUT_EFFECT.get(name, ""):
                self.remarks[f"--{name}={value}"] = reason
        else:
            raise ProblemError(
                f"option '--{name}' is unknown; the options of a problem are "
                f"{' '.join('--' + n for n in ('batch', 'reset', *OPTIONS))}"
                f"{nearest('--' + name, ['--' + n for n in OPTIONS])}"
            )

    def ask(self, text: str, where: str) -> Iterator[BenchdnnRequest]:
        """One request for every combination of the current alternatives."""
        if re.fullmatch(r"-v\d*", text):  # benchdnn's other spelling of --verbose
            return
        if not _SPELLED.fullmatch(text):
            parse_descriptor(text)  # raises; the caller adds file and line
        for values in itertools.product(*self.options.values()):
            made = BenchdnnRequest(
                text, tuple(zip(self.options, values, strict=True)), self.mode, self.engine, where
            )
            if not self.match or re.search(self.match, shlex.join(made.words())):
                self._seen += 1
                if self._seen > self.start:
                    yield made


def _mode(word: str) -> str:
    letters = word.upper()
    if not letters or set(letters) - set(MODES):
        raise ProblemError(
            f"mode '{word}' is unknown; expected letters of {MODES}: list, "
            "initialize, run, correctness, bitwise, performance, fast, simulate"
        )
    return letters


def _pattern(word: str) -> str:
    try:
        re.compile(word)
    except re.error as error:
        raise ProblemError(f"the pattern '{word}' cannot be read: {error}") from error
    return word
