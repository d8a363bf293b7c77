"""``prepare``: compiles the kernels of problems into the caches, before a program needs them."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from os.path import isfile
from pathlib import Path

from tqdm import tqdm

from transconv import knobs
from transconv.cli import computations
from transconv.cli.arguments import options, ranges
from transconv.compute import Alone
from transconv.conv import ConvProblem, Epilogue, LayerRegistry, Prop, compiler, iter_problems
from transconv.disk_cache import replace_named
from transconv.errors import ProblemError, Unsupported
from transconv.runtime import Batch, PlanRequest, cores, prepare
from transconv.target import Target


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "prepare", "compile kernels into the caches, in parallel",
        "Compiles the kernels of problems, lists of problems or texts of computations in processes, for\n"
        "the GPU at hand or, with --target, for a chip that need not be there, and keeps them where\n"
        "programs look. A program finds what was compiled for its chip, its versions and its counts.",
        ("prepare layers.txt --dtype bf16 --layout nhwc",
         f"prepare {options.EXAMPLE} dt=bf16 tag=nhwc --prop fwd --target sm_90 --workers 8",
         "prepare norm.txt --json prepared.json"), run)
    options.add_problem(made, or_file=True)
    options.add_props(made, "all")
    made.add_argument("--target", default="", metavar="T", help="a chip, such as sm_90 (default: the GPU)")
    made.add_argument("--epilogue", default="", metavar="E", help="of convolutions: bias+relu, ...")
    made.add_argument("--workers", type=ranges.processes, default=cores(), metavar="N",
                      help="processes (default: one per core)")
    made.add_argument("--json", type=ranges.output, metavar="FILE", help="also write the report")


def run(words: argparse.Namespace) -> int:
    target = options.target(words.target)
    if target.backend == "interpreter" and not knobs.interpret():
        raise Unsupported("target:none", "there is no GPU to compile for; expected --target with a chip, "
                          "such as sm_90")
    found = questions(words, target)
    total = sum(len(batch.questions) for batch in found)
    with tqdm(total=total, unit="problem", disable=not sys.stderr.isatty()) as bar:
        report = prepare(found, words.workers, lambda *_: bar.update())
    print(report)
    if words.json:
        replace_named(words.json, json.dumps(report.mapping(), indent=1) + "\n")
    return 1 if report.failures else 0


def questions(words: argparse.Namespace, target: Target) -> list[Batch]:
    """The requested kernels. Raises the errors of the texts; ProblemError where there are none."""
    if found := computations.asked(words):
        return [Batch((PlanRequest(Alone(c), target),)) for c in found]
    epilogue = Epilogue.parse(words.epilogue)
    if all(isfile(w) for w in words.problem):
        listed = [pair for w in words.problem for pair in iter_problems(Path(w))]
    else:
        listed = [(p, None) for p in options.each_described(words.problem)]
    asked = [_of(options.dressed(p, words), prop, target, epilogue) for p, way in listed
             for prop in options.props(words) if way is None or way is prop]
    if not asked:
        raise ProblemError(f"{' '.join(words.problem)} has no problem with --prop {words.prop}; expected "
                           "at least one")
    options.some_computable([(q.workload.problem, q.workload.prop)  # type: ignore[attr-defined]
                             for batch in asked for q in batch.questions])
    return list(dict.fromkeys(asked))


def _of(problem: ConvProblem, prop: Prop, target: Target, epilogue: Epilogue) -> Batch:
    """The question of a problem; with TRANSCONV_SIZES=any those of its layer, which other sizes share."""
    if knobs.sizes() == "any":
        with suppress(ProblemError):  # a layer whose kernels are all for given sizes
            return LayerRegistry(problem, prop, target, epilogue, True, False).batch
    return Batch((compiler.question(problem, prop, target, epilogue),))
