"""The parameters of a kernel: a tensor is given by its address, or by a descriptor of its boxes."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir import BoxLoad, BoxStore, Fetch, Kernel, Send, Tensor, find


@dataclass(frozen=True, slots=True)
class Parameter:
    """``box``: the extents of a box where the tensor is passed as a descriptor; None where it is passed as
    an address."""

    tensor: Tensor
    box: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Its name in the text."""
        return self.tensor.name if self.box is None else box_name(self.tensor.name)

    def __str__(self) -> str:
        if self.box is None:
            return str(self.tensor)
        every = f" of every {list(self.tensor.every)}" if self.tensor.every else ""
        return f"{self.tensor} in boxes of {list(self.box)}{every}"


def parameters(kernel: Kernel) -> tuple[Parameter, ...]:
    """A kernel's parameters, in order."""
    read: list[BoxLoad | BoxStore] = [*find(kernel, BoxLoad), *find(kernel, BoxStore)]
    copied: list[Fetch | Send] = [*find(kernel, Fetch), *find(kernel, Send)]
    boxes = {x.tensor: x.extents for x in read} | {x.tensor: x.piece.buffer.extents for x in copied}
    return tuple(Parameter(p, boxes.get(p)) for p in kernel.params)


def box_name(name: str) -> str:
    """The name in the text of a tensor's descriptor."""
    return f"{name}_box"
