"""The sizes of a call that are arguments of kernels: read from its tensors, and checked against the
kernels' requirements before a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transconv.errors import TensorError
from transconv.ir import Expr, Sizes, Tensor, Values, function_of, sizes_told, strictest, values_of
from transconv.runtime.operands import Wanted


@dataclass(slots=True)
class Required:
    """The sizes that are arguments of all kernels of a plan, and what each of them requires."""

    sizes: Sizes
    tensors: tuple[Tensor, ...]  # of a call
    about: str  # what the plan is for
    names: tuple[str, ...] = field(init=False, repr=False)
    meets: Callable[..., bool] | None = field(default=None, init=False, repr=False)
    lying: list[Callable[[Values], Wanted]] = field(init=False, repr=False)
    numbers: Callable[..., tuple[Any, ...]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.names, self.lying = self.sizes.names, []

    def wanted(self, values: Values) -> tuple[Wanted, ...]:
        """The tensors of a call of these sizes."""
        if not self.lying:  # torch is there by then
            self.lying = [_lying(t, self.sizes) for t in self.tensors]
        return tuple([at(values) for at in self.lying])

    def takes(self, *sizes: int) -> bool:
        """Whether sizes, in the order of their names, meet the requirements."""
        if self.meets is None:  # many plans are read from disk, and few take a call
            self.meets = function_of(self.sizes.requirements, self.names,
                                     lambda texts: ([], " and ".join(texts) or "True"))
        return self.meets(*sizes)

    def check(self, values: Values) -> None:
        """Raise TensorError, with a message of one line, for sizes that do not meet the requirements."""
        if not self.takes(*[values[n] for n in self.names]):
            raise TensorError(f"{self.sizes.why_not(values)}; the plan requires {self.sizes}, and is for "
                              f"{self.about}")

    def of_call(self, tensors: Mapping[str, Any]) -> dict[str, int]:
        """Each size by name: that of the first tensor that has it as a dimension. Raises TensorError, with
        a message of one line, for sizes that do not meet the requirements, and if no tensor has a size."""
        found = sizes_told((t, getattr(tensors.get(t.name), "shape", ())) for t in self.tensors)
        if missing := [n for n in self.sizes.names if n not in found]:
            raise TensorError(f"no tensor of the call tells {missing[0]}, as a dimension of that size "
                              f"does; the plan is for {self.about}")
        self.check(found)
        return found


def _lying(tensor: Tensor, sizes: Sizes) -> Callable[[Values], Wanted]:
    """A function of sizes that says how a tensor has to lie."""
    given = Wanted.of(tensor)
    if not tensor.extents:
        return lambda _: given
    rank = len(tensor.shape)
    find = values_of([*tensor.extents, *tensor.steps, tensor.room], sizes.names)
    name, elements, layout, names = tensor.name, given.elements, tensor.layout, sizes.names

    def at(values: Values) -> Wanted:
        found = find(*[values[n] for n in names])
        return Wanted(name, elements, found[:rank], found[rank:-1], found[-1], layout)

    return at


def required(each: Sequence[Sizes], tensors: tuple[Tensor, ...], about: str) -> Required | None:
    """What kernels together require, all of which take the same sizes, with the examples of the first."""
    first = each[0]
    where = strictest(c for s in each for c in (*_narrower(s, first), *s.where))
    return Required(Sizes(first.each, where), tensors, about)


def _narrower(sizes: Sizes, first: Sizes) -> list[Expr]:
    """The ends of ranges that exclude more than those of the first kernel."""
    pairs = [*zip(sizes.each, first.each, strict=True)]
    return [*(s.var >= s.least for s, own in pairs if s.least > own.least),
            *(s.var <= s.most for s, own in pairs if s.most < own.most)]
