"""Kernels compiled before a call needs them, by processes, while the program goes on.

A call's gradients: with ``config.compile = "now"`` a call waits for its kernel. Those of the gradients are
known at the forward call already, but for the strides of the result's gradient, which are taken to be the
result's. The backward pass waits for what a process has begun and compiles the rest; it chooses as it
would alone.

The layers of a converted model behind the one that is called: in the first training step, a layer's call
tells the sizes of those behind it. They follow through torch's own modules, in the order in which the
model registered them. No code of the model and no hook runs for that. Where a size does not follow (a
module of another kind, an image of one pixel), the guess ends, and the next layer that was not guessed
begins it anew. Kernels of the gradients are handed over behind all others, the last layer's first, as the
backward pass needs them, but for those that take longest, of strided layers, which come before. A wrong
guess costs processor time alone: calls ask for what they need. It takes back what no process has begun,
and the second ends guessing for the model."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from transconv import runtime
from transconv.calls.settings import settings
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop
from transconv.runtime import ahead, begin_processes, beside, helpers, is_collecting, withdraw
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.calls import lower_call

if TYPE_CHECKING:
    from transconv.runtime import PlanRequest

LIKE = "mb8ic64ih14oc64oh14kh3ph1 dt=bf16 tag=nhwc"  # a request that processes rehearse with


def gradients(
    params: Params, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool, mode: str
) -> None:
    """Have processes compile the gradients of a checked, batched call of which no route is known, for the
    tensors of input and weight that require one."""
    if workers := processes(x, w, mode):
        _gradients(params, x, w, flags, aligned, workers)


def meanwhile(
    params: Params, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool
) -> None:
    """The same for a call that torch computes while a process compiles its kernel: torch makes the
    gradients, too, which ask for nothing."""
    if (
        settings.reach != "any"
        and torch.is_grad_enabled()
        and (x.requires_grad or w.requires_grad)
        and not is_collecting()
    ):
        _gradients(params, x, w, flags, aligned, beside(), hurried=False)


def _gradients(
    params: Params,
    x: torch.Tensor,
    w: torch.Tensor,
    flags: lower_call.Flags,
    aligned: bool,
    workers: int,
    hurried: bool = True,
) -> None:
    with quietly():
        asked = questions(
            params, Given.of(x), Given.of(w), x.requires_grad, w.requires_grad, flags, aligned
        )
        compile_ahead(asked, workers, hurried)


def processes(x: torch.Tensor, w: torch.Tensor, mode: str) -> int:
    """How many processes may compile ahead of a call in training. None in other modes than ``now``, for
    kernels of any size, for calls that torch computes, while a CUDA graph is captured, and where they
    would gain nothing (``runtime.helpers``)."""
    if (
        mode != "now"
        or settings.reach == "any"
        or not (x.requires_grad or w.requires_grad)
        or not torch.is_grad_enabled()
        or is_collecting()
        or lower_call.reasons(x, w)
        or runtime.is_capturing(x.device)
    ):
        return 0
    return helpers()


def expect(model: torch.nn.Module) -> None:
    """A model was converted: where nothing is on disk, processes start before its first step has work for
    them. With ``now`` none for a model that does not train; none where kernels are not compiled."""
    mode, some = settings.mode, None
    for p in model.parameters():
        if not is_lazy(p) and (mode != "now" or (p.requires_grad and model.training)):
            some = p
            break
    if some is None or mode == "never" or lower_call.reasons(some, some):
        return
    if workers := processes(some, some, "now") if mode == "now" else beside():
        with quietly():
            like = ConvProblem.parse(LIKE)
            begin_processes(lower_call.question(like, Prop.FWD, some.device, "", True, False), workers)
    if mode == "background":
        lower_call.expect_checks(some.device, some.dtype)


@contextmanager
def quietly() -> Iterator[None]:
    """An error ends what is within ``with``, not the call: that, or the backward pass, meets it if it is
    about the kernel."""
    try:
        yield
    except Exception as error:
        lower_call.log.debug("not compiled ahead: %s", error, exc_info=True)


def compile_ahead(questions: Iterable[PlanRequest], workers: int, hurried: bool = True) -> None:
    """Hand questions of convolutions to processes, once each; ``hurried``: calls may wait for them."""
    ahead(questions, CompiledDirection, workers, hurried)


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor of a call without its values."""

    shape: Ints
    strides: Ints
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Given:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def is_last(self) -> bool:
        """Whether torch takes it for channels_last."""
        return arguments.suggests_channels_last(self.shape, self.strides)

    def sized(self, shape: Ints, channels_last: bool) -> Given:
        """A tensor of its type that a call makes."""
        return replace(self, shape=shape, strides=arguments.result_strides(shape, channels_last))


def questions(
    params: Params, x: Given, w: Given, of_x: bool, of_w: bool, flags: lower_call.Flags, aligned: bool
) -> Iterator[PlanRequest]:
    """What the gradients of a call will ask for: that of its input if ``of_x``, of its weight if
    ``of_w``."""
    last, shape = x.is_last or w.is_last, arguments.output_shape(x.shape, w.shape, params)
    near, weight = ((t.shape, t.strides) for t in (x, w))
    of_near, of_weight = ((t.shape, arguments.result_strides(t.shape, last)) for t in (x, w))
    # The gradient of one pixel is a sum, which torch leaves contiguous.
    far = shape, arguments.result_strides(shape, last and any(n != 1 for n in shape[2:]))
    data = Prop.FWD if params.transposed else Prop.BWD_D
    for on, direction, tensors in (
        (of_x, data, (of_near, weight, far)),
        (of_w, Prop.BWD_W, (near, of_weight, far)),
    ):
        if on and all(shape):
            problem = lower_call.describe(x.dtype, *tensors, params, flags.math)
            yield lower_call.question(problem, direction, x.device, "", aligned, flags.deterministic)


POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
PADS = (nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad2d)
KNOWN = frozenset((*POOLS, *ADAPTIVE, *PADS, nn.Upsample, nn.PixelShuffle))
"""Exact classes, as a subclass may do anything."""


def result(module: nn.Module, shape: Ints) -> Ints | None:
    """The shape of the result of a module of ``KNOWN`` for a batched input; None where it does not
    follow. By arithmetic: torch tells it for tensors without data, too, but imports SymPy for some of
    these modules, which takes as long as compiling a kernel."""
    head, sides = shape[:2], shape[2:]
    kind, given = type(module), vars(module)
    if kind in POOLS:
        if given.get("return_indices"):
            return None
        kernel, stride, padding, dilation = (
            _each(given.get(name, 1), len(sides))
            for name in ("kernel_size", "stride", "padding", "dilation")
        )
        sides = tuple(
            _pooled(n, k, s, p, d, given["ceil_mode"])
            for n, k, s, p, d in zip(sides, kernel, stride, padding, dilation, strict=True)
        )
    elif kind in ADAPTIVE:
        asked = given["output_size"]
        wanted = tuple(asked) if isinstance(asked, Sequence) else (asked,) * len(sides)
        sides = tuple(n if want is None else want for n, want in zip(sides, wanted, strict=True))
    elif kind in PADS:
        around = given["padding"]  # of the last side first
        sides = tuple(
            n + around[2 * at] + around[2 * at + 1]
            for n, at in zip(sides, reversed(range(len(sides))), strict=True)
        )
    elif kind is nn.PixelShuffle:
        times = given["upscale_factor"]
        head, sides = (head[0], head[1] // times**2), tuple(n * times for n in sides)
    elif given["size"] is not None:
        sides = _each(given["size"], len(sides))
    else:
        scales = _each(given["scale_factor"], len(sides))
        sides = tuple(int(n * by) for n, by in zip(sides, scales, strict=True))
    return (*head, *sides) if all(n > 0 for n in (*head, *sides)) else None


def _each(given: Any, count: int) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,) * count


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """The number of windows along a side: with ``ceil`` also one that runs over the end, if it begins
    before that."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = room // stride + 1
    if ceil and room % stride and count * stride < size + padding:
        count += 1
    return count


MOST_WRONG = 2  # wrong guesses after which a model is left alone
# Results are of the input's size. Exact classes, as a subclass may do anything.
SAME = frozenset(
    (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        nn.GroupNorm,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        nn.Identity,
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.ELU,
        nn.GELU,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.LeakyReLU,
        nn.Mish,
        nn.PReLU,
        nn.ReLU,
        nn.ReLU6,
        nn.Sigmoid,
        nn.SiLU,
        nn.Softplus,
        nn.Tanh,
    )
)


class _LayerCall(NamedTuple):
    """What the call of a layer asks for, and its ``result``; the ``gradients`` of those that train."""

    question: PlanRequest
    gradients: tuple[PlanRequest, ...]
    result: Given


class _Network:
    """The modules of a model that have no modules in them, and what was guessed of its first pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.leaves = [weakref.ref(m) for m in model.modules() if next(m.children(), None) is None]
        self.expected: dict[int, _LayerCall] = {}
        self.given: dict[int, Given] = {}  # the last tensor of so many channels
        self.seen: set[int] = set()
        self.wrong = 0

    def find(self, weight: torch.Tensor) -> int | None:
        """The place of the layer with this weight."""
        return next(
            (
                at
                for at, leaf in enumerate(self.leaves)
                if isinstance(m := leaf(), _ConvNd) and m._parameters.get("weight") is weight
            ),
            None,
        )

    def called(self, at: int, x: Given, trains: bool, flags: lower_call.Flags, workers: int) -> None:
        """A call of a layer whose plan is not known in this process."""
        layer = self.leaves[at]()
        assert isinstance(layer, _ConvNd)
        if at in self.seen:  # of other sizes: the first pass is over
            self._end()
            return
        self.seen.add(at)
        here = _layer(layer, x, trains, flags)
        guessed = self.expected.pop(at, None)
        if guessed is not None and guessed.question == here.question:
            return
        if guessed is not None:
            self.wrong += 1
            withdraw(guessed.gradients)
            self._forget()
        if self.wrong == MOST_WRONG:
            self._end()
            return
        self.given[x.shape[1]], self.given[here.result.shape[1]] = x, here.result
        self.expected |= self._following(at, here.result, flags)
        asked = self.expected.values()
        compile_ahead((a.question for a in asked), workers)
        # The backward pass comes after all of the forward pass, and begins with the last layer. Plans of
        # many kernels take the longest: they are begun first.
        gradients = [q for a in (*reversed(asked), here) for q in a.gradients]
        compile_ahead(sorted(gradients, key=_kernels, reverse=True), workers)

    def _forget(self) -> None:
        withdraw(q for asked in self.expected.values() for q in (asked.question, *asked.gradients))
        self.expected.clear()

    def _end(self) -> None:
        self._forget()
        self.leaves.clear()

    def _following(self, at: int, now: Given, flags: lower_call.Flags) -> Iterator[tuple[int, _LayerCall]]:
        """The layers behind one whose result is ``now``, with what their calls will ask for."""
        for place in range(at + 1, len(self.leaves)):
            module = self.leaves[place]()
            if all(n == 1 for n in now.shape[2:]):
                return
            if isinstance(module, _ConvNd):
                channels = module.in_channels
                if now.shape[1] != channels:  # of an earlier tensor, as in a shortcut, or of several
                    now = self.given.get(channels) or now.sized(
                        (now.shape[0], channels, *now.shape[2:]), now.is_last
                    )
                try:
                    asked = _layer(module, now, True, flags)
                except RuntimeError:  # it does not fit
                    return
                now = asked.result
                self.given[now.shape[1]] = now
                yield place, asked
            elif module is not None and type(module) in KNOWN:
                shape = result(module, now.shape)
                if shape is None:
                    return
                now = now.sized(shape, now.is_last)
                self.given[now.shape[1]] = now
            elif type(module) not in SAME:
                return


def _kernels(question: PlanRequest) -> int:
    """How many kernels a plan has at least: one for each stride phase."""
    workload = question.workload
    assert isinstance(workload, ConvWorkload)
    return prod(workload.problem.stride) if workload.prop is Prop.BWD_D else 1


def _layer(layer: _ConvNd, x: Given, trains: bool, flags: lower_call.Flags) -> _LayerCall:
    """What the call of a layer asks for; ``trains``: its input requires a gradient. RuntimeError where the
    input does not fit, or is padded by other than zeros, or the weight is computed anew for each call."""
    w, bias = (layer._parameters.get(name) for name in ("weight", "bias"))
    if w is None or layer.padding_mode != "zeros":
        raise RuntimeError(f"the sizes behind {layer} do not follow")
    p = arguments.resolve_call(
        x,
        w,
        bias,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
    )
    weight = Given.of(w)
    y = x.sized(arguments.output_shape(x.shape, w.shape, p), x.is_last or weight.is_last)
    problem = lower_call.describe(
        x.dtype, (x.shape, x.strides), (weight.shape, weight.strides), (y.shape, y.strides), p, flags.math
    )
    question = lower_call.question(
        problem,
        Prop.BWD_D if p.transposed else Prop.FWD,
        x.device,
        "" if bias is None else "bias",
        True,
        flags.deterministic,
    )
    return _LayerCall(question, (*questions(p, x, weight, trains, w.requires_grad, flags, True),), y)


class _Networks:
    """The networks of converted models that live, and the lock of what is done with them."""

    def __init__(self) -> None:
        self.all: list[_Network] = []
        self.lock = threading.Lock()


_networks = _Networks()


def note(model: nn.Module) -> None:
    """Remember the modules of a converted model, as long as it lives."""
    with _networks.lock:
        others = [n for n in _networks.all if (m := n.model()) is not None and m is not model]
        _networks.all = [*others, _Network(model)]


def layers(
    weight: torch.Tensor, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, mode: str
) -> None:
    """Have processes compile the kernels of the layers behind the one with this ``weight``. ``x``, ``w``:
    as its call multiplies them. Does nothing where ``ahead.gradients`` does nothing."""
    if not _networks.all or not (workers := processes(x, w, mode)):
        return
    with _networks.lock, quietly():
        for network in _networks.all:
            at = network.find(weight)
            if at is not None:
                network.called(at, Given.of(x), x.requires_grad, flags, workers)
                return


def _forked() -> None:
    """After a fork: another thread of the parent may have held the lock, and the processes are its own."""
    _networks.lock = threading.Lock()
    for network in _networks.all:
        network.expected.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
