"""What the verbs have in common: how problems, directions, configs and targets are given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.problem import ConvProblem, Prop
from transconv.problem_lists import iter_problems
from transconv.target import Target, detect

EXAMPLE = "mb32ic64ih56oc128oh28kh3sh2ph1"
PROPS = [p.value for p in Prop]


def add_verb(verbs: Any, name: str, help: str, about: str, examples: tuple[str, ...],
             action: Any) -> argparse.ArgumentParser:
    """A verb whose ``--help`` says what it is for and ends with examples that can be pasted."""
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=help, description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "\n".join(f"  python -m transconv {e}" for e in examples))
    made.set_defaults(action=action)
    return made


def add_problem(to: argparse.ArgumentParser, or_file: bool = False) -> None:
    what = ("a problem in benchdnn's grammar, then dt=, tag=, math= where they differ from "
            f"f32, nchw, tf32: {EXAMPLE} dt=f16 tag=nhwc")
    to.add_argument("problem", nargs="+", metavar="PROBLEM|FILE" if or_file else "PROBLEM",
                    help=what + ("; or a file of them (a benchdnn batch)" if or_file else ""))
    to.add_argument("--dtype", metavar="T",
                    help="element type: f32, f16, bf16, f64, or three as src:wei:dst")
    to.add_argument("--layout", metavar="TAG",
                    help="memory order: nchw, nhwc, nChw16c, or three as src:wei:dst")


def add_config(to: argparse.ArgumentParser) -> None:
    to.add_argument("--config", metavar="C", type=str,
                    help="one line such as 'mb.oh.ow:128 oc:128 ic:64 | mma | stages=3 warps=8'; "
                         "default: the heuristics choose")


def add_props(to: argparse.ArgumentParser, default: str) -> None:
    to.add_argument("--prop", choices=[*PROPS, "all"], default=default,
                    help=f"what is computed: fwd dst, bwd_d src, bwd_w wei (default: {default})")


def dressed(problem: ConvProblem, words: argparse.Namespace) -> ConvProblem:
    """The problem with ``--dtype`` and ``--layout`` in place of its own."""
    if words.dtype:
        problem = problem.with_dtype(words.dtype)
    return problem.with_layout(words.layout) if words.layout else problem


def problem(words: argparse.Namespace) -> ConvProblem:
    """The one problem of the command line. Raises ProblemError."""
    return dressed(ConvProblem.parse(" ".join(words.problem)), words)


def problems(words: argparse.Namespace) -> list[tuple[ConvProblem, Prop]]:
    """Every problem of the command line or of the file it names, with every asked direction."""
    path = Path(words.problem[0])
    if len(words.problem) == 1 and path.is_file():
        listed = list(iter_problems(path))
    else:
        listed = [(ConvProblem.parse(" ".join(words.problem)), None)]
    asked = props(words)
    return [(dressed(p, words), prop) for p, way in listed for prop in asked
            if way is None or way is prop]


def props(words: argparse.Namespace) -> tuple[Prop, ...]:
    return tuple(Prop) if words.prop == "all" else (Prop(words.prop),)


def config(words: argparse.Namespace) -> Config | None:
    return Config.parse(words.config) if words.config else None


def epilogue(words: argparse.Namespace) -> Epilogue:
    return Epilogue.parse(words.epilogue)


def target(name: str) -> Target:
    """The target of a name; ``auto`` is the GPU at hand, or the interpreter."""
    return detect() if name == "auto" else Target.parse(name)


