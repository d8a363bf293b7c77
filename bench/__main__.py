"""``python -m bench``: time problem lists against cuDNN (on a CPU: oneDNN). ``check`` compares their
results with exact answers, ``report`` makes tables and plots of a run, ``pages`` the tables of the
documentation. ``ablation`` measures passes and schedule words, ``trials`` the ranking of schedules;
``networks``, ``overhead`` and ``dropin`` measure and test the calls of PyTorch users."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from transconv.cli.arguments.options import Parser, check_variables, refusal
from transconv.cli.arguments.ranges import (
    at_least,
    folder,
    gigabytes,
    limit,
    milliseconds,
    processes,
    seconds,
    some_of,
)
from transconv.conv import DIRECTIONS, Epilogue
from transconv.errors import TransconvError
from transconv.verify.machine import code, terminable

BASELINES = ("cl", "nchw", "fused", "inductor", "gemm")
COMMANDS = ("time", "check", "report")
# These bring their own arguments; their modules import torch, so only the requested one is loaded.
DROP_IN = {
    "ablation": "disable each pass, change each word of the schedule, and time the difference",
    "estimates": "tell how far estimates are from measured times, and what their choices cost",
    "predictions": "predict times of layers and graphs on chips, and tell how wrong the method is",
    "board": "keep files of transconv doctor --share, and compare predictions with measurements",
    "trials": "measure how good the ranking of schedules is, and how long compiling takes",
    "networks": "train and time whole models, before and after conversion",
    "graphs": "time whole models through torch.compile's backend, and torch's own compilers",
    "zoo": "compile, check and time models of torchvision, timm and other libraries",
    "dynamo": "run PyTorch's own benchmark runner with our backend and with Inductor",
    "integrations": "time models of diffusers, nnU-Net and others by their own classes",
    "optimized": "what transconv.optimize keeps of whole models, and the times of all sides",
    "overhead": "measure the host time of one warm call, and torch's",
    "graph-checks": "time the parts of compiled models' first calls, with and without checks",
    "start": "time the first training steps of a model, cold, warm and prepared, and torch's",
    "first-calls": "measure what a new size costs the host, with kernels for any size",
    "host-times": "measure what calls cost the host while kernels are compiled beside it",
    "auto-sizes": "time calls whose sizes change with default settings, and who answers them",
    "sizes": "time and check layers at drawn sizes with kernels for any size, and cuDNN",
    "invariance": "time layers and models with and without invariant mode",
    "streaming": "time pieces of streamed models, steps and packed sequences, and torch's",
    "within": "time models within a bound of memory, their peak, and whether bits are the whole's",
    "maps": "time maps, reductions and norms, and torch's",
    "kernels": "time kernels of the kernel API, the same in Triton by hand, and torch",
    "schedules": "check and time given schedules of given problems",
    "parts": "time each kernel of plans on a GPU: copies, products, sums of parts",
    "index-operations": "count the masks and operations that the simplifier leaves in kernels",
    "short-rows": "time every form of softmax and layer norm over short rows, and torch's",
    "attention": "time attention of one wide head, as decoders of images have it, and torch's",
    "short-sums": "measure how far sums of 8-bit floats on the matrix unit are off",
    "epilogue-functions": "time and check functions in the epilogue of a product",
    "computations": "check and time the computations of bench/computes, and torch's",
    "distributed": "time whole models split over several GPUs, and on one",
    "gallery": "time the demonstrations of examples/gallery, and torch",
    "issues": "time and check convolutions that public issues report as slow or wrong",
    "quantized": "time, check and train whole models with 8-bit convolutions",
    "pages": "write the tables and pictures of README.md and docs/ from bench/results",
    "fuzz-runs": "write summaries of `transconv fuzz --json` as rows of one table",
    "benchdnn": "run whole lists of oneDNN's benchdnn through transconv check, and count",
    "proofs": "prove the addresses of drawn kernels, and find planted strays",
    "samples": "try torch's own samples of functions and operations on a GPU, and count",
    "dropin": "run the GPU tests of the drop-in in several processes, and count",
}


def epilogue(text: str) -> str:
    """For ``type=``: an epilogue, or ``layer`` for each layer's own."""
    try:
        Epilogue.parse("" if text == "layer" else text)
    except TransconvError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="and, each with its own --help:\n"
        + "\n".join(f"    {name:<12} {text}" for name, text in DROP_IN.items()),
    )
    commands = top.add_subparsers(dest="command", required=True)
    cores = max(1, (os.cpu_count() or 2) - 2)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument(
            "--out", type=folder, default="bench/results", help="folder for CSV and JSON files"
        )
        return made

    def lists(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "lists",
            nargs="*",
            default=["resnet50"],
            help="layers.json, benchdnn files, folders of them, or names of the project's own lists",
        )
        made.add_argument("--match", default="", help="only layers whose name matches (regex)")
        made.add_argument("--kinds", default="", help="only these: dense,depthwise,grouped,first,last")
        made.add_argument(
            "--props",
            type=some_of(*DIRECTIONS),
            default=",".join(DIRECTIONS),
            help="directions of the layer",
        )
        made.add_argument("--mb", type=at_least(0), default=0, help="reduce larger batches to this")
        made.add_argument(
            "--epilogue", type=epilogue, default="", help="such as bias+relu (not for bwd_w)"
        )
        made.add_argument(
            "--time-budget", type=seconds, default=540, help="seconds; then no new task starts"
        )
        made.add_argument("--limit", type=limit, default=120, help="seconds for one task")
        made.add_argument("--shard", type=at_least(0), default=0)
        made.add_argument("--shards", type=at_least(1), default=1, help="do every n-th task, from --shard")
        made.add_argument("--retry", default="", help="verdicts to run again: failed,timeout,...")
        made.add_argument("--cache", default="", help="folder of compiled kernels")

    check = command("check", "run lists and compare every result with the f64 answer")
    lists(check)
    check.add_argument("--dtypes", default="bf16,f16")
    check.add_argument("--layouts", default="nhwc,nchw")
    check.add_argument(
        "--sample", type=at_least(1), default=5, help="f32 and tf32 take every n-th problem"
    )
    check.add_argument("--modes", type=some_of("exact", "float"), default="exact,float")
    check.add_argument("--workers", type=processes, default=cores)
    check.add_argument("--memory", type=gigabytes, default=100, help="GB of GPU memory to share out")

    timing = command("time", "time lists against cuDNN, torch.compile, and on a CPU oneDNN")
    lists(timing)
    timing.set_defaults(lists=[])  # resnet50; without a GPU one image of it
    timing.add_argument(
        "--dtypes",
        default="",
        help="default: bf16; without a GPU f32; int8, fp8 and "
        "fp8_exact are mixtures of 8-bit types (see bench/small_types.py)",
    )
    timing.add_argument("--layouts", "--layout", default="nhwc")
    timing.add_argument(
        "--baselines",
        type=some_of("", *BASELINES),
        default="cl,nchw",
        help=f"of {', '.join(BASELINES)}; gemm: a matrix product of as many rows, columns and terms",
    )
    timing.add_argument(
        "--inductor-limit", type=limit, default=60, help="seconds for one layer through torch.compile"
    )
    timing.add_argument(
        "--sampled",
        action="store_true",
        help="check results at samples of random data, as the first results of programs "
        "are, not every element of exact data: quicker",
    )
    timing.add_argument("--budget-ms", type=milliseconds, default=120, help="timing of one call")
    timing.add_argument("--compile-limit", type=limit, default=60, help="seconds for one compile")
    timing.add_argument("--workers", type=processes, default=cores, help="processes that compile")

    report = command("report", "tables and plots from CSV files")
    report.add_argument("csv", nargs="*", default=["bench/results/timing.csv"])
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 if a row is not right, 2 if something is wrong with the
    command (one line on standard error says what)."""
    try:
        with terminable():
            return run(words)
    except (TransconvError, OSError, ValueError) as error:
        print(refusal(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped; rows that were written stay", file=sys.stderr)
        return code(stop)


def run(words: Sequence[str] | None) -> int:
    """``main`` without the messages for errors."""
    module, options = understood(list(sys.argv[1:] if words is None else words))
    check_variables()
    ended: int = module.main(options)
    return ended


def understood(words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module with the ``main`` for a command line, and its options. Raises SystemExit, as
    argparse does, or ValueError."""
    if words and words[0] in DROP_IN:
        own = importlib.import_module(f"bench.{words[0].replace('-', '_')}")
        made = Parser(prog=f"python -m bench {words[0]}", description=DROP_IN[words[0]])
        made.add_argument(
            "--out", type=folder, default="bench/results", help="folder for CSV and JSON files"
        )
        own.arguments(made)
        return own, made.parse_args(words[1:])
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        words = ["time", *words]
    options = parser().parse_args(words)
    if options.command != "report" and options.shard >= options.shards:
        raise ValueError(f"--shard={options.shard} of --shards={options.shards}; expected one from 0")
    module = {"time": "runner"}.get(options.command, options.command)
    return importlib.import_module(f"bench.{module}"), options


if __name__ == "__main__":
    # What is timed is kernels, not torch in their place while they are compiled.
    os.environ.setdefault("TRANSCONV_COMPILE", "now")
    os.environ.setdefault("TRANSCONV_SIZES", "exact")
    raise SystemExit(main())
