"""The command line: ``python -m transconv show|run|check|fuzz|...``; each verb explains itself.

Exit codes: 0 all is well, 1 something is wrong with a kernel, 2 something is wrong with the command
(one line on standard error says what, where, and what is expected), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transconv.cli import bisect, check, demo, fuzz, matrix, options, run, show, tune, variables
from transconv.cli import compile as compile_verb
from transconv.cli import words as words_verb
from transconv.errors import StageError, TransconvError
from transconv.verify.stopping import code, terminable

VERBS = (show, run, check, fuzz, compile_verb, matrix, demo, bisect, tune, words_verb)


def parser() -> argparse.ArgumentParser:
    """All verbs with their options."""
    made = options.Parser(
        prog="python -m transconv",
        description="Convolutions described once and transpiled into Triton kernels.")
    verbs = made.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS:
        module.add_to(verbs)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = parser().parse_args(arguments)
    try:
        with terminable():
            variables.check()
            return int(words.action(words))
    except StageError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # a pager was closed
        sys.stderr.close()
        return 0
    except (TransconvError, OSError, ValueError) as error:
        print(options.refusal(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        return code(stop)


if __name__ == "__main__":
    sys.exit(main())
