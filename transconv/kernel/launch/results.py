"""Results of a kernel: arrays that a call leaves out, allocates, and returns.

    @kernel(work_shape=N, results="Y")
    def doubled(group, X: Buffer[N], Y: Buffer[N]): ...

    y = doubled(x)          # y = empty(N); doubled(x, y)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transconv.errors import KernelError
from transconv.ir import DType
from transconv.kernel.annotations import Buffer, Declared, value_of
from transconv.kernel.launch.arguments import as_tensor, plain_number
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.values import dtype_of

AskedResults = Mapping[str, Any] | Sequence[str] | str | None


def results_of(name: str, parameters: Sequence[str], asked: AskedResults) -> dict[str, DType | None]:
    """The element type of each result in the order of the parameters; None: that of the first array.
    Raises KernelError for what is no parameter or no type."""
    said = {} if asked is None else {asked: None} if isinstance(asked, str) else (
        dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked))
    if wrong := [n for n in said if n not in parameters]:
        raise KernelError(f"{name} has the result {wrong[0]}; expected some of {' '.join(parameters)}")
    try:
        return {n: None if said[n] is None else dtype_of(said[n]) for n in parameters if n in said}
    except Refusal as refusal:
        raise KernelError(f"the results of {name}: found {refusal.found}; expected "
                          f"{refusal.allowed}") from None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What calls with such arguments leave out, by its place among the arguments in increasing order:
    what makes a result, or None and a default."""

    each: tuple[tuple[int, Callable[[], Any] | None, Any], ...]

    def filled(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The arguments with what is left out, and the results as the call returns them."""
        full, made = list(args), []
        for at, make, default in self.each:
            if make is None:
                full.insert(at, default)
            else:
                full.insert(at, make())
                made.append(full[at])
        return tuple(full), returned(made)


def returned(made: Sequence[Any]) -> Any:
    """Results as a call returns them; None for one that was given all arrays."""
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def makers(name: str, results: Mapping[str, DType | None], declared: Declared, given: Mapping[str, Any],
           sizes: Mapping[str, int]) -> dict[str, Callable[[], Any]]:
    """What makes each result: as large as its annotation says, else as the first array; beside that, and
    of its type unless the kernel says another. ``sizes``: the values of symbols. Raises KernelError."""
    first = next((n for n, v in given.items() if n not in results and hasattr(v, "shape")
                  and plain_number(v) is None), None)
    if first is None:
        raise KernelError(f"{name} is called without an array; expected at least one")
    made = {}
    for n, dtype in results.items():
        said, shape = declared.each.get(n), tuple(given[first].shape)
        if isinstance(said, Buffer):
            shape = tuple(value_of(name, e, sizes) for e in said.sizes)
        made[n] = _empty(first, given[first], shape, dtype)
    return made


def _empty(name: str, like: Any, shape: tuple[int, ...], dtype: DType | None) -> Callable[[], Any]:
    """What makes an array of a shape, of NumPy for NumPy's and else of torch."""
    import numpy as np

    if isinstance(like, np.ndarray):
        kind = like.dtype if dtype is None else dtype.numpy
        return lambda: np.empty(shape, kind)
    import torch

    tensor = as_tensor(name, like)
    of = tensor.dtype if dtype is None else getattr(torch, dtype.torch)
    device = tensor.device
    return lambda: torch.empty(shape, dtype=of, device=device)
