"""The first-call check: the first result of each kind of call compared with torch's.

Triton and ptxas miscompile a few kernels, the same way every time. The first launch of a kernel on a
machine is compared with its text, computed at samples (``Launch.start``). Where tensors are small, a
route's result and its gradients are also compared with torch's own function, once in a process, and for
some sizes where these are arguments (``FirstSizes``); for large ones the memory may not suffice. Triton's
interpreter is not checked, unless TRANSCONV_TRUST=always. Of kernels for which torch answered, a thread
compares the first results, on copies of a call's tensors, and torch answers until it has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from transconv.compute import parse
from transconv.functional.calls.route import FunctionCall, Started
from transconv.functional.calls.symbolic_bind import as_tuple
from transconv.runtime import Waiting, is_capturing, rehearsal_thread, was_awaited
from transconv.support import Unsupported, knobs

Tensor = torch.Tensor

log = logging.getLogger("transconv.functional")

SEED = 0x7AB5
LARGE = 1 << 24  # elements of operands; above it only samples are compared
# Of the largest element beside it: two roundings of a type, and of sums of many terms.
ALLOWED = {
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
    torch.float32: 2.0**-10,
    torch.float64: 2.0**-30,
}
ROUNDED = 2.0**-7  # the same of f32 whose products round their operands to tf32: torch cuts them instead


class ThreadComparison:
    """A comparison of one kind of call by a thread: whether it has ``ended``, and all was ``right``. What
    was not is left to the call."""

    __slots__ = ("ended", "right")

    def __init__(self) -> None:
        self.ended = self.right = False

    def hold(self, route: FunctionCall, given: Sequence[Tensor]) -> None:
        """In the thread."""
        _hold(route, given)
        self.right = True

    def end(self) -> None:
        """Calls may be decided anew."""
        self.ended = True

    def is_over(self) -> bool:
        """Whether they may."""
        return self.ended


def agree(route: FunctionCall, tensors: Sequence[Tensor | None], mode: str) -> None:
    """Raises Unsupported("miscompiled") where a kernel's result is not torch's, Waiting while a thread
    looks at it, as the mode has it."""
    bound = route.bound
    assert bound is not None
    given = [t for t in tensors if t is not None]
    policy, device = knobs.trust(), given[0].device
    if policy == "never" or (policy != "always" and device.type == "cpu") or is_capturing(device):
        return
    steps = [step for step in (route.step, *route.gradients) if step is not None]
    sizes = tuple([n for t in given for n in t.shape])
    if all(step.any_size and not step.launch.of.agreed.due(sizes) for step in steps):
        return
    beside = steps[0].launch.of.agreed.beside
    key = bound.function, bound.numbers, bound.wanted, route.aligned, sizes
    found: ThreadComparison | None = beside.get(key)
    if found is None and mode == "background" and _may_wait(steps, given):
        found = beside[key] = ThreadComparison()
        rehearsal_thread.thread.hand(device, given, partial(found.hold, route), found.end)
    if found is not None and not found.ended:
        raise Waiting("a thread compares its first result", found.is_over)
    try:
        if found is None or not found.right:
            _hold(route, given)
    except (Unsupported, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a program in training must not stop for a bug of ours
        log.warning("no kernel for %s: %s", route.name, error, exc_info=True)
        raise Unsupported(f"error:{type(error).__name__}", str(error)) from error
    for step in steps:
        step.launch.of.agreed.done(sizes)
    route.calls = route.calls_back = 0


def _may_wait(steps: Sequence[Started], given: Sequence[Tensor]) -> bool:
    """Whether a thread compares a first result: torch answered while kernels were compiled, none of which
    has been compared, and there is memory for copies, results and gradients of both."""
    launches = [step.launch.of for step in steps]
    return (
        rehearsal_thread.device_of(launches[0].plan.target) is not None
        and not any(launch.agreed.seen for launch in launches)
        and any(launch.request is not None and was_awaited(launch.request) for launch in launches)
        and 6 * rehearsal_thread.bytes_of(given) <= rehearsal_thread.room(given[0].device)
    )


def _hold(route: FunctionCall, given: Sequence[Tensor]) -> None:
    """Compare results and gradients of one call."""
    bound = route.bound
    assert bound is not None
    grads, device = any(bound.wanted), given[0].device
    with torch.enable_grad() if grads else torch.no_grad(), torch.autocast(device.type, enabled=False):
        large = sum(t.numel() for t in given) > LARGE
        leaves = [t.detach() if large else _wide(t.detach()) for t in given]
        for t, on in zip(leaves, bound.wanted or [False] * len(leaves), strict=True):
            t.requires_grad_(on)
        want = () if large else as_tuple(bound.function.torch(*bound.spread(leaves), *bound.numbers))
        with torch.no_grad():
            results, values = route.forward([t.detach() for t in given])
        if not large:
            _compare(route, results, want)
        if grads and not route.hands_gradients:
            # A generator of its own leaves the program's random state alone. The gradient is drawn
            # because that of a norm is rounding alone where it equals the normalized tensor.
            own = torch.Generator(device).manual_seed(SEED)
            flows = [
                torch.randn(t.shape, generator=own, dtype=t.dtype, device=device)
                for t in results[: len(bound.flows)]
            ]
            with torch.no_grad():
                made = route.gradients_of([values[n] for n in bound.saved], flows)
            if not large:
                of = [t for t in leaves if t.requires_grad]
                pairs = [*zip(want, flows, strict=False)]
                wanted = torch.autograd.grad([w for w, _ in pairs], of, [g.to(w.dtype) for w, g in pairs])
                scale = sum(float(g.abs().sum()) for g in flows)
                _compare(route, [t for t in made if t is not None], wanted, scale)


def _wide(t: Tensor) -> Tensor:
    """16-bit tensors as f32, because torch rounds intermediate values."""
    return t.float() if t.is_floating_point() and t.dtype.itemsize < 4 else t


def _rounds(route: FunctionCall) -> bool:
    """Whether a kernel multiplies f32 as tf32. Gradients are multiplied as the result is."""
    if route.step is None:
        return False
    compute = parse(route.step.text)
    return compute.factors is not None and compute.math == "tf32"


def _compare(
    route: FunctionCall, got: Sequence[Tensor], want: Sequence[Tensor], scale: float = 0.0
) -> None:
    """``scale``: the absolute sum of a result's gradient, of which differences may be shares too, evenly
    over an operand: the gradient of a norm of one element is next to nothing, but its terms are not."""
    for ours, theirs in zip(got, want, strict=True):
        if not ours.dtype.is_floating_point:
            right = torch.equal(ours, theirs)
        else:
            wide = torch.float64 if ours.dtype is torch.float64 else torch.float32
            a, b = ours.to(wide), theirs.detach().to(wide)
            near = torch.nan_to_num(b.abs(), 0.0, 0.0, 0.0)
            share = ROUNDED if ours.dtype is torch.float32 and _rounds(route) else ALLOWED[ours.dtype]
            allowed = share * (near + near.mean() + scale / max(1, ours.numel()))
            same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed)
            right = bool(same.all())
        if not right:
            step = route.step
            log.warning("rejected: %s differs from torch's\n%s", route.name, step and step.text)
            raise Unsupported("miscompiled", f"the kernel's result of {route.name} differs from torch's")
