"""transconv.nn: torch's twelve convolution modules on transconv's functions, and models whose modules are
exchanged for them.

    convert_(model)      exchanges the classes of modules in place; revert_ undoes it
    off(module)          leaves a module to torch

Each is a subclass of torch's module of the same name with the same state, arguments, defaults and repr,
so `module.__class__` may be exchanged in both directions. A module of a subclass gets a new class that
inherits from the subclass and then from transconv's: its own forward still runs first, and where that
calls `super().forward` or `_conv_forward`, it reaches transconv's instead of torch's. Parametrized
classes are built again on transconv's base."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.utils.parametrize import is_parametrized

from transconv.calls import stats
from transconv.torch_ops import arguments, functional, modules
from transconv.torch_ops.calls import precompile
from transconv.torch_ops.conversion.aten_replacement import aten

Tensor = torch.Tensor

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
]


def padded(module: Any, input: Tensor) -> tuple[Tensor, Any]:
    """The input of a convolution module, padded unless it is with zeros, and the padding that is left."""
    if module.padding_mode == "zeros":
        return input, module.padding
    return F.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0


class Convolves:
    """Mixin: `_conv_forward` by one of our functions."""

    convolve: ClassVar[Callable[..., Tensor]]

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = padded(self, input)
        made: Tensor = self.convolve(input, weight, bias, self.stride, padding, self.dilation, self.groups)
        return made


class ConvolvesTransposed:
    """Mixin: the forward of a transposed convolution by one of our functions."""

    convolve: ClassVar[Callable[..., Tensor]]

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``; ``output_size`` picks among the sizes that the
        stride leaves open. ValueError for another padding mode than zeros or an impossible size."""
        if self.padding_mode != "zeros":
            raise ValueError(
                f"Only `zeros` padding mode is supported for {type(self).__name__.removeprefix('Lazy')}"
            )
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = tuple(
                self._output_padding(
                    input,
                    output_size,
                    self.stride,
                    self.padding,
                    self.kernel_size,
                    len(self.kernel_size),
                    self.dilation,
                )
            )
        made: Tensor = self.convolve(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )
        return made


class Conv1d(Convolves, torch.nn.Conv1d):
    """torch.nn.Conv1d, computed by transconv.conv1d."""

    convolve = staticmethod(functional.conv1d)


class Conv2d(Convolves, torch.nn.Conv2d):
    """torch.nn.Conv2d, computed by transconv.conv2d."""

    convolve = staticmethod(functional.conv2d)


class Conv3d(Convolves, torch.nn.Conv3d):
    """torch.nn.Conv3d, computed by transconv.conv3d."""

    convolve = staticmethod(functional.conv3d)


class ConvTranspose1d(ConvolvesTransposed, torch.nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, computed by transconv.conv_transpose1d."""

    convolve = staticmethod(functional.conv_transpose1d)


class ConvTranspose2d(ConvolvesTransposed, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed by transconv.conv_transpose2d."""

    convolve = staticmethod(functional.conv_transpose2d)


class ConvTranspose3d(ConvolvesTransposed, torch.nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, computed by transconv.conv_transpose3d."""

    convolve = staticmethod(functional.conv_transpose3d)


CONVOLUTIONS: dict[type, type] = {
    kind: ours
    for ours in (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
    for kind in (ours, ours.__bases__[1])
}
"""Our class of each of torch's convolutions, and of ours."""


# A lazy module turns into `cls_to_become` in a hook, after its `forward` was already looked up for
# the first call: so the lazy classes need our forward too.


class LazyConv1d(Convolves, torch.nn.LazyConv1d):  # type: ignore[misc]
    """torch.nn.LazyConv1d; becomes our Conv1d at the first call."""

    cls_to_become = Conv1d
    convolve = staticmethod(functional.conv1d)


class LazyConv2d(Convolves, torch.nn.LazyConv2d):  # type: ignore[misc]
    """torch.nn.LazyConv2d; becomes our Conv2d at the first call."""

    cls_to_become = Conv2d
    convolve = staticmethod(functional.conv2d)


class LazyConv3d(Convolves, torch.nn.LazyConv3d):  # type: ignore[misc]
    """torch.nn.LazyConv3d; becomes our Conv3d at the first call."""

    cls_to_become = Conv3d
    convolve = staticmethod(functional.conv3d)


class LazyConvTranspose1d(ConvolvesTransposed, torch.nn.LazyConvTranspose1d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose1d; becomes our ConvTranspose1d at the first call."""

    cls_to_become = ConvTranspose1d
    convolve = staticmethod(functional.conv_transpose1d)


class LazyConvTranspose2d(ConvolvesTransposed, torch.nn.LazyConvTranspose2d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose2d; becomes our ConvTranspose2d at the first call."""

    cls_to_become = ConvTranspose2d
    convolve = staticmethod(functional.conv_transpose2d)


class LazyConvTranspose3d(ConvolvesTransposed, torch.nn.LazyConvTranspose3d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose3d; becomes our ConvTranspose3d at the first call."""

    cls_to_become = ConvTranspose3d
    convolve = staticmethod(functional.conv_transpose3d)


_OURS: dict[type, type] = {getattr(torch.nn, name): getattr(modules, name) for name in modules.__all__}
_TORCHS: dict[type, type] = {ours: theirs for theirs, ours in _OURS.items()}
_CALLS = {
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
}


def is_ours(kind: type) -> bool:
    """Whether modules of a class are computed by transconv: quantised ones, too."""
    return issubclass(kind, (Convolves, ConvolvesTransposed))


def why_not(module: torch.nn.Module) -> str:
    """Why no class of ours replaces a module's class; empty if one does."""
    kind = type(module)
    theirs = next((c for c in kind.__mro__ if c in _OURS), None)
    if theirs is None:
        return f"its class {kind.__qualname__} is none of torch.nn's convolutions"
    transposed = issubclass(theirs, torch.nn.modules.conv._ConvTransposeNd)
    if transposed and "forward" in vars(module):
        return "it has a forward of its own, beside that of its class"
    for owner in kind.__mro__[: kind.__mro__.index(theirs)]:
        for method in ("forward", "_conv_forward"):
            own = vars(owner).get(method)
            if own is not None and not _goes_on(own, method, theirs, transposed):
                return (
                    f"its class {kind.__qualname__} has a {method} of its own, which does not end "
                    f"in {'super().forward' if transposed else '_conv_forward'}"
                )
    return ""


def _goes_on(method: Any, name: str, theirs: type, transposed: bool) -> bool:
    """Whether a method leaves the convolution to the next class: its code names that method, and no
    convolution function."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if not isinstance(code, CodeType):
        return False
    names = _names(code)
    if names & _CALLS:
        return False
    above = "super" in names and name in names
    if transposed:
        return above
    return above or (
        name == "forward" and ("_conv_forward" in names or {theirs.__name__, "forward"} <= names)
    )


def _names(code: CodeType) -> set[str]:
    """The names in a function's code, inner functions included."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def exchanged(kind: type, ours: Mapping[type, type] = _OURS) -> type:
    """The class of ours for a class of torch's, or a subclass of one."""
    theirs = next(c for c in kind.__mro__ if c in _OURS)
    return ours[theirs] if kind is theirs else _mixed_with(kind, ours[theirs])


@functools.cache
def _mixed_with(kind: type, ours: type) -> type:
    return type(
        kind.__name__,
        (kind, ours),
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "exchanged_for": kind,
            "exchanged_with": ours,
            "__reduce_ex__": _reduce,
        },
    )


def restored(kind: type) -> type | None:
    """The class that one of transconv's replaced; None for a class that replaced none."""
    found: type | None = _TORCHS.get(kind) or vars(kind).get("exchanged_for")
    return found


def expect_float(module: torch.nn.Module, kind: type, ours: Mapping[type, type], also: str = "") -> None:
    """Raises TypeError for a module that ``kind``, one of ``ours``, is not the class for."""
    theirs = next(c for c, made in ours.items() if made is kind)
    if type(module) is not theirs and restored(type(module)) is not theirs:
        raise TypeError(
            f"{kind.__name__}.from_float: expected a torch.nn.{theirs.__name__}, got "
            f"{type(module).__name__}{also}"
        )


def exchange(module: torch.nn.Module, back: bool = False) -> bool:
    """Give a module the other class, in place; False where there is none."""
    kind = type(module)
    parametrized = is_parametrized(module) and kind.__name__.startswith("Parametrized")
    base = kind.__bases__[0] if parametrized else kind
    other = restored(base) if back else exchanged(base)
    if other is None:
        return False
    if parametrized:  # a class for this one module; parametrize restores its first base
        own = {
            name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")
        }
        other = type(kind.__name__, (other,), own)
    module.__class__ = other
    return True


def _reduce(self: Any, protocol: Any) -> Any:
    """Classes made here cannot be imported by name: a pickle names the class that they replaced."""
    kind = type(self)
    made = super(kind, self).__reduce_ex__(protocol)
    if made[0] is copyreg.__newobj__ and made[1] == (kind,):  # type: ignore[attr-defined]
        return _new, (kind.exchanged_for, kind.exchanged_with), *made[2:]
    return made


def _new(kind: type, ours: type) -> Any:
    made: Any = _mixed_with(kind, ours)
    return made.__new__(made)


SWITCHED_OFF = "transconv.off was called with its module"


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: names of exchanged modules, and why other convolutions were left; ``did``: in
    words, what became of the former."""

    converted: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    did: str = "converted"

    def __str__(self) -> str:
        done = len(self.converted)
        left = f", {len(self.skipped)} left" if self.did == "converted" else ""
        head = f"{done} convolution{'s' * (done != 1)} {self.did}{left}"
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def _is_convolution(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.conv._ConvNd)


def convert_(
    model: torch.nn.Module, filter_fn: Callable[[torch.nn.Module, str], bool] | None = None
) -> ConversionReport:
    """Let every torch.nn convolution of ``model`` compute with transconv, in place.

    Parameters, buffers, hooks, the state dict and the optimizer's references stay the same.
    ``filter_fn(module, name)`` may leave modules out. Subclasses of torch's modules keep a forward of
    their own, if it ends in `super().forward` or `_conv_forward`; others are left alone with a
    FallbackWarning, once for each class. `enable` reaches those. TypeError for what is no module."""
    arguments.expect_module(model, "convert_", filter_fn)
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_convolution(module) or modules.is_ours(type(module)):
            continue
        if filter_fn is not None and not filter_fn(module, name):
            skipped[name] = "filter_fn said no"
            continue
        why = SWITCHED_OFF if is_off(module) else modules.why_not(module)
        if not why:
            modules.exchange(module)
            converted.append(name)
            continue
        skipped[name] = why
        if why != SWITCHED_OFF:
            stats.tell_once(f"convert_:{why}", f"transconv.convert_ leaves '{name}' to torch: {why}")
    precompile.note(model)
    precompile.expect(model)
    return ConversionReport(tuple(converted), skipped)


def revert_(model: torch.nn.Module) -> ConversionReport:
    """Undo `convert_`, in place. TypeError for what is no module."""
    arguments.expect_module(model, "revert_")
    return ConversionReport(
        tuple(
            [
                name
                for name, module in model.named_modules()
                if _is_convolution(module) and modules.exchange(module, back=True)
            ]
        ),
        did="torch's again",
    )


class EagerForward:
    """A module's ``forward`` as torch computes that of its class. The operations of a
    graph that it makes are annotated ``by`` torch. A copy or a pickle of the module has one of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.fx.traceback.annotate({"by": SWITCHED_OFF}):
                return type(self.module).forward(self.module, *given, **named)
        with aten():
            return type(self.module).forward(self.module, *given, **named)


def is_off(module: torch.nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), EagerForward)


def off(module: torch.nn.Module, undo: bool = False) -> torch.nn.Module:
    """Leave a module, with all that it has, to torch: in ``torch.compile``, ``transconv.optimize`` and
    ``convert_``, and its forward also in ``enable`` and ``use``. ``undo``: no longer.

    Returns the module. Calls of ``transconv.conv2d`` and the like in its code are as before. TypeError for
    what is no module, ValueError for one with a ``forward`` of its own beside that of its class."""
    arguments.expect_module(module, "off")
    for name, part in module.named_modules():
        if undo and is_off(part):
            del part.forward
        elif not undo and not is_off(part):
            if "forward" in vars(part):
                raise ValueError(
                    f"transconv.off: '{name}' has a forward of its own, beside that of its "
                    "class, which cannot be replaced; call off with the modules in it"
                )
            if _is_convolution(part):
                modules.exchange(part, back=True)
            part.forward = EagerForward(part)
    return module
