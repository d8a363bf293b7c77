"""``show``, ``run``, ``compile`` and ``check`` of a computation that is given as text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from transconv.cli.arguments import options
from transconv.compute import Alone, Compute, differentiate, parse
from transconv.conv import ConvProblem, any_size, marked
from transconv.runtime import Plan, build_compute, plan_steps
from transconv.schedule import Schedule
from transconv.support import AddressError, ComputeError, ScheduleError
from transconv.target import Target, detect
from transconv.verify.machine import device, executable

BEGINS = re.compile(r"(?m)^(?=compute\s)")  # where a computation's lines begin


OF_CONVOLUTIONS = ("dtype", "layout", "epilogue", "times")  # options


def asked(words: argparse.Namespace, sizes: bool = False) -> list[Compute]:
    """The computations of a command line, as ``given``; ``sizes``: for a verb that takes sizes as
    arguments. Raises ComputeError for options of convolutions beside a text."""
    if sizes and has_sizes(words.problem):
        text, names = marked(" ".join(words.problem))
        problem, epilogue = options.dressed(ConvProblem.parse(text), words), options.epilogue(words)
        return [c for prop in options.props(words) for c in any_size(problem, prop, names, epilogue)]
    found = given(words.problem, sizes)
    expect_sizes(words, found)
    if found:
        of_texts(words, found[0])
    return found


def expect_sizes(words: argparse.Namespace, found: Sequence[Compute]) -> None:
    """Raises ComputeError for ``--sizes`` of what has no sizes that are arguments."""
    if (said := getattr(words, "sizes", None)) and not any(c.named for c in found):
        what = found[0].name if found else " ".join(words.problem)
        raise ComputeError(
            f"--sizes {said} has nothing to set: the sizes of {what} are numbers; expected a computation "
            "with a line of sizes, or a problem with question marks, such as mb2?ic8ih9?oc8oh9kh3ph1"
        )


def of_texts(words: argparse.Namespace, compute: Compute) -> None:
    """Raises ComputeError for options of convolutions."""
    said = [o for o in OF_CONVOLUTIONS if getattr(words, o, "")]
    if said or words.prop != words.usual_prop:
        raise ComputeError(
            f"--{[*said, 'prop'][0]} is about convolutions; {compute.name} is given as text"
        )


def has_sizes(texts: Sequence[str]) -> bool:
    """Whether words are a convolution whose sizes are arguments."""
    whole = " ".join(texts)
    return "?" in whole and "compute" not in whole and not any(isfile(t) for t in texts)


def given(texts: Sequence[str], sizes: bool = False) -> list[Compute]:
    """The computations named by words of a command line: files that begin with ``compute``, which may
    hold several, or such texts themselves; none if the words are something else. Raises ComputeError,
    also for sizes that are arguments where a verb does not take them (``sizes``)."""
    found: list[Compute] = []
    other = ""
    for text in texts:
        word, before = text, len(found)
        if isfile(text):
            with Path(text).open(encoding="utf-8", errors="replace") as file:
                text = file.read(1 << 20)
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if lines and lines[0].split()[0] == "compute":
            found += [parse(part) for part in BEGINS.split("\n".join(lines)) if part.strip()]
        other = other or word * (len(found) == before)
    if found and other:
        raise ComputeError(
            f"'{other}' is no computation, as {found[0].name} is; expected computations or "
            "problems, not both"
        )
    if not sizes and (sized := next((c for c in found if c.named), None)) is not None:
        raise ComputeError(
            f"{sized.name}: sizes that are arguments ({sized.named}); this verb takes numbers"
        )
    return found


def gradients(computes: Sequence[Compute], of: str) -> list[Compute]:
    """The computations of the gradients of a tensor, or of ``all`` that are read. Raises ComputeError for
    a tensor that is not read, and for an operation without a derivative."""
    return [c for made in computes for c in differentiate(made, () if of == "all" else (of,)).computes]


def of_kernels(compute: Compute, target: Target) -> list[Compute]:
    """The computations of its kernels on a target that schedules are chosen for: without those that add
    parts of sums. Raises ScheduleError where no kernel computes it."""
    steps = plan_steps(Alone(compute), target)
    return list(dict.fromkeys(c for c, _ in steps if c.does == "compute"))


def run(compute: Compute, words: argparse.Namespace) -> int:
    """Execute on exact data, on the GPU or in Triton's interpreter."""
    return _verified(compute, words, ("exact",))


def check(compute: Compute, words: argparse.Namespace) -> int:
    """Execute on exact and on float data, and interpret the kernel after every pass."""
    return _verified(compute, words, ("exact", "float"))


def check_gradients(compute: Compute, of: str, words: argparse.Namespace) -> int:
    """Compare gradients with differences of the results, and check their kernels."""
    from transconv.verify.computation import wrong_slope

    made = gradients([compute], of)
    said = wrong_slope(compute)
    print(f"gradients of {compute.name}, in f64\n  {'WRONG' if said else 'right'}  {said}".rstrip())
    return max([int(bool(said)), *(check(c, words) for c in made)])


def _verified(compute: Compute, words: argparse.Namespace, kinds: Sequence[str]) -> int:
    from transconv.verify import computation

    where = device()
    named = getattr(words, "target", None) or "auto"
    target = detect() if named == "auto" else Target.parse(named)
    schedule = Schedule.parse(words.schedule) if getattr(words, "schedule", None) else None
    made = build_compute(compute, target, schedule)
    print(f"{compute.name} on {where}: {made.schedule}")
    if compute.named:
        return _at_sizes(compute, words, made, kinds)
    found = []
    try:
        run = build_compute(compute, executable(target, where), schedule)
        found = [computation.ComputationCase(compute, kind).launched(run, where) for kind in kinds]
    except AddressError:
        raise
    except ScheduleError as error:  # an explicit kernel, which Triton does not interpret
        print(f"  not run on {where}: {error}")
    for judged in found:
        print(
            f"  {'WRONG' if judged.problem else 'right'}  {judged.data:<6} "
            f"max error {judged.max_error:.3g}  {judged.problem}".rstrip()
        )
    wrong = any(j.problem for j in found)
    if len(kinds) > 1:
        for stage, judged in computation.after_every_pass(compute, made):
            print(f"  {'WRONG' if judged.problem else 'right'}  after {stage}  {judged.problem}".rstrip())
            wrong |= bool(judged.problem)
    return 1 if wrong else 0


def _at_sizes(compute: Compute, words: argparse.Namespace, made: Plan, kinds: Sequence[str]) -> int:
    """The same where sizes are arguments, with one kernel: at ``--sizes``, or at the examples and the
    limits of the requirements."""
    from transconv.verify import any_size, computation

    where = device()
    schedule = Schedule.parse(words.schedule) if getattr(words, "schedule", None) else None
    run = build_compute(compute, executable(made.target, where), schedule)
    wrong = False
    for sizes in any_size.asked(compute, getattr(words, "sizes", None)):
        said = " ".join(f"{n}={v}" for n, v in sizes.items())
        found = [
            (f"{kind} data", computation.ComputationCase(compute.at(**sizes), kind).launched(run, where))
            for kind in kinds
        ]
        if len(kinds) > 1:
            found += [
                (f"after {stage}", judged)
                for stage, judged in computation.after_every_pass(compute, made, sizes)
            ]
        for what, judged in found:
            print(f"  {'WRONG' if judged.problem else 'right'}  {said}  {what}  {judged.problem}".rstrip())
            wrong |= bool(judged.problem)
    return 1 if wrong else 0


def beside_torch(texts: Sequence[str], words: argparse.Namespace) -> int:
    """The results of a convolution's kernels for any size, in all directions, beside answers that no text
    of a computation is part of."""
    from transconv.verify import any_size

    text, names = marked(" ".join(texts))
    target = executable(Target.parse(words.target) if words.target else detect(), device())
    wrong = False
    for line, right in any_size.beside_torch(ConvProblem.parse(text), names, target, words.sizes):
        print(line)
        wrong |= not right
    return int(wrong)
