"""``report-wrong``: makes a report of a wrong result that can be sent."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from transconv.cli import run
from transconv.cli.arguments import options
from transconv.conv import Prop
from transconv.support import TransconvError
from transconv.target import Target, detect
from transconv.verify.machine import device, executable

if TYPE_CHECKING:
    from transconv.conv import ConvProblem


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "report-wrong",
        "make a report of a wrong result that can be sent",
        "Computes a function by kernels and by torch. Where they differ, makes the inputs smaller as\n"
        "long as they do, and writes both results, the inputs, the versions and the kernels to a zip\n"
        "file. The file of Python has a function, computed (another one: FILE:NAME), and inputs, a\n"
        "tuple, or calls, a list of them of which the last is wrong; dynamic = True where sizes are\n"
        "names. A wrong first result of a graph leaves such a file, which the warning names. Of a\n"
        "problem, its convolution is run as `run` does. The exit code is 1 if a result is wrong.",
        (
            "report-wrong wrong.py",
            "report-wrong wrong.py:normalized --out norm.zip",
            "report-wrong mb1ic8ih7oc8oh7kh3ph1 dt=f16",
        ),
        report_wrong,
    )
    made.add_argument(
        "case",
        nargs="+",
        metavar="FILE.py[:NAME]|PROBLEM",
        help="a file of Python, or a problem in benchdnn's grammar",
    )
    made.add_argument(
        "--out", metavar="FILE", default="wrong_result.zip", help="the report (default: wrong_result.zip)"
    )


def report_wrong(words: argparse.Namespace) -> int:
    text = words.case[0]
    if len(words.case) == 1 and (text.endswith(".py") or ".py:" in text):
        return _of_function(text if ".py:" in text else f"{text}:computed", Path(words.out))
    return _of_problem(options.described(words.case), Path(words.out))


def _of_function(text: str, to: Path) -> int:
    """A function of a file."""
    device()  # before Triton is imported
    from transconv.graph.verification.wrong_report import written, wrong_result

    module, name = options.loaded(text)
    function = getattr(module, name, None)
    calls = getattr(module, "calls", None) or [getattr(module, "inputs", None)]
    if not callable(function) or not all(isinstance(call, (tuple, list)) for call in calls):
        raise ValueError(
            f"{text}: expected a function {name}, and inputs, a tuple of its arguments, or "
            "calls, a list of such tuples"
        )
    found = wrong_result(function, [tuple(c) for c in calls], getattr(module, "dynamic", None))
    if found is None:
        print(f"right: {name} is as torch computes it")
        return 0
    print(f"wrong: {found.why}\n{written(found, inspect.getsource(function), to)} has the report")
    return 1


def _of_problem(problem: ConvProblem, to: Path) -> int:
    """A convolution, in each direction."""
    where = device()
    from transconv.graph.verification.wrong_report import versions

    target = executable(detect() if where == "cuda" else Target.parse("sm_90"), where)
    wrong = []
    for prop in Prop:
        try:
            found = run.execute(problem, prop, target, time=False)
        except TransconvError as error:
            print(f"{prop.value}: no kernel: {error}")
            continue
        print(f"{prop.value}: {found.problem or 'right'}")
        if found.problem:
            wrong.append(
                f"## {prop.value}\n\n{found.problem}; the largest error is "
                f"{found.max_error:.4g}. `transconv run {problem} --prop {prop.value}` "
                f"repeats it.\n\n```text\n{found.compiled.schedule}\n\n"
                f"{found.compiled.source}\n```\n"
            )
    if not wrong:
        return 0
    to = to.with_suffix(".md")
    to.write_text(
        f"# A wrong result of transconv\n\n`{problem}`\n\n```text\n{versions()}\n```\n\n"
        + "\n".join(wrong)
    )
    print(f"{to} has the report; transconv bisect names the stage that is to blame")
    return 1
