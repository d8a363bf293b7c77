"""The command line: ``transconv show|run|check|fuzz|...``; ``--help`` explains each verb.

Exit codes: 0 all is well, 1 something is wrong with a kernel, 2 something is wrong with the command
(one line on standard error says what, where, and what is expected), 130 Ctrl-C, 143 SIGTERM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from transconv.cli.arguments import installation
from transconv.support import StageError, TransconvError, __version__, one_line

VERBS = tuple(
    "show report run check fuzz compile kernel export matrix certify demo bisect tune prepare cache "
    "sharded words doctor report-wrong".split()
)
# Those that are not in a file of their name, and what adds them.
ELSEWHERE = {
    "compile": ("export", "add_compile"),
    "demo": ("run", "add_demo"),
    "bisect": ("wrong_results", "add_bisect"),
    "report-wrong": ("wrong_results", "add_report"),
    "cache": ("prepare", "add_cache"),
    "words": ("show", "add_words"),
    "sharded": ("agreement", "add_to"),
    "certify": ("agreement", "add_certify"),
}


def parser() -> argparse.ArgumentParser:
    """All verbs with their options. ImportError where a library that they need is missing."""
    from transconv.cli.arguments import options

    made = options.Parser(
        prog="transconv",
        description="Generates Triton kernels that people can read. A convolution is given as one line, "
        "any other computation as a file of a few lines (docs/computations.md).",
    )
    made.add_argument("--version", action="version", version=f"transconv {__version__}")
    verbs = made.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        file, add = ELSEWHERE.get(name, (name.replace("-", "_"), "add_to"))
        getattr(import_module(f"transconv.cli.{file}"), add)(verbs)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        made = parser()
    except ImportError as error:
        return _without(error, given)
    return _run(made.parse_args(given))


def _without(error: ImportError, given: Sequence[str]) -> int:
    """Run while a library cannot be imported: ``doctor`` reports it, other verbs are refused."""
    if list(given[:1]) == ["doctor"]:
        return installation.printed(installation.incomplete(error), "--json" in given)
    print(
        one_line(f"{type(error).__name__}: {error}; transconv doctor says what is missing"),
        file=sys.stderr,
    )
    return 2


def _run(words: argparse.Namespace) -> int:
    from transconv.cli.arguments.options import check_variables, refusal
    from transconv.verify.machine import code, terminable

    try:
        with terminable():
            if words.verb != "doctor":  # which reports wrong variables among its findings
                check_variables()
            return int(words.action(words))
    except StageError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # a pager was closed
        sys.stderr.close()
        return 0
    except (TransconvError, OSError, ValueError) as error:
        print(refusal(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        return code(stop)


if __name__ == "__main__":
    sys.exit(main())
