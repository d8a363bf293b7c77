"""``sharded``: a step of a model over several ranks, compared with one process."""

from __future__ import annotations

import argparse
from typing import Any

from transconv.cli.arguments import options


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
    made.add_argument(
        "--plan",
        default="h=0",
        metavar="AXES",
        type=_plan,
        help="the axes of images (n, d, h, w) and the mesh dims that deal them: h=0,w=1",
    )
    made.add_argument(
        "--mesh",
        default="",
        metavar="SIZES",
        type=_sizes,
        help="ranks along each mesh dim: 2x2; default: all in one",
    )
    for word, says in (
        ("whole", "that every rank computes whole"),
        ("rows", "that make each row from the same rows of their inputs"),
    ):
        made.add_argument(
            f"--{word}",
            default=(),
            metavar="NAMES",
            type=lambda text: text.split(","),
            help=f"modules {says}, with commas between",
        )
    made.add_argument(
        "--exact",
        action="store_true",
        help="with small integers as parameters and inputs, and every bit counts",
    )


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
