"""``prepare``: compiles the kernels of problems into the caches, before a program needs them. ``cache``:
packs what is in them into one file for other machines."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from transconv import runtime
from transconv.cli.arguments import computations, options, ranges
from transconv.compute import Alone
from transconv.conv import ConvProblem, Epilogue, LayerRegistry, Prop, compiler
from transconv.runtime import Batch, PlanRequest, cores, prepare
from transconv.support import ProblemError, Unsupported, knobs, replace_named
from transconv.target import Target, detect


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "prepare",
        "compile kernels into the caches, in parallel",
        "Compiles the kernels of problems, lists of problems or texts of computations in processes, for\n"
        "the GPU at hand or, with --target, for a chip that need not be there, and keeps them where\n"
        "programs look. A program finds what was compiled for its chip, its versions and its counts.",
        (
            "prepare layers.txt --dtype bf16 --layout nhwc",
            f"prepare {options.EXAMPLE} dt=bf16 tag=nhwc --prop fwd --target sm_90 --workers 8",
            "prepare norm.txt --json prepared.json",
        ),
        run,
    )
    options.add_problem(made, or_file=True)
    options.add_props(made, "all")
    made.option("--target", "T", "a chip, such as sm_90 (default: the GPU)", "")
    made.option("--epilogue", "E", "of convolutions: bias+relu, ...", "")
    made.option("--workers", "N", "processes (default: one per core)", cores(), ranges.processes)
    made.option("--json", "FILE", "also write the report", None, ranges.output)


def run(words: argparse.Namespace) -> int:
    target = options.target(words.target)
    found = questions(words, target)
    if target.backend == "interpreter" and not knobs.interpret():
        raise Unsupported(
            "target:none", "there is no GPU to compile for; expected --target with a chip, such as sm_90"
        )
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
    work = options.problems(words)
    options.some_computable(work)
    return list(dict.fromkeys(_of(p, prop, target, epilogue) for p, prop in work))


def _of(problem: ConvProblem, prop: Prop, target: Target, epilogue: Epilogue) -> Batch:
    """The question of a problem; with TRANSCONV_SIZES=any those of its layer, which other sizes share."""
    if knobs.sizes() == "any":
        with suppress(ProblemError):  # a layer whose kernels are all for given sizes
            return LayerRegistry(problem, prop, target, epilogue, True, False).batch
    return Batch((compiler.question(problem, prop, target, epilogue),))


# -- cache -----------------------------------------------------------------------------------------


def add_cache(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "cache",
        "pack the caches into a file, unpack one, or verify the plans",
        "info says what is kept for this version: plans, compiled kernels. pack writes it into a file,\n"
        "unpack puts a file's content into the caches of this user. What another version of transconv\n"
        "or Triton made is ignored with a line; a file that is damaged, or that others can write to, is\n"
        "refused, and one that was packed with another user's key needs the digest that pack printed.\n"
        "--verify makes all plans that are kept again, and exits with 1 if one differs.",
        (
            "cache info",
            "cache pack kernels.zip",
            "cache unpack kernels.zip --target sm_90",
            "cache --verify",
        ),
        cache,
    )
    made.add_argument("what", nargs="?", choices=("info", "pack", "unpack"))
    made.add_argument("file", nargs="?", type=ranges.output, metavar="FILE")
    made.flag("--verify", "choose and lower each kept plan again, and list what differs")
    made.option(
        "--target", "T", "unpack: only the files for this chip (default: the GPU at hand, or all)", ""
    )
    made.option("--digest", "HEX", "unpack: the digest of a file that was packed with another key", "")


def cache(words: argparse.Namespace) -> int:
    if (words.what is None and not words.verify) or (words.what is not None and words.verify):
        raise ValueError("cache: expected one of info, pack, unpack, --verify")
    if (words.file is None) is not (words.what in ("info", None)):
        raise ValueError(
            f"cache {words.what}: expected "
            + ("no file" if words.what == "info" else "the name of a file")
        )
    if words.digest and words.what != "unpack":
        raise ValueError("cache: --digest is for unpack")
    if words.verify:
        found = runtime.compare()
        print(f"{knobs.cache()}: {found}")
        return 1 if found.wrong else 0
    if words.what == "info":
        print(f"{knobs.cache()}: {runtime.info()}")
    elif words.what == "pack":
        print(f"{words.file}: {runtime.pack(Path(words.file))}")
    else:
        print(f"{words.file}: {runtime.unpack(Path(words.file), _chip(words.target), words.digest)}")
    return 0


def _chip(name: str) -> str:
    """The chip to unpack for; empty: all."""
    found = Target.parse(name) if name else detect()
    return "" if found.backend == "interpreter" and not name else found.name
