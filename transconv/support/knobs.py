"""Environment variables, lowest layer: the one typed table, and the only file that reads them.

Each knob is called to read it: ``knobs.verify()`` reads the environment at each call, so a test or a
notebook may change a variable at any time. A value that is not legal is warned about once and counts
as not set, so that a program continues; the command line calls ``checked`` first, which raises a
ValueError with the legal values. An empty value counts as not set.

Beside them: the versions of the package and of the installed Triton, which is found without importing it.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

__version__ = "0.1.0"

DIRECT = "3.6."
"""The release of Triton whose launch function is called, and whose descriptors are encoded, directly."""


def is_direct() -> bool:
    """Whether the installed Triton's kernels are started without its wrapper, with descriptors that are
    encoded here: other releases have other arguments."""
    return triton_version().startswith(DIRECT)


def has_wide_views() -> bool:
    """Whether the installed Triton takes a view of shared memory that is larger than what it is a view of,
    as steps that share boxes need (``slide=``): 3.8 and 3.9 refuse it."""
    return triton_release() < (3, 8)


def triton_release() -> tuple[int, ...]:
    """The release of Triton that is installed, as (3, 7, 1); empty if there is none."""
    return tuple(int(n) for n in re.findall(r"\d+", triton_version())[:3])


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


T = TypeVar("T")
log = logging.getLogger("transconv.knobs")


@dataclass(frozen=True, slots=True)
class Knob(Generic[T]):
    """One variable: its legal values and default in words, and how its text is read (``read``
    raises ValueError for what is not legal)."""

    name: str
    legal: str
    default: str
    meaning: str
    read: Callable[[str], T]
    former: str = ""  # the name that the variable had before

    def __call__(self) -> T:
        """The current value; for an invalid text the default, and one warning."""
        try:
            return self.checked()
        except ValueError as error:
            ignore(str(error))
            return self.read(self.default)

    def checked(self) -> T:
        """The current value. Raises ValueError naming the variable, its text and the legal values."""
        name, text = self.given
        try:
            return self.read(text or self.default)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not legal; expected {self.legal}") from None

    @property
    def given(self) -> tuple[str, str]:
        """The variable that is set, by its name or the former one, and its text; empty: not set."""
        for name in filter(None, (self.name, self.former)):
            if text := os.environ.get(name, "").strip():
                return name, text
        return self.name, ""


@functools.cache
def ignore(reason: str) -> None:
    """Warn once that the value of a variable counts as not set."""
    log.warning("%s%s it counts as not set", reason, "" if reason.endswith("?") else ";")


def forget() -> None:
    """Give every warning again."""
    ignore.cache_clear()


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read


def _flag(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


def _workspace(text: str) -> int | None:
    pairs = re.findall(r":(\d+):(\d+)", text)  # as torch reads it, which refuses nothing
    if text and not pairs:
        raise ValueError(text)
    return sum(1024 * int(size) * int(count) for size, count in pairs) if pairs else None


def _triton_flag(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")  # as Triton reads it, which refuses nothing


def _level(text: str) -> int:
    return int(_one_of("0", "1", "2", "3", "4")(text))


def _folder(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ValueError(text) from error
    if path.exists() and not path.is_dir():
        raise ValueError(text)
    return path


def _optional_folder(text: str) -> Path | None:
    try:
        return _folder(text) if text else None
    except OSError as error:  # its name is too long, its parents are closed to us
        raise ValueError(text) from error


def _cache_folder(text: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return _folder(text) if text else Path(f"{home or '~/.cache'}/transconv").expanduser()


def _key_file(text: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME", "")
    return Path(text or f"{home or '~/.local/state'}/transconv/key").expanduser()


def _switch_or_file(text: str) -> str:
    try:
        if text in ("0", "1") or Path(text).is_file():
            return text
    except OSError as error:
        raise ValueError(text) from error
    raise ValueError(text)


def _switches(text: str) -> tuple[tuple[str, bool], ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(re.fullmatch(r"[+-][a-z][a-z0-9_]*", word) for word in words):
        raise ValueError(text)
    return tuple((word[1:], word[0] == "+") for word in words)


debug = Knob(
    "TRANSCONV_DEBUG",
    "0, 1, 2, 3 or 4",
    "0",
    "1: cache misses and chosen schedules; 2: also the computation and the Triton source; "
    "3: also the IR after each pass that changed it; 4: everything",
    _level,
)
dump = Knob(
    "TRANSCONV_DUMP",
    "a folder",
    "",
    "where the text of every stage is written; not set: nowhere",
    _optional_folder,
)
cache = Knob(
    "TRANSCONV_CACHE",
    "a folder",
    "",
    "where readable kernels and tuning results are kept; not set: transconv in the user's cache folder",
    _cache_folder,
)
key = Knob(
    "TRANSCONV_KEY",
    "a file",
    "",
    "where the key lies with which records of the cache that are executed are sealed; it is made "
    "at the first use; not set: transconv/key in the user's state folder",
    _key_file,
)
verify = Knob(
    "TRANSCONV_VERIFY",
    "0 or 1",
    "0",
    "1: check the well-formedness rules of the IR, and of its level, after each pass",
    _flag,
)
schedule = Knob(
    "TRANSCONV_SCHEDULE",
    "the text of a schedule",
    "",
    "use this schedule for every problem; not set: heuristics and tuning choose",
    str,
    former="TRANSCONV_CONFIG",
)
fallback = Knob(
    "TRANSCONV_FALLBACK",
    "silent, warn or error",
    "warn",
    "what happens when a call has to be computed by torch",
    _one_of("silent", "warn", "error"),
)
compile = Knob(
    "TRANSCONV_COMPILE",
    "auto, now, background or never",
    "auto",
    "what a call does whose kernel is not compiled yet: now: it compiles, and waits; "
    "background: torch answers while processes compile; never: torch answers; auto: background "
    "on a GPU, unless the same bits are asked for or torch may not answer, otherwise now",
    _one_of("auto", "now", "background", "never"),
)
sizes = Knob(
    "TRANSCONV_SIZES",
    "auto, exact or any",
    "auto",
    "exact: a kernel is made for each size of a layer; any: batch and image sizes are arguments "
    "of a few kernels for each layer, and a new size compiles nothing; auto: exact for the first "
    "size of a layer and for those that are called often, any for the others, as far as torch "
    "may answer while kernels are compiled, otherwise exact",
    _one_of("auto", "exact", "any"),
)
passes = Knob(
    "TRANSCONV_PASSES",
    "passes to switch on or off, such as -cse,+hoist",
    "",
    "passes that run, or not, against their default",
    _switches,
)
features = Knob(
    "TRANSCONV_FEATURES",
    "features of the chip to switch on or off, such as -wgmma",
    "",
    "what kernels may use of a chip, against its record in transconv/target",
    _switches,
)
trust = Knob(
    "TRANSCONV_TRUST",
    "check, always or never",
    "check",
    "check: the first result of every kernel is compared at sampled points with f64 sums, and verdicts "
    "are kept; those of compiled graphs also with torch's operators; always: once in every process, and "
    "interpreted kernels too; never: no kernel is compared, and no verdict is read",
    _one_of("check", "always", "never"),
)
tuned = Knob(
    "TRANSCONV_TUNED",
    "0, 1 or the file of a tuning database",
    "1",
    "1: schedules that tuning found, in the user's cache or in the package, are preferred; "
    "a file: its rows before those; 0: the estimate alone chooses",
    _switch_or_file,
)
interpret = Knob(
    "TRITON_INTERPRET",
    "0 or 1",
    "0",
    "Triton's own: 1 runs kernels in its interpreter, on CPU tensors",
    _triton_flag,
)
products = Knob(
    "CUBLAS_WORKSPACE_CONFIG",
    "pairs of KiB and a count, such as :4096:2:16:8",
    "",
    "torch's own: the workspace of its library of products, which counts within a bound of memory; not "
    "set: torch's default for the chip",
    _workspace,
)
opencl = Knob(
    "TRANSCONV_OPENCL",
    "a folder",
    "",
    "Triton's release for Intel GPUs (pip install --target): what would be interpreted is compiled "
    "by it, for the Max 1550, and executed on the CPU through OpenCL; not set: Triton's interpreter",
    _optional_folder,
)

KNOBS: tuple[Knob[Any], ...] = (
    debug,
    dump,
    cache,
    key,
    verify,
    schedule,
    fallback,
    compile,
    sizes,
    passes,
    features,
    trust,
    tuned,
    interpret,
    products,
    opencl,
)


def given(*prefixes: str) -> dict[str, str]:
    """The variables of the environment whose names begin so and whose values are not empty, by name."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(prefixes) and text.strip()
    }


OF_BENCH = ("TRANSCONV_COMMIT", "TRANSCONV_SUITE", "TRANSCONV_DIST")  # bench and tests read them


def unknown(name: str) -> str:
    """Of a variable that begins like ours and that nothing reads: which ones there are, the nearest if one
    is near; empty for those that are read."""
    ours = [k.name for k in KNOBS if k.name.startswith("TRANSCONV_")]
    if name in (*ours, *(k.former for k in KNOBS), *OF_BENCH):
        return ""
    begin = "TRANSCONV_"  # which says nothing about what is meant
    near = difflib.get_close_matches(name[len(begin) :], [n[len(begin) :] for n in ours], 1)
    return f"did you mean {begin}{near[0]}?" if near else f"known are {' '.join(ours)}"


def name_unknown() -> None:
    """Warn once about each variable that begins like ours and that nothing reads."""
    for name, text in given("TRANSCONV_").items():
        if hint := unknown(name):
            ignore(f"{name}={text}: there is no such variable; {hint}")


def use_interpreter() -> None:
    """Have Triton interpret kernels on CPU tensors. Only works before triton is imported."""
    os.environ[interpret.name] = "1"


def use_opencl() -> None:
    """Have what would be interpreted executed through OpenCL, by the release of Triton in the folder
    that is set, or that ``make matrix-xpu`` makes."""
    use_interpreter()
    os.environ.setdefault(opencl.name, ".xpu")


def adopt(environment: Mapping[str, str]) -> None:
    """Set variables of this process's environment, as a worker does with those of its parent."""
    os.environ.update(environment)


def child_environment(changes: Mapping[str, str | None], python_path: str) -> dict[str, str]:
    """This process's environment for a child: with changes (None takes a variable away) and with
    ``python_path`` before all other places that modules come from."""
    made = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
    for name in (k for k, v in changes.items() if v is None):
        made.pop(name, None)
    made["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, made.get("PYTHONPATH", "")]))
    return made


def one_gpu(at: int, hip: bool) -> dict[str, str]:
    """The variable with which a process sees only the GPU that has the number ``at`` in this one. ``hip``:
    whether it is one of AMD."""
    name = "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"
    seen = os.environ.get(name, "")
    return {name: seen.split(",")[at].strip() if seen else str(at)}


def local_processes() -> int:
    """How many processes of one program a launcher such as torchrun has started on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def table() -> str:
    """All knobs as a Markdown table, for the documentation."""
    rows = [
        f"| `{k.name}` | {k.legal} | {f'`{k.default}`' if k.default else 'not set'} | {k.meaning} |"
        for k in KNOBS
    ]
    head = ["| variable | legal values | default | meaning |", "|---|---|---|---|"]
    return "\n".join(head + rows)
