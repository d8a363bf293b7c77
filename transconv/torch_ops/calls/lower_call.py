"""From tensors to a ConvProblem and its compiled kernel, or the reason why there is none.

This is the only file of torch_ops that calls the compiler. ``describe`` and ``planned`` make a kernel for
a request; the routes that remember them by shape, stride and flag are in calls/route_cache.py.
``bias_gradient`` is that of invariant mode: sums over samples and positions by a kernel for any number of
samples, whose terms are grouped alike in every batch. Otherwise torch sums."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch

from transconv.calls.guard import at_multiple
from transconv.calls.settings import settings
from transconv.compute import BATCH, Alone, parse
from transconv.conv import (
    CompiledDirection,
    ConvProblem,
    ConvWorkload,
    Epilogue,
    Prop,
    TensorSpec,
    bias_sums,
    compiler,
    examine,
)
from transconv.ir import DTYPES as ROWS
from transconv.ir import DType, Layout
from transconv.runtime import (
    COMPILING,
    GPUS,
    NEVER,
    Launch,
    PlanRequest,
    first_run_check,
    is_ready,
    on_device,
    ready,
    rehearsal_thread,
    state,
    torch_internals,
)
from transconv.support import ProblemError, ScheduleError, TensorError, TransconvError, Unsupported, knobs
from transconv.target import TARGETS, Target, detect
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Order, Params

Like = tuple[Sequence[int], Sequence[int]]  # shape and strides
Sizes = tuple[Ints, Ints, Ints, Ints]  # shapes and strides of two tensors
Types = torch.dtype | tuple[torch.dtype, torch.dtype, torch.dtype]  # of input, weight and result

log = logging.getLogger("transconv.dispatch")

# The floats that torch's own convolutions take and kernels multiply, by torch's types: none of 8 bits.
DTYPES: dict[torch.dtype, DType] = ROWS.table(
    lambda t: t if t.operand and t.kind == "float" and t.bits > 8 else None,
    key=lambda t: getattr(torch, t.torch),
)
RESULTS: dict[torch.dtype, DType] = ROWS.table(
    lambda t: t if t.result else None, key=lambda t: getattr(torch, t.torch)
)
"""The types of tensors of convolutions, by torch's types."""
EXAMPLE = 8  # samples in a text, which stand for any number
SLOW_CALL = 1.0  # seconds; a longer build of a kernel is logged


@cache
def several_gpus() -> bool:
    """Whether the current device may be another than that of a tensor."""
    return torch.cuda.device_count() > 1


# -- reasons for torch -----------------------------------------------------------------------------


def reasons(
    input: torch.Tensor, weight: torch.Tensor, types: Container[torch.dtype] = DTYPES
) -> list[str]:
    """Every reason for torch that is known without the compiler; empty: there may be a kernel. ``types``:
    those of inputs."""
    found = [reason] if (reason := why_not_on(input.device)) else []
    if input.dtype not in types:
        found.append(f"dtype:{str(input.dtype).removeprefix('torch.')}")
    for tensor in (input, weight):
        if tensor.layout is not torch.strided:
            found.append(f"layout:{layout_name(tensor)}")
        if tensor.is_quantized:
            found.append("dtype:quantized")
    if input.numel() == 0 or weight.numel() == 0:
        found.append("shape:empty")
    return list(dict.fromkeys(found))


def why_not_on(device: torch.device) -> str:
    """Why no kernel runs on a device; empty if kernels do."""
    runs = settings.cpu == "interpret" if device.type == "cpu" else device.type in GPUS
    return "" if runs else f"device:{device.type}"


def layout_name(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Flags:
    """torch's numeric switches, as far as they change a kernel. One object for each setting,
    compared by identity."""

    math: str
    deterministic: bool


_deterministic: Callable[[], bool] = torch_internals.deterministic
_cudnn_deterministic: Callable[[], bool] = torch_internals.cudnn_deterministic
_FLAGS = {(math, det): Flags(math, det) for math in ("ieee", "tf32") for det in (False, True)}


def flags(dtype: torch.dtype) -> Flags:
    """The switches at this moment. Reads the conv precision that torch documents today: the older
    ``allow_tf32`` raises once a program has set the new one. Only "tf32" allows it."""
    deterministic = settings.invariant or _deterministic() or _cudnn_deterministic()
    tf32 = dtype is torch.float32 and _precision() == "tf32"
    return _FLAGS["tf32" if tf32 else "ieee", deterministic]


def fast(flags: Flags) -> Flags:
    """The switches for products whose sums may stay in the matrix unit."""
    return _FLAGS["tf32", flags.deterministic]


def _precision() -> str:
    # The documented attribute costs 0.7 us to read, as long as half a launch.
    return read_precision("cuda", "conv")


read_precision: Callable[[str, str], str] = torch_internals.precision


def _spec(tensor_dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> TensorSpec:
    dtype = RESULTS[tensor_dtype]
    return TensorSpec(dtype, Layout.from_strides(dtype, shape, strides))


def each(dtype: Types) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The types of input, weight and result."""
    return (dtype, dtype, dtype) if isinstance(dtype, torch.dtype) else dtype


def describe(dtype: Types, near: Like, weight: Like, far: Like, p: Params, math: str) -> ConvProblem:
    """The problem of a call. ``near`` is the layer's input, ``far`` its result, each as shape and
    strides; for a transposed layer they are exchanged, because it is BWD_D of a problem with its
    result as src. ``dtype``: of all three, or of input, weight and result."""
    types = each(dtype)
    src, dst = (far, near) if p.transposed else (near, far)
    of_src, of_dst = (types[2], types[0]) if p.transposed else (types[0], types[2])
    return ConvProblem(
        mb=src[0][0],
        g=p.groups,
        ic=src[0][1],
        oc=dst[0][1],
        i=tuple(src[0][2:]),
        o=tuple(dst[0][2:]),
        k=tuple(weight[0][2:]),
        stride=p.stride,
        dilation=p.dilation,
        pad_lo=p.pad_lo,
        src=_spec(of_src, *src),
        wei=_spec(types[1], *weight),
        dst=_spec(of_dst, *dst),
        math=math,
    )


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device; for CPU tensors Triton's interpreter."""
    if device.type == "cpu":
        if not knobs.interpret():
            raise Unsupported(
                "interpreter:off",
                'transconv.config.cpu is "interpret", but Triton\'s '
                "interpreter is off; start the program with TRITON_INTERPRET=1",
            )
        return TARGETS["interpreter"]
    return detect(device)


def planned(
    problem: ConvProblem,
    prop: Prop,
    device: torch.device,
    epilogue: str,
    aligned: bool,
    deterministic: bool,
    bias: torch.dtype | None = None,
    mode: str = "now",
) -> CompiledDirection:
    """The kernel of a ``question``. Unsupported, with a reason, if there is none, or none yet in this
    mode."""
    with or_unsupported(f"{problem} {prop}"):
        q = question(problem, prop, device, epilogue, aligned, deterministic, bias)
        made = ready(q.workload, q.target, None, deterministic, CompiledDirection, aligned, mode)
        return of_batch(made, problem)


def proven(
    compiled: CompiledDirection,
    aligned: bool,
    result: Callable[[], torch.Tensor],
    **operands: torch.Tensor,
) -> CompiledDirection:
    """The plan, or the one that takes its place: its first result, made here from the operands (by
    name) into the tensor that ``result`` makes, was checked. Unsupported if none is right."""
    if first_run_check.is_trusted(compiled, aligned):
        return compiled

    tensors = {name: t.detach() for name, t in operands.items()}
    with or_unsupported(compiled.workload.title), on_device(next(iter(tensors.values())).device):
        return first_run_check.run(compiled, {**tensors, compiled.prop.result: result()})


def first_result(question: PlanRequest, device: torch.device) -> None:
    """Load the kernels of a convolution on a GPU and check their first result, as its first call would.
    What fails is left to that call."""
    q = question
    if isinstance(q.workload, ConvWorkload) and q.target == target_of(device):
        with suppress(TransconvError, torch.OutOfMemoryError), on_device(device):
            plan = ready(q.workload, q.target, None, q.deterministic, CompiledDirection, q.aligned, "now")
            first_run_check.first_result(plan, device)


# Short sums, whose points are checked one by one, and sums so long that rows and columns are gathered.
CHECKS = (("mb2ic16ih8oc16oh8kh3ph1", Prop.BWD_D), ("mb1ic2048ih8oc16oh8kh3ph1", Prop.FWD))


@cache
def expect_checks(device: torch.device, dtype: torch.dtype) -> None:
    """Have a thread load on a GPU, once, what checks of results of a type launch: CUDA loads each of some
    forty kernels of torch when it is first launched, cuBLAS its own. The thread rests behind each, as the
    program's launches wait while CUDA loads."""
    if device.type == "cuda" and dtype in DTYPES:
        rehearsal_thread.thread.add(device, partial(check_zeros, device, dtype))


def check_zeros(device: torch.device, dtype: torch.dtype) -> list[int]:
    """Check zeros against sums of zeros; how many elements each check saw."""
    seen = []
    for text, prop in CHECKS:
        problem = ConvProblem.parse(f"{text} dt={DTYPES[dtype]}")
        tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in problem.shapes.items()
        }
        tensors[prop.result].fill_(float("nan")).zero_()
        with torch_internals.behind_operations(rehearsal_thread.thread.rest):
            seen.append(examine(problem, prop, Epilogue(), tensors, tensors[prop.result]).checked)
    return seen


def is_loaded(compiled: CompiledDirection, device: torch.device, aligned: bool) -> bool:
    """Whether a plan's kernels run on a device already, and their results were right."""
    return first_run_check.is_trusted(compiled, aligned) and all(
        s.triton.is_loaded(device.index, aligned) for s in compiled.steps
    )


@contextmanager
def or_unsupported(title: object) -> Iterator[None]:
    """Within ``with`` a kernel is built or checked; any error becomes Unsupported. ``title``: its purpose,
    for the log."""
    start = time.perf_counter()
    try:
        yield
    except Unsupported:
        raise
    except (ScheduleError, ProblemError) as error:
        raise Unsupported("schedule:refused", str(error)) from error
    except ImportError as error:
        raise Unsupported(f"import:{error.name}", str(error)) from error
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a program in training must not stop for a bug of ours
        log.warning("no kernel for %s: %s", title, error, exc_info=True)
        raise Unsupported(f"error:{type(error).__name__}", str(error)) from error
    finally:
        elapsed = time.perf_counter() - start
        if elapsed > SLOW_CALL:
            log.warning("building a kernel took %.1f s: %s", elapsed, title)


def question(
    problem: ConvProblem,
    prop: Prop,
    device: torch.device,
    epilogue: str,
    aligned: bool,
    deterministic: bool,
    bias: torch.dtype | None = None,
) -> PlanRequest:
    """What a kernel for one direction is asked for by; ``bias``: the type of the epilogue's operand, if it
    is not the result's."""
    bia = None if bias is None else DTYPES[bias]
    added = Epilogue.parse(epilogue, None if bia is getattr(problem, prop.result).dtype else bia)
    asked = compiler.question(
        problem, prop, target_of(device), added, aligned=aligned, deterministic=deterministic
    )
    return asked.of_any_batch() if settings.invariant else asked


def of_batch(made: CompiledDirection, problem: ConvProblem) -> CompiledDirection:
    """A plan for the images of a problem, where their number is an argument of its kernels."""
    if not made.required or made.sizes:
        return made
    try:
        return made.at({"MB": problem.mb})
    except TensorError as error:
        raise Unsupported("invariant:sizes", f"{error}; divide the batch") from None


def waits(question: PlanRequest) -> str:
    """Why torch would compute now although there is a plan; empty: its kernels are compiled, or the call
    would wait for them."""
    mode = settings.mode
    if mode == "now" or (question.deterministic and mode == "background"):
        return ""
    if is_ready(question):
        return ""
    if mode == "never":
        return f'{NEVER} (transconv.config.compile is "never")'
    found = state(question)
    if found == COMPILING:
        return f"{COMPILING} (a process compiles its kernel)"
    return f"compile:failed ({found})" if found else f"{COMPILING} (the first call begins it)"


def launch(
    compiled: CompiledDirection,
    src: torch.Tensor,
    wei: torch.Tensor,
    dst: torch.Tensor,
    **extra: torch.Tensor,
) -> None:
    """Run a kernel on the tensors' device, whichever is the current one, on its current stream."""
    if src.is_cuda and several_gpus() and src.device.index != torch.cuda.current_device():
        with torch.cuda.device(src.device):
            compiled.launch(src, wei, dst, **extra)
    else:
        compiled.launch(src, wei, dst, **extra)


def bias_gradient(grad: torch.Tensor, weight: torch.Tensor, p: Params) -> torch.Tensor:
    """The sum of a result's gradient at all positions of all samples. Unsupported in invariant mode where
    no kernel computes it."""
    channels = weight.shape[1] * p.groups if p.transposed else weight.shape[0]
    if not settings.invariant or grad.shape[1] != channels:
        return arguments.bias_gradient(grad, weight, p)
    if grad.dtype not in DTYPES:
        raise Unsupported("invariant:torch", f"torch would add up the gradient of a bias of {grad.dtype}")
    order = arguments.order_of(grad.shape, grad.stride(), channels_last=False)
    if order is None:
        order, grad = tuple(range(grad.dim())), grad.contiguous()
    grad = at_multiple(grad)
    launch = _launch(tuple(grad.shape[1:]), order, DTYPES[grad.dtype], target_of(grad.device), grad.device)
    made = grad.new_empty(channels)
    launch.at({BATCH: grad.shape[0]}).start([grad, made])
    return made


@lru_cache(maxsize=1024)
def _launch(sizes: Ints, order: Order, kind: DType, target: Target, device: torch.device) -> Launch:
    """The kernel for samples of these sizes."""
    shape = (EXAMPLE, *sizes)
    text = bias_sums(TensorSpec(kind, Layout.dense(kind, shape, order)), shape, kind)
    request = PlanRequest(Alone(parse(text)), target, True)
    return Launch.requested(request.of_any_batch(), device, settings.mode)
