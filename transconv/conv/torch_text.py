"""What torch computes in place of a convolution's kernel, as lines of Python for files that check
themselves (``Workload.torch_text``). They use ``torch`` and its functional module as ``F``."""

from __future__ import annotations

from collections.abc import Iterator

from transconv.compute import OPS
from transconv.conv.epilogue import Epilogue
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.errors import Unsupported


def program(p: ConvProblem, prop: Prop) -> Iterator[str]:
    """The definitions of ``product(a, b)``, in f64, and of what it calls."""
    yield "def product(a, b):"
    yield '    """What torch computes in f64."""'
    if prop is Prop.FWD:
        yield "    return convolved(a, b)"
    else:
        given = ("{0}", "b") if prop is Prop.BWD_D else ("a", "{0}")
        grad = "a" if prop is Prop.BWD_D else "b"
        made = prop.result
        yield (f"    {made} = torch.zeros({p.shapes[made]}, dtype=torch.float64, device=a.device, "
               "requires_grad=True)")
        yield (f"    return torch.autograd.grad(convolved({', '.join(given).format(made)}), {made}, "
               f"{grad})[0]")
    pads = [n for low, high in reversed(list(zip(p.pad_lo, p.pad_hi, strict=True))) for n in (low, high)]
    yield ""
    yield ""
    yield "def convolved(src, wei):"
    yield (f"    src = F.pad(src, {pads})  # low and high of each axis, the last one first; below 0: left "
           "out")
    yield (f"    return F.conv{p.ndims}d(src, wei, stride={p.stride}, dilation={p.dilation}, "
           f"groups={p.g})")


def continued(epilogue: Epilogue, ndims: int) -> Iterator[str]:
    """The lines that continue ``want`` and ``bound`` with what follows on the sums. Raises Unsupported for
    a registered operation whose function of torch has no name, and for results rounded at random."""
    if not epilogue:
        return
    if epilogue.random:
        raise Unsupported("export:rounding", "results that are rounded at random: files that check "
                          "themselves round to nearest")
    yield "acc = want, bound"
    for name in dict.fromkeys(o.name for o in epilogue.operands):
        shaped = f".view({(-1, *[1] * ndims)})" if name == "bia" else ""
        yield f"{name} = {name}.double(){shaped}, 0.0"
    for i, step in enumerate(epilogue.function.steps):
        row = OPS[step.op]
        if not isinstance(row.torch, str):
            raise Unsupported("export:operation", f"the operation '{step.op}' has a function of torch "
                              "without a name, which a file could not import; register it by its "
                              "dotted name")
        numbers = (*step.numbers, *row.defaults[len(step.numbers):])
        given = "".join([*(f", {n!r}" for n in numbers), *(f", {k}={v!r}" for k, v in row.options)])
        names = ", ".join("xyz"[:row.arity])
        yield (f"value_{i} = applied(lambda {names}: {row.torch}({names}{given}), "
               f"{4 if row.exact else 32} * eps, {', '.join(map(_said, step.values))})")
    yield f"want, bound = {_said(epilogue.function.result)}"


def _said(ref: str | int | float) -> str:
    """An argument: a pair of a value and of what it may be off."""
    if isinstance(ref, float):
        return f"(torch.full_like(want, {ref!r}), 0.0)".replace("inf", "torch.inf")
    return ref if isinstance(ref, str) else f"value_{ref}"
