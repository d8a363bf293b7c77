"""Names for the variables that a pass adds."""

from __future__ import annotations

from collections.abc import Iterable

from transconv.ir import Kernel, bound_vars


class Names:
    """The names of the variables of kernels, and those in ``taken``, of which no two are alike."""

    def __init__(self, *kernels: Kernel, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, *(v.name for k in kernels for v in bound_vars(k))}

    def fresh(self, name: str, mark: str = "_") -> str:
        """The name, with marks added until no other variable has it."""
        while name in self.taken:
            name += mark
        self.taken.add(name)
        return name
