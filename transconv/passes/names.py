"""Names for the variables that a pass adds."""

from __future__ import annotations

from transconv.ir import Kernel, bound_vars


class Names:
    """The names of the variables of kernels, of which no two are alike."""

    def __init__(self, *kernels: Kernel) -> None:
        self.taken = {v.name for k in kernels for v in bound_vars(k)}

    def fresh(self, name: str) -> str:
        """The name, with underscores added until no other variable has it."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name
