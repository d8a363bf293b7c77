"""``export``: the kernels of a model's convolutions as files, with an index of which module uses which.

The convolutions are those that a model calls, as torch's operator sees them: whichever module or function
they come from, after padding modes, autocast and parametrizations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, build
from transconv.runtime import standalone
from transconv.support import ProblemError, ScheduleError, TransconvError, Unsupported, __version__
from transconv.target import Target, detect
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import layer_keys, lower_call

BIAS_BEHIND = "the bias is not added by the kernel: add it to the result"


@dataclass(frozen=True)
class Use:
    """The kernels of one call of a module, by name: for its result and for each gradient."""

    module: str
    kernels: dict[str, str]
    note: str = ""


@dataclass(frozen=True)
class Exported:
    """The result of an export: the folder, each kernel's description by name, the modules' uses of them,
    and why other convolutions were left out."""

    directory: Path
    kernels: dict[str, dict[str, Any]]
    uses: tuple[Use, ...]
    left: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = (
            f"{len(self.kernels)} kernels for {len(self.uses)} calls in {self.directory}, "
            f"{len(self.left)} calls left out"
        )
        return "\n".join([head, *(f"  {name or 'the model'}: {why}" for name, why in self.left)])


def export(
    model: torch.nn.Module,
    *inputs: Any,
    directory: str | os.PathLike[str],
    target: Target | str | None = None,
    backward: bool = False,
    aot: bool = False,
    workers: int = 1,
    force: bool = False,
) -> Exported:
    """Write kernels for the convolutions of a model, transposed ones included, as files that run without
    transconv; an ``index.json`` and a ``README.md`` say which module uses which.

    The model runs once on ``inputs`` (tensors of any device, also of torch's ``meta``), as it is: call
    ``model.eval()`` first if a run must not change it. Sizes, strides and types of that run become
    constants of the kernels. ``target``: a chip (``sm_90``), default this machine's, or Triton's
    interpreter without a GPU; ``backward``: also the gradients of what requires one; ``aot``: machine code
    beside each file, made by ``workers`` processes; ``force``: write into a folder that is not empty.

    Raises Unsupported if no convolution can be exported, or not ahead of time, ScheduleError for a target
    that is unknown, FileExistsError for a folder that is not empty, OSError where nothing can be written,
    and what the model raises. Nothing is half-written."""
    arguments.expect_module(model, "export")
    directory = Path(directory)
    standalone.check(directory, force)
    chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
    calls = recorded(model, inputs, backward)
    made = _Kernels(chip)
    uses, left = [], []
    for call in calls:
        if call.why_not:
            left.append((call.module, call.why_not))
            continue
        try:
            uses.append(made.use(call))
        except (Unsupported, ScheduleError) as error:
            left.append((call.module, str(error)))
    if not uses:
        why = "; ".join(dict.fromkeys(why for _, why in left)) or "it called none"
        raise Unsupported("export:model", f"no convolution of the model can be exported: {why}")
    packages, files = standalone.files_of(list(made.plans.values()), aot, workers=workers)
    done = Exported(directory, {p.name: _described(p, aot) for p in packages}, tuple(uses), tuple(left))
    files["index.json"] = (json.dumps(_index(done, chip), indent=1) + "\n").encode()
    files["README.md"] = (
        standalone.templates().get_template("README.md.jinja").render(**_index(done, chip)).encode()
    )
    standalone.write(directory, files, force)
    return done


@dataclass
class _Kernels:
    """The plans so far, each problem once, by the names of their packages."""

    target: Target
    plans: dict[str, CompiledDirection] = field(default_factory=dict)
    known: dict[tuple[ConvProblem, Prop, Epilogue], str] = field(default_factory=dict)

    def use(self, call: CapturedCall) -> Use:
        """The kernels of a call. Raises Unsupported and ScheduleError."""
        names, note = {}, ""
        for part in call.parts:
            epilogue = Epilogue()
            if call.bias is not None and part.computes == "result":
                epilogue, note = self.with_bias(call, part)
            names[part.computes] = self.kernel(part, epilogue)
        return Use(call.module, names, note)

    def with_bias(self, call: CapturedCall, part: CapturedTensor) -> tuple[Epilogue, str]:
        """The bias in the kernel, if a kernel adds one of its type."""
        own = part.problem.specs[part.prop.result].dtype
        assert call.bias is not None
        bias = lower_call.DTYPES.get(call.bias)
        epilogue = Epilogue.parse("bias", None if bias is own else bias)
        try:
            if bias is not None:
                self.kernel(part, epilogue)
                return epilogue, ""
        except TransconvError:
            pass
        return Epilogue(), BIAS_BEHIND

    def kernel(self, part: CapturedTensor, epilogue: Epilogue) -> str:
        """The name of the kernel of a problem. Raises as ``build``."""
        key = (part.problem, part.prop, epilogue)
        if key not in self.known:
            plan = build(part.problem, part.prop, self.target, None, epilogue)
            name = self.known[key] = standalone.packaged(plan).name
            self.plans[name] = plan
        return self.known[key]


def _described(package: standalone.PlanPackage, ahead: bool) -> dict[str, Any]:
    """A kernel's entry in the index."""
    workload = package.plan.workload
    assert isinstance(workload, ConvWorkload)
    return {
        "file": f"{package.name}.py",
        "problem": str(workload.problem),
        "direction": workload.direction,
        "epilogue": str(workload.epilogue),
        "schedule": str(package.plan.schedule),
        "launches": len(package.launches),
        "tensors": standalone.described(package),
        **({"machine_code": standalone.code_folder(package)} if ahead else {}),
    }


def _index(done: Exported, target: Target) -> dict[str, Any]:
    return {
        "made_by": f"transconv {__version__}",
        "target": target.name,
        "kernels": done.kernels,
        "uses": [{"module": u.module, "kernels": u.kernels, "note": u.note} for u in done.uses],
        "left_out": [{"module": name, "why": why} for name, why in done.left],
    }


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that a call or its backward computes; ``computes`` is ``result``, ``input gradient`` or
    ``weight gradient``."""

    computes: str
    problem: ConvProblem
    prop: Prop


@dataclass(frozen=True)
class CapturedCall:
    """One call: the module that made it (empty: the model itself), what it computes, and the type of its
    bias; ``why_not``: why no kernel computes it."""

    module: str
    parts: tuple[CapturedTensor, ...]
    bias: torch.dtype | None = None
    why_not: str = ""


def recorded(model: torch.nn.Module, inputs: Sequence[Any], backward: bool) -> list[CapturedCall]:
    """Run a model once and return its convolutions in order; with ``backward`` also the gradients of
    tensors that require one. Raises the model's errors."""
    recorder = _Recorder(backward)
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: recorder.inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
    try:
        with torch.set_grad_enabled(backward), recorder:
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.calls


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, backward: bool) -> None:
        begin: Any = super().__init__
        begin()
        self.backward = backward
        self.calls: list[CapturedCall] = []
        self.inside: list[str] = []

    def leave(self) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.calls.append(_call(self.inside[-1] if self.inside else "", args, self.backward))
        return function(*args, **(kwargs or {}))


def _call(module: str, args: Sequence[Any], backward: bool) -> CapturedCall:
    x, w, b, stride, padding, dilation, transposed, output_padding, groups = args
    # The model may run on another device than its kernels will.
    why = [r for r in lower_call.reasons(x, w) if not r.startswith("device:")]
    if why:
        return CapturedCall(module, (), why_not="; ".join(why))
    rank = x.dim() - 2
    numbers = [
        tuple(n) * rank if len(n) == 1 else tuple(n) for n in (stride, padding, dilation, output_padding)
    ]
    p = Params(numbers[0], numbers[1], numbers[2], transposed, numbers[3], groups)
    try:
        parts = tuple(_parts(x, w, p, (x.requires_grad, w.requires_grad) if backward else (False, False)))
    except ProblemError as error:
        return CapturedCall(module, (), why_not=str(error))
    return CapturedCall(module, parts, None if b is None else b.dtype)


def _parts(x: torch.Tensor, w: torch.Tensor, p: Params, wanted: tuple[bool, bool]) -> list[CapturedTensor]:
    """The computed tensors; of gradients those that are wanted."""
    math = lower_call.flags(x.dtype).math
    each = zip(layer_keys.computed(x, w, p), (True, *wanted), strict=True)
    return [
        CapturedTensor(name, lower_call.describe(x.dtype, *given, p, math), direction)
        for (name, direction, given), on in each
        if on
    ]
