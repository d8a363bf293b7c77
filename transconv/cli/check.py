"""One direction of one problem, executed and compared with torch.

The data are small whole numbers: products and sums are exact, so the only difference that a right
kernel may show is the last rounding of its result. Memory that no element maps to, and the result
before the run, hold NaN: what is read or left out by mistake shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from transconv import compiler, knobs
from transconv.config import Config
from transconv.ir import Layout
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS, Target

if TYPE_CHECKING:
    import torch

TORCH_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
# The spacing of numbers relative to their size. Triton's interpreter cuts off instead of rounding.
ULP = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
RESULT = {Prop.FWD: "dst", Prop.BWD_D: "src", Prop.BWD_W: "wei"}
WIDE_REFERENCE = 1 << 30  # elements up to which a GPU computes the reference in f64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. ``max_error``: largest difference to torch, relative to the largest
    element; ``milliseconds``: on a GPU; ``problem``: what went wrong, empty if nothing did."""

    compiled: compiler.Compiled
    max_error: float
    milliseconds: float | None
    problem: str

    @property
    def right(self) -> bool:
        return not self.problem


def device() -> str:
    """Where kernels run. Without a GPU, Triton's interpreter is switched on: call this before
    anything imports triton."""
    import torch

    if torch.cuda.is_available() and not knobs.interpret():
        return "cuda"
    knobs.use_interpreter()
    return "cpu"


def check(problem: ConvProblem, prop: Prop, target: Target, config: Config | None = None,
          time: bool = True) -> Outcome:
    """Generate, execute, compare. Raises what the compiler raises (ConfigError, Unsupported)."""
    import torch

    where = device()
    compiled = compiler.plan(problem, prop, target, config)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{problem.shape_text} {prop}".encode()))
    logical, memory = {}, {}
    for name, spec in problem.specs.items():
        shape = problem.shapes[name]
        made = torch.randint(-2, 3, shape, generator=generator, dtype=torch.int8).to(where)
        logical[name] = made
        memory[name] = torch.full((max(1, spec.layout.span),), float("nan"), device=where,
                                  dtype=getattr(torch, TORCH_NAMES[spec.dtype.name]))
        if name != RESULT[prop]:
            write(memory[name], spec.layout, made)
    compiled.launch(**memory)
    result = problem.specs[RESULT[prop]]
    got = read(memory[RESULT[prop]], result.layout, problem.shapes[RESULT[prop]])
    error, wrong = compare(got, reference(problem, prop, logical), ULP[result.dtype.name])
    spent = None
    if where == "cuda" and time:
        from triton.testing import do_bench

        spent = float(do_bench(lambda: compiled.launch(**memory)))
    return Outcome(compiled, error, spent, wrong)


def compare(got: torch.Tensor, want: torch.Tensor, ulp: float) -> tuple[float, str]:
    """The largest difference relative to the largest element, and what is wrong, in words."""
    if not want.numel():
        return 0.0, ""
    got, want = got.to(want.dtype), want
    if missing := int(got.isnan().sum()):
        return float("nan"), f"{missing} of {got.numel()} elements are NaN"
    gap = (got - want).abs()
    wrong = int((gap > ulp * want.abs()).sum())
    error = float(gap.max() / want.abs().max().clamp(min=1.0))
    return error, f"{wrong} of {got.numel()} elements are wrong" if wrong else ""


def reference(p: ConvProblem, prop: Prop, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """torch's answer from whole numbers: in f64, or in f32 where that would take too much memory
    (sums stay below 2^24, so it is exact too)."""
    import torch

    wide = sum(v.numel() for v in values.values()) < WIDE_REFERENCE
    dtype = torch.float64 if wide else torch.float32
    src, wei, dst = (values[n].to(dtype) for n in ("src", "wei", "dst"))
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d,
                torch.nn.functional.conv3d)[p.ndims - 1]
    sides: list[int] = []
    for low, high in reversed(list(zip(p.pad_lo, p.pad_hi, strict=True))):
        sides += [low, high]

    def forward() -> torch.Tensor:
        padded = torch.nn.functional.pad(src, sides)
        made: torch.Tensor = convolve(padded, wei, None, p.stride, 0, p.dilation, p.g)
        return made

    # Reduced-precision modes of the library must not reach the reference.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        if prop is Prop.FWD:
            return forward()
        asked = src if prop is Prop.BWD_D else wei
        asked.requires_grad_()
        return torch.autograd.grad(forward(), asked, dst)[0]


def _blocks(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view with one dimension for each block: dimension by dimension, outermost block first."""
    blocks = [b for d in range(layout.ndims) for b in layout.of_dim(d)]
    return memory.as_strided([b.size for b in blocks], [b.stride for b in blocks], layout.offset)


def write(memory: torch.Tensor, layout: Layout, values: torch.Tensor) -> None:
    """Lay a logical array out in memory. Padding inside of blocks keeps what is there."""
    view = _blocks(memory, layout)
    whole = view.reshape(layout.extents).clone()
    whole[tuple(slice(n) for n in values.shape)] = values.to(memory.dtype)
    view.copy_(whole.reshape(view.shape))


def read(memory: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """The logical array that lies in memory."""
    if not prod(shape):
        return memory.new_empty(tuple(shape))
    whole = _blocks(memory, layout).reshape(layout.extents)
    return whole[tuple(slice(n) for n in shape)]


def executable(target: Target, where: str) -> Target:
    """The target as it runs here: kernels made for a chip can be interpreted, 16-bit operands then
    need casts."""
    from dataclasses import replace

    if where == "cuda" or target.backend == "interpreter":
        return target
    return replace(target, name=f"{target.name}-interpreted", upcast16=True,
                   precisions=TARGETS["interpreter"].precisions)
