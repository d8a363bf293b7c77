"""The tensors that a plan expects, and the check of a call's tensors against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from transconv.backend_triton import torch_module
from transconv.compute import Compute, Read, outside
from transconv.ir import Layout, Tensor, sizes_told
from transconv.support import TensorError, knobs

if TYPE_CHECKING:
    import torch

GPUS = ("cuda", "xpu")
"""The types of torch's devices on which kernels run; those of AMD's GPUs are "cuda", too."""


def torch_type(tensor: Tensor) -> Any:
    """torch's dtype of a tensor's elements."""
    import torch

    return getattr(torch, tensor.dtype.torch)


@dataclass(slots=True)
class Wanted:
    """A tensor that a plan takes. A call may also pass its memory: a contiguous tensor of one dimension
    with at least ``span`` elements. For blocked layouts it must. ``elements``: torch's dtype; ``number``:
    a float is passed itself (``Tensor.number``)."""

    name: str
    elements: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    span: int
    layout: Layout
    number: bool = False

    @staticmethod
    def of(tensor: Tensor) -> Wanted:
        """A tensor of a workload."""
        layout = tensor.layout
        return Wanted(
            tensor.name,
            torch_type(tensor),
            tensor.shape,
            None if layout.offset else layout.strides(),
            layout.span,
            layout,
            tensor.number,
        )

    def why_not(self, given: Any) -> str:
        """Why a tensor is not the wanted one, as the end of a sentence; empty if it can be used."""
        if getattr(given, "dtype", None) is not self.elements:
            return f"{self.elements}, got {getattr(given, 'dtype', type(given).__name__)}"
        if given.is_neg():
            return "values as they are, got a negated view (resolve_neg() copies it)"
        shape, strides = tuple(given.shape), tuple(given.stride())
        if given.numel() >= self.span and given.dim() == 1 and given.is_contiguous():
            return ""  # memory
        if (
            self.strides is not None
            and shape == self.shape
            and (
                not prod(shape)
                or all(n == 1 or a == b for n, a, b in zip(shape, strides, self.strides, strict=True))
            )
        ):
            return ""
        wanted = (
            f"{self.span} contiguous elements, laid out as {self.layout}"
            if self.strides is None
            else f"shape {self.shape} and strides {self.strides}"
        )
        return f"{wanted}, got shape {shape} and strides {strides}"

    def filled(self, device: Any, seed: int) -> Any:
        """Such a tensor of small random integers; of zeros where elements are integers, which may be
        indices."""
        import torch

        memory = torch.zeros(self.span, dtype=self.elements, device=device)
        if memory.is_floating_point():
            draw(memory, seed)
        return memory if self.strides is None else memory.as_strided(self.shape, self.strides)

    def varied(self, device: Any, seed: int, behind: int, is_index: bool) -> Any:
        """Such a tensor of random numbers: normal ones, or small whole ones, and as ``draw`` where there
        is one; of zeros if they are indices. It begins so many elements ``behind`` a multiple of 16."""
        import torch

        memory = torch.zeros(self.span + behind, dtype=self.elements, device=device)
        if memory.is_floating_point() and self.span == 1:
            draw(memory, seed)
        elif not is_index:
            own = torch.Generator(device).manual_seed(seed)
            if memory.is_floating_point() and memory.itemsize > 1:
                memory.normal_(generator=own)
            else:
                least = -8 if memory.is_floating_point() or memory.dtype.is_signed else 0
                memory.copy_(torch.randint(least, 9, memory.shape, generator=own, device=device))
        return (
            memory[behind:]
            if self.strides is None
            else memory.as_strided(self.shape, self.strides, behind)
        )


def draw(memory: Any, seed: int) -> None:
    """Fill a tensor with random integers from -2 to 2; one number with 1 or 2, as it may be a scale
    that divides."""
    import torch

    generator = torch.Generator(memory.device).manual_seed(seed)
    least = 1 if memory.numel() == 1 else -2
    memory.copy_(torch.randint(least, 3, memory.shape, generator=generator, device=memory.device))


def check(wanted: Sequence[Wanted], tensors: dict[str, Any], about: Callable[[], str]) -> None:
    """Raise TensorError unless each tensor is the wanted one and all are on one device on which kernels
    run. Kernels do not check this. ``about``: what the plan computes, for the error."""
    device: Any = None
    for want in wanted:
        given: Any = tensors.get(want.name)
        if want.number and type(given) is float:
            continue
        if not hasattr(given, "is_neg"):
            raise TensorError(
                f"{want.name}: expected a tensor, got {type(given).__name__}; the plan is for {about()}"
            )
        first = device is None
        device = given.device if first else device
        if (
            given.dtype is not want.elements
            or given.stride() != want.strides
            or given.shape != want.shape
            or given.is_neg()
        ) and (why := want.why_not(given)):
            raise TensorError(f"{want.name}: expected {why}; the plan is for {about()}")
        if given.device != device:
            raise TensorError(
                f"{want.name}: expected {device}, where {wanted[0].name} is, got {given.device}"
            )
    if device and device.type not in GPUS and not (device.type == "cpu" and knobs.interpret()):
        raise TensorError(
            f"{wanted[0].name}: expected a tensor on a GPU, got one on {device}; on the CPU "
            "kernels run in Triton's interpreter alone (TRITON_INTERPRET=1)"
        )


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is captured: nothing can be built, read on the host or timed meanwhile. With a
    ``device``, whether its calls are in the graph."""
    cuda = torch_module().cuda
    possible = cuda.is_initialized() if device is None else device.type == "cuda"
    return possible and bool(cuda.is_current_stream_capturing())


def check_indices(computes: Sequence[Compute], tensors: dict[str, Any]) -> None:
    """Raise TensorError, with torch's message, for an index that is out of bounds. Kernels mask such an
    index. The check waits for the tensors' device, so it is done only with TRANSCONV_VERIFY=1, and not
    while a CUDA graph is captured."""
    for named in computes:
        if not any(isinstance(s, Read) for s in named.names.placing):
            continue
        given = ((t, tensors.get(t.name)) for t in named.tensors)
        sizes = sizes_told((t, there.shape) for t, there in given if there is not None)
        if named.named is not None and named.named.why_not(sizes):
            continue  # the launch refuses it, and says more
        compute = named.at(**sizes) if sizes else named
        read = {s.view.tensor for s in compute.names.placing if isinstance(s, Read)}
        if any(is_capturing(tensors[t.name].device) for t in read):
            return
        indices = {t.name: _logical(t, tensors[t.name]) for t in read}
        if wrong := outside(compute, indices):
            raise TensorError(wrong)


def _logical(tensor: Tensor, given: Any) -> Any:
    strides = tensor.layout.strides()
    seen = given if given.shape == tensor.shape else given.as_strided(tensor.shape, strides)
    seen = seen.detach().cpu()
    return (seen if tensor.dtype.numpy == tensor.dtype.torch else seen.float()).numpy()
