"""``kernel``: a kernel written in Python, shown at every stage, compiled for a chip or tuned. Only tuning
needs a GPU."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

from transconv.backend_triton import CompileFailure, CompileJob, compile_offline
from transconv.cli.arguments import options, ranges
from transconv.cli.export import TEXTS, resource_table
from transconv.ir import DTYPES, ELSEWHERE, type_named
from transconv.kernel import Group, KernelFunction
from transconv.support import KernelError, knobs, nearest
from transconv.target import Target, detect

ARRAY = re.compile(r"(\w+)\[([\d,\s]+)\]")


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "kernel",
        "show or compile a kernel that is written in Python",
        "Prints how a kernel is launched for given arguments, and its Triton text or another stage.\n"
        "With --compile also registers, spills and shared memory, without a GPU. With --tune the words\n"
        "that the kernel leaves open are tried on this machine, and the fastest kept for later calls.",
        (
            "kernel docs/examples/softmax_kernel.py:softmax --group 64 --shape 1 "
            '--args "f32[64,1000]" "f32[64,1000]" --target sm_90',
            "kernel docs/examples/scaled_rows.py:scaled --set ROWS=8 "
            '--args "f32[64,1000]" "f32[64,1000]" "f32[1000]" --target sm_90',
        ),
        run,
    )
    made.add_argument(
        "kernel",
        metavar="FILE:NAME",
        help="a Python file and the name of a kernel in it, if it has several",
    )
    made.option("--group", "SIZES", "the work: 64 or 64x1000; not where the kernel declares it", "")
    made.option("--shape", "SIZES", "a hint for a group's shape: 1x128", "")
    made.option("--warps", "N", "a hint: warps of a group", None, ranges.at_least(1, 32))
    made.option(
        "--stages", "N", "a hint: iterations whose loads are in flight", None, ranges.at_least(1, 8)
    )
    made.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="values of tunable numbers")
    made.add_argument(
        "--args",
        nargs="*",
        default=[],
        metavar="ARG",
        help="the arguments after the group: arrays as f32[64,1000], numbers",
    )
    made.add_argument("--target", default="", help="the chip: sm_90, gfx942, ...; default: this machine's")
    made.option("--stage", "STAGE", "print this stage alone: written, the name of a pass, or emit", "")
    made.flag("--compile", "compile for the chip, print resources")
    made.option(
        "--tune",
        "S",
        "tune for at most S seconds, on arrays of random numbers of this machine's GPU",
        None,
        ranges.seconds,
    )
    made.option(
        "--trials", "N", "with --tune, candidates at most (default: 32)", 32, ranges.at_least(1, 10**4)
    )
    made.add_argument(
        "--print",
        default="",
        metavar="TEXT",
        dest="text",
        choices=TEXTS,
        help=f"with --compile, print this form too: {', '.join(TEXTS)}",
    )
    made.option("--timeout", "S", "seconds to compile (default: 120)", 120, ranges.limit)


def run(words: argparse.Namespace) -> int:
    target = Target.parse(words.target) if words.target else detect()
    function = named(words.kernel)
    if words.set:
        function = function.parametrize(**dict(setting(text) for text in words.set))
    given = [*grouped(words), *(argument(text) for text in words.args)]
    if not given:
        raise KernelError(
            f"{words.kernel} is called with nothing; give its group, unless it declares it, and its "
            'arguments: --group 64 --args "f32[64,1000]"'
        )
    if words.tune is not None:
        print(function.tune(*map(filled, given), seconds=words.tune, trials=words.trials))
    low = function.lower(*given, target=target)
    if words.stage:
        print(low.stage(words.stage))
    else:
        print(f"{function.explain(*given, target=target)}\n\n{low.source}")
    if not words.compile:
        return 0
    params = tuple((t.dtype.name, ()) for t in low.kernel.params)
    counts = len(low.kernel.sizes.names) if low.kernel.sizes else 0
    job = CompileJob(
        low.source,
        low.kernel.name,
        params,
        target.name,
        target.backend,
        target.arch,
        target.warp_size,
        low.warps,
        low.num_stages,
        (words.text,) if words.text else (),
        sizes=counts,
        numbers=len(low.numbers),
        fuse=False,
    )
    (answer,) = compile_offline([job], words.timeout)
    print(resource_table([answer]))
    if isinstance(answer, CompileFailure):
        print(answer.log)
        return 1
    print("".join(f"\n{text}" for text in answer.texts.values()), end="")
    return 0


def grouped(words: argparse.Namespace) -> list[Group]:
    """The group of a call; none where the kernel declares it. Raises KernelError."""
    if not words.group:
        if words.shape or words.warps or words.stages:
            raise KernelError("--shape, --warps and --stages need --group; expected --group SIZES too")
        return []
    shape = sizes("--shape", words.shape) if words.shape else None
    return [Group(sizes("--group", words.group), shape, None, words.warps, words.stages)]


def setting(text: str) -> tuple[str, int]:
    """NAME=N. Raises KernelError."""
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdigit():
        raise KernelError(f"--set {text!r}; expected a name and a whole number, as ROWS=8")
    return name, int(number)


def filled(given: Any) -> Any:
    """An array with random numbers on this machine's GPU in place of one without memory; with
    TRITON_INTERPRET=1 on the CPU."""
    if not hasattr(given, "is_meta"):
        return given
    import torch

    place = "cpu" if knobs.interpret() else "cuda"
    if given.dtype.is_floating_point:
        return torch.randn(given.shape, device=place).to(given.dtype)
    return torch.randint(0, 2, given.shape, device=place).to(given.dtype)


def named(text: str) -> KernelFunction:
    """The kernel FILE:NAME, or that of a FILE with one. Raises KernelError; ValueError for the file."""
    module, name = options.loaded(f"{text}:" if text.endswith(".py") else text)
    known = [n for n, v in vars(module).items() if isinstance(v, KernelFunction)]
    name = name or (known[0] if len(known) == 1 else "")
    found = getattr(module, name, None)
    if isinstance(found, KernelFunction):
        return found
    if not known:
        raise KernelError(f"{module.__file__} has no kernel; expected a function below @kernel")
    said = f"{name!r} is no kernel of" if name else "there are several kernels in"
    raise KernelError(f"{said} {module.__file__}; expected FILE:NAME; it has: {' '.join(known)}")


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Sizes such as 64 or 64x1000. Raises KernelError."""
    parts = text.split("x")
    if not all(p.isdigit() for p in parts):
        raise KernelError(f"{option} {text!r}; expected sizes such as 64 or 64x1000")
    return tuple(map(int, parts))


def argument(text: str) -> Any:
    """An array without memory, or a number. Raises KernelError."""
    if found := ARRAY.fullmatch(text.strip()):
        import torch

        try:
            kind = getattr(torch, type_named(found[1]).torch)
        except (KeyError, AttributeError):
            near = nearest(found[1], DTYPES, ELSEWHERE)
            raise KernelError(
                f"{text!r} has an unknown type; expected f32, f16, bf16, i32, ...{near}"
            ) from None
        return torch.empty([int(n) for n in found[2].split(",")], dtype=kind, device="meta")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, (bool, int, float)):
        raise KernelError(f"{text!r} is no argument; expected an array such as f32[64,1000], or a number")
    return value
