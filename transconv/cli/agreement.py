"""``sharded``: a step of a model over several ranks, compared with one process. ``certify``: whether a
sample's bits agree in all batches; docs/invariance.md."""

from __future__ import annotations

import argparse
import sys
import time
from os.path import isfile
from typing import Any

from transconv.cli.arguments import computations, options, ranges
from transconv.support import ProblemError
from transconv.verify.machine import device


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "sharded",
        "compare a step of a sharded model with one process, on every rank",
        "Started by torchrun. FILE:NAME is a function without arguments that returns a model and its\n"
        "inputs. Shards the model as transconv.distributed.parallelize does and compares the result and\n"
        "all gradients with those of one process. Prints which tensors differ, and on which ranks.\n"
        "The exit code is 1 if one does.",
        (),
        run,
    )
    made.epilog = "example:\n  torchrun --nproc-per-node 2 -m transconv sharded model.py:small --exact"
    made.add_argument("model", metavar="FILE:NAME", help="a Python file and the name of a function in it")
    made.option(
        "--plan",
        "AXES",
        "the axes of images (n, d, h, w) and the mesh dims that deal them: h=0,w=1",
        "h=0",
        _plan,
    )
    made.option("--mesh", "SIZES", "ranks along each mesh dim: 2x2; default: all in one", "", _sizes)
    for word, says in (
        ("whole", "that every rank computes whole"),
        ("rows", "that make each row from the same rows of their inputs"),
    ):
        made.option(
            f"--{word}", "NAMES", f"modules {says}, with commas between", (), lambda text: text.split(",")
        )
    made.flag("--exact", "with small integers as parameters and inputs, and every bit counts")


def run(words: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import transconv

    if not dist.is_torchelastic_launched():
        raise ValueError(
            "sharded runs on several ranks; expected to be started by torchrun "
            "--nproc-per-node 2 -m transconv sharded ..."
        )
    function = _named(words.model)
    rank: int = dist.get_node_local_rank()
    device = "cuda" if torch.cuda.device_count() > rank else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, words.mesh or (dist.get_world_size(),))
    torch.manual_seed(0)
    with torch.device(device):
        model, *inputs = function()
    found = transconv.distributed.verify(
        model, mesh, words.plan, *inputs, exact=words.exact, whole=words.whole, rows=words.rows
    )
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()
    return 0 if found else 1


def _plan(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        axis, _, at = part.partition("=")
        if not at.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is no axis and mesh dim; expected h=0,w=1")
        found[axis] = int(at)
    return found


def _sizes(text: str) -> tuple[int, ...]:
    if text and not all(part.isdigit() and int(part) for part in text.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} are no sizes; expected 2x2")
    return tuple(int(part) for part in text.split("x")) if text else ()


def _named(text: str) -> Any:
    """The function FILE:NAME. ValueError where there is none."""
    module, name = options.loaded(text)
    if not callable(found := getattr(module, name, None)):
        raise ValueError(f"{module.__file__} has no function {name!r}")
    return found


# -- certify ------------------------------------------------------------------------------------------


def add_certify(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "certify",
        "prove that a sample's bits do not depend on its batch",
        "Proves, from the schedule and the lowered kernels of invariant mode, that no grouping of a sum\n"
        "depends on the number of samples, and that batches of all sizes have one kernel. FILE:NAME is a\n"
        "function without arguments that returns a model and its inputs. --drawn N runs drawn batches:\n"
        "every sample alone against the same sample inside; without a problem it draws calls of all\n"
        "kinds, and prints each. The exit code is 1 if something is not proved, or a bit differs.",
        (
            f"certify {options.EXAMPLE} dt=f16 tag=nhwc --target sm_90",
            "certify norm.txt --drawn 20",
            "certify model.py:small --drawn 10",
            "certify --drawn 2000 --device cuda",
        ),
        certify,
    )
    options.add_problem(made, or_file=True, least=0)
    options.add_props(made, "all")
    options.add_schedule(made)
    made.option("--target", "T", "a chip: sm_90 (default: the GPU)", "")
    made.option("--drawn", "N", "how many batches or calls to draw", 0, ranges.at_least(0))
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="", help="default: the GPU, if there is one"
    )
    made.option("--seed", "N", "of what is drawn", 0, ranges.at_least(0))


def certify(words: argparse.Namespace) -> int:
    where = words.device or device()
    if where == "cpu":
        device()  # has Triton's interpreter run kernels where there is no GPU
    import transconv
    from transconv.graph.certification import certify as certified

    if where == "cpu":
        transconv.config.cpu = "interpret"
    if not words.problem:
        return drawn_calls(words.drawn, where, words.seed)
    given = {"drawn": words.drawn, "device": where, "seed": words.seed}
    if len(words.problem) == 1 and ":" in words.problem[0] and not isfile(words.problem[0]):
        model, inputs = _named(words.problem[0])()
        found = [certified(model, *(inputs if isinstance(inputs, (tuple, list)) else [inputs]), **given)]
    else:
        chosen = {"prop": words.prop, "target": words.target, "schedule": words.schedule or ""}
        found = [certified(text, **chosen, **given) for text in _texts(words)]
    print("\n".join(map(str, found)))
    return 0 if all(c.holds for c in found) else 1


def _texts(words: argparse.Namespace) -> list[str]:
    """The problems or computations of a command line."""
    if made := computations.given(words.problem):
        return list(map(str, made))
    listed = options.problems(words)
    return list(dict.fromkeys(str(problem) for problem, _ in listed))


def drawn_calls(count: int, device: str, seed: int) -> int:
    """Draw calls of all kinds, and print each as it comes. Raises ProblemError where none is asked for."""
    from transconv.functional.batch_trials import run_trials

    if not count:
        raise ProblemError("nothing to certify; expected a problem, a file, FILE:NAME, or --drawn N")
    wrong = refused = 0
    begun = time.perf_counter()
    for number, outcome in enumerate(run_trials(count, device, seed), 1):
        wrong += bool(outcome.differs)
        refused += bool(outcome.refused)
        verdict = "DIFFERS" if outcome.differs else "refused" if outcome.refused else "same"
        more = outcome.refused or "; ".join(outcome.differs[:3])
        print(f"{number:5} {verdict:8} {outcome.text}{': ' * bool(more)}{more}", flush=True)
    took = time.perf_counter() - begun
    print(f"{count} calls in {took:.0f} s: {wrong} differ, {refused} refused", file=sys.stderr)
    print(f"{count - wrong - refused} of {count} have the same bits in every batch")
    return 1 if wrong else 0
