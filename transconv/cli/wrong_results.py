"""Wrong results. ``bisect``: the first stage that changes what a kernel means, and the rule that did it.
``report-wrong``: a report of a wrong result that can be sent."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from transconv.cli import run
from transconv.cli.arguments import computations, options, ranges
from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop
from transconv.support import TransconvError
from transconv.target import Target, detect
from transconv.verify import any_size
from transconv.verify.bisect.stage_search import PARTS, Blame, blame, blame_compute
from transconv.verify.bisect.subject import PRODUCTS
from transconv.verify.machine import device, executable


def add_bisect(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "bisect",
        "find the stage that makes a kernel wrong",
        "Runs every stage of the kernels of a problem, or of a computation's text, on the same integer\n"
        "data and compares the results with the exact answer. The interpreter of the IR runs the\n"
        "computation and the kernel after each pass, Triton's interpreter runs the emitted source, and\n"
        "the GPU runs the compiled kernel. Prints the first wrong stage, what it changed, and the\n"
        "unsound rule of the simplifier, if one is the cause. The exit code is 1 if a stage is wrong.",
        (
            "bisect mb2ic8ih14oc16oh14kh3ph1 --prop bwd_d",
            "bisect mb1ic16ih9oc32oh5kh3sh2ph1 --epilogue bias+relu --target gfx942",
            "bisect bench/computes/row_sum.txt --target sm_90 --schedule red=split",
        ),
        bisect,
    )
    options.add_problem(made)
    made.option(
        "--sizes",
        "N=8,...",
        "of a computation whose sizes are arguments: the sizes to look at (default: the least)",
    )
    options.add_props(made, "all")
    options.add_chip(made)
    options.add_epilogue(made)
    options.add_schedule(made)
    made.add_argument(
        "--seed", type=ranges.at_least(0), default=0, help="the seed of the data (default: 0)"
    )
    made.option(
        "--limit",
        "N",
        f"replace a problem of more multiplications by a smaller one (default: {PRODUCTS})",
        PRODUCTS,
        ranges.at_least(1),
    )
    made.option("--parts", "P", f"the stages to run (default: {','.join(PARTS)})", ",".join(PARTS))
    made.flag("--here", "interpret in this process, not in a child process")
    made.flag("--json", "print one JSON object per direction")


def bisect(words: argparse.Namespace) -> int:
    parts = words.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(
            f"--parts {words.parts}: unknown {', '.join(unknown)}; expected some of {', '.join(PARTS)}"
        )
    target, schedule = options.chip(words.target), options.schedule(words)
    blames: Iterator[Blame]
    if made := computations.asked(words, sizes=True):
        blames = (
            blame_compute(
                compute,
                target,
                schedule,
                seed=words.seed,
                limit=words.limit,
                parts=parts,
                sizes=_sizes(compute, words.sizes),
                isolated=not words.here,
            )
            for compute in made
        )
    else:
        problem = options.problem(words)
        blames = (
            blame(
                problem,
                prop,
                target,
                schedule,
                options.epilogue(words),
                seed=words.seed,
                limit=words.limit,
                parts=parts,
                isolated=not words.here,
            )
            for prop in options.props(words)
        )
    bad = 0
    for found in blames:
        bad += bool(found)
        if words.json:
            print(json.dumps(asdict(found)))
        else:
            print(found.text)
            print(f"  {'WRONG in stage ' + found.stage if found else 'every stage is right'}\n")
    return 1 if bad else 0


def _sizes(compute: Compute, text: str | None) -> dict[str, int] | None:
    return any_size.asked(compute, text)[0] if compute.named and text else None


def add_report(verbs: object) -> None:
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
    made.option("--out", "FILE", "the report (default: wrong_result.zip)", "wrong_result.zip")


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
