"""The route of one result: a kernel, or torch and the reason why.

It is made once (calls/select_impl.py) and run many times. After the first launch the kernel's start
function is bound to it, so that a call makes the result and starts the kernel, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.calls.guard import current_device as current_device
from transconv.calls.guard import start_of
from transconv.calls.route_cache import Route
from transconv.calls.settings import settings
from transconv.conv import Prop
from transconv.runtime import torch_internals
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion import aten_convolutions, prepacked_weights

if TYPE_CHECKING:
    from transconv.calls.size_policy import SizeChoice, SizeTrial
    from transconv.conv import CompiledDirection, LayerRegistry

Run = Callable[..., torch.Tensor]  # from the given tensors to the computed one
Begin = Callable[[Ints], Callable[..., None]]  # from sizes to what starts a plan for them
# Of the result's gradient, input and weight; None where they are of another kind.
Gradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor],
                     "tuple[torch.Tensor | None, ...] | None"]


def laid_out(made: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """torch's result with the strides of the rule; the common case, that it has them, is tested first."""
    if not channels_last and made.is_contiguous():
        return made
    return shapes.with_result_strides(made, channels_last)


_new = object.__new__
_empty = torch_internals.quickest()


class RouteEpilogue(NamedTuple):
    """What follows the sums of a route, behind a bias or with it.

    ``words``: as a kernel's epilogue is written; ``names``: those of its operands in the plan; ``reads``,
    of a call's weight and what follows it: these operands, as the kernel reads them; ``computed``: what
    torch computes, of the whole call; ``shapes``: in which a launch by names sees the operands;
    ``biased``: whether there is a bias among the tensors; ``picks``: for entries, the argument or else the
    number of each operand, None where operands are copied in every call."""

    words: str
    names: tuple[str, ...]
    reads: Callable[..., Sequence[torch.Tensor]]
    computed: Callable[..., torch.Tensor]
    shapes: Sequence[Ints] = ()
    activation: str = ""
    biased: bool = True
    picks: tuple[tuple[str, torch.Tensor | None], ...] | None = None

    def named(self, read: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The operands by the kernel's names, in its shapes."""
        if self.shapes:
            read = [t.view(shape) for t, shape in zip(read, self.shapes, strict=True)]
        return dict(zip(self.names, read, strict=True))


class ConvCall(Route):
    """The route of one tensor, which one kernel of a direction computes, or torch."""

    __slots__ = ("adds_bias", "channels_last", "choice", "compiled", "copies", "direction", "epilogue",
                 "far", "gradients", "halves", "near", "params", "plain", "registry", "rival", "shape",
                 "start", "strides", "trains", "trial", "types", "whole")

    def __init__(self, direction: Prop, params: Params, shape: Ints, channels_last: bool,
                 epilogue: RouteEpilogue | None = None) -> None:
        super().__init__()
        self.epilogue = epilogue  # None: a bias, if one is given
        # The route of the sums alone, where torch computes what follows them.
        self.plain: ConvCall | None = None
        self.direction = direction
        self.params = params
        self.shape = shape
        self.channels_last = channels_last
        self.strides = shapes.result_strides(shape, channels_last)
        # The problem's names of the layer's input and of its result.
        self.near, self.far = ("dst", "src") if params.transposed else ("src", "dst")
        # Those of the layer's input, weight and result; None where they are one.
        self.types: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None
        self.compiled: CompiledDirection | None = None
        self.halves: prepacked_weights.Halves | None = None  # where it copies the weight first
        self.registry: LayerRegistry | None = None  # where sizes are arguments of its kernel
        # Where earlier sizes decide which kernel answers: what is known of this one, and while its own
        # kernel is timed against one for any size, the trial and the route of that one.
        self.choice: SizeChoice | None = None
        self.trial: SizeTrial | None = None
        self.rival: ConvCall | None = None
        self.whole = False  # of integers, for which another route is found
        self.trains = False  # a call asked for gradients, which were then compiled ahead
        self.adds_bias = False  # after the kernel, because its epilogue cannot
        self.copies = False  # operands of the epilogue, which the kernel reads in another order
        # From the given tensors to the result with nothing left to decide, on `device` as the
        # current one. Bound after the first launch.
        self.start: Run | None = None
        # `functions` are those of autograd, by the type they cast to and whether they are for `start`.
        # Entries of the gradients that were seen, by the wanted ones: see calls/call_entries.py.
        self.gradients: dict[tuple[bool, ...], Gradients] = {}

    @property
    def name(self) -> str:
        return self.direction.value

    @property
    def any_size(self) -> bool:
        return self.registry is not None

    @property
    def asks_own(self) -> bool:
        """Whether the kernel that it has, or waits for, is to be one of its own size."""
        return settings.sizes != "any" if self.choice is None else self.choice.own

    def count(self) -> None:
        super().count()
        for other in (self.plain, self.rival):
            if other is not None:
                other.count()

    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None,
                *more: Any) -> torch.Tensor:
        """A fresh result of a forward route; ``more``: what else its epilogue reads."""
        behind, start = self.epilogue, self.start
        made = None if self.types is None else self.types[2]  # None: of the input's type
        if behind is not None and self.plain is not None:
            return behind.computed(x, w, b, *more)
        if behind is not None:
            read, names = behind.reads(w, b, *more), behind.names
        elif b is None or self.adds_bias:
            read, names = (), ()
        else:
            read, names = (b.contiguous() if self.copies else b,), ("bia",)
        if start is None and self.any_size:  # the kernel may have run for other sizes
            self.bind(x, made or x.dtype, self.near, "wei", *names, self.far)
            start = self.start
        if start is not None and current_device() == self.device:
            y = start(x, w, *read)
        elif self.whole:
            return aten_convolutions.whole_forward(x, w, b, self.params)
        else:
            self.calls += 1
            if self.compiled is None:
                if behind is not None:
                    return behind.computed(x, w, b, *more)
                return laid_out(aten_convolutions.aten_forward(x, w, b, self.params), self.channels_last)
            y = x.new_empty_strided(self.shape, self.strides, dtype=made)
            extra = dict(zip(names, read, strict=True)) if behind is None else behind.named(read)
            self.launch({self.near: x, "wei": w, self.far: y, **extra})
            self.bind(x, y.dtype, self.near, "wei", *names, self.far)
        if self.adds_bias and b is not None:
            y += b.view(-1, *[1] * (x.dim() - 2))
        return y

    def launch(self, tensors: dict[str, torch.Tensor]) -> None:
        """Run the plan on tensors by name; copies of the weight that exist are not made again."""
        halves, compiled = self.halves, self.compiled
        assert compiled is not None
        made = None if halves is None else prepacked_weights.find(halves, tensors["wei"])
        if halves is None or made is None:
            lower_call.launch(compiled, **tensors)
        else:
            names = (c.name for c in halves.copies)
            lower_call.launch(halves.rest, **tensors, **dict(zip(names, made, strict=True)))

    def lay_out(self, w: torch.Tensor) -> None:
        """Make the copies of a frozen weight, where the plan begins with such copies."""
        halves = (self if self.plain is None else self.plain).halves
        if halves is not None:
            prepacked_weights.lay_out(halves, w)

    def of_given(self) -> Run:
        """``forward`` as a function of the given tensors alone."""
        return self.forward if self.epilogue is None or self.epilogue.biased else self._unbiased

    def _unbiased(self, x: torch.Tensor, w: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.forward(x, w, None, *more)

    def bound(self) -> Run:
        """The same without further checks, where the kernel has its start function and reads the tensors
        as they are: for the device of `start`."""
        start = None if self.copies or self.adds_bias else self.start
        return start or self.of_given()

    def gradient(self, like: torch.Tensor, near: torch.Tensor | None, w: torch.Tensor | None,
                 far: torch.Tensor) -> torch.Tensor:
        """Run a gradient's route; of ``near`` and ``w`` the one that it makes is None, and ``like``
        has its dtype and device."""
        start = self.start
        given = near if w is None else w
        assert given is not None
        first, last = ("wei", self.near) if near is None else (self.near, "wei")
        if start is None and self.any_size:
            self.bind(given, like.dtype, first, self.far, last)
            start = self.start
        if start is not None and current_device() == self.device:
            return start(given, far)
        self.calls += 1
        assert self.compiled is not None
        made = like.new_empty_strided(self.shape, self.strides)
        lower_call.launch(self.compiled, **{first: given, self.far: far, last: made})
        self.bind(given, made.dtype, first, self.far, last)
        return made

    def bind(self, given: torch.Tensor, dtype: torch.dtype, *names: str) -> None:
        """Keep the kernel's start function. ``names``: the plan's names of a call's tensors in
        order, then of the result; ``given`` is any of the former."""
        if self.start is not None or self.compiled is None:
            return
        device = given.device.index
        begin = self.compiled.starter(device, self.aligned, names)
        if begin is None:  # no kernel of a device is kept, as on the CPU
            return
        if self.rival is not None:
            self.rival.bind(given, dtype, *names)
        if self.halves is not None:
            begin = prepacked_weights.starter(self.halves, device, self.aligned, names, begin)
        self._starts(begin, device, len(names), dtype)

    def _starts(self, begin: Callable[..., None], device: int, count: int, dtype: torch.dtype) -> None:
        self.device = device
        self.functions.clear()
        start = start_of(count - 1)(self, self.shape, self.strides, begin, dtype, _empty)
        if self.trial is not None and self.rival is not None:
            start = self.trial.alternating(start, self.rival.start)
        self.start = start

    def resized(self, shape: Ints, strides: Ints, compiled: CompiledDirection, begin: Callable[..., None],
                device: int, count: int, dtype: torch.dtype) -> ConvCall:
        """The route of a call that differs in its sizes alone, of which ``count`` tensors ``begin`` starts
        the plan. This one counts its calls."""
        made: ConvCall = _new(ConvCall)
        made.direction, made.params, made.channels_last = self.direction, self.params, self.channels_last
        made.shape, made.strides, made.near, made.far = shape, strides, self.near, self.far
        made.types, made.aligned, made.registry = self.types, self.aligned, self.registry
        made.compiled, made.device, made.halves, made.reason = compiled, device, None, ""
        made.whole = made.trains = made.adds_bias = made.copies = False
        made.over = made.epilogue = made.plain = made.choice = made.trial = made.rival = None
        made.functions, made.gradients, made.calls = {}, self.gradients, 0
        made.start = start_of(count - 1)(self, shape, strides, begin, dtype, _empty)
        return made


class RouteMatch(NamedTuple):
    """The route of a call, whether it was known before, and what of its key is not in the tensors."""

    route: ConvCall
    known: bool
    flags: lower_call.Flags
    aligned: bool
