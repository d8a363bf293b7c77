"""``kernel.check``: a compiled kernel beside the simulator, which executes bodies in Python."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.errors import KernelError
from transconv.ir import CALLS, Call, find
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import as_tensor, plain_number

if TYPE_CHECKING:
    from transconv.kernel.decorator import KernelFunction


def check(kernel: KernelFunction, group: Group, given: dict[str, Any], rtol: float | None,
          atol: float | None) -> None:
    """Run a kernel and its simulation on copies of the arguments, and compare the arrays. Raises
    KernelError for the first difference."""
    import torch

    compiled, simulated = ({n: v if plain_number(v) is not None or isinstance(v, ModuleType)
                            else as_tensor(n, v).clone() for n, v in given.items()} for _ in range(2))
    kernel(group, **compiled)
    kernel.simulate(group, **simulated)
    own = {c.name for c in find(kernel.lower(group, **given).kernel, Call) if CALLS[c.name].takes}
    for name, value in compiled.items():
        if not isinstance(value, torch.Tensor):
            continue
        got, wanted = (t.detach().cpu().double().numpy() for t in (value, simulated[name]))
        near = 2.0 * float(torch.finfo(value.dtype).eps) if value.dtype.is_floating_point else 0.0
        r, a = (16 * near if rtol is None else rtol), (16 * near if atol is None else atol)
        wrong = ~np.isclose(got, wanted, rtol=r, atol=a, equal_nan=True)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            told = f"; it has functions of a chip: {' '.join(sorted(own))}" if own else ""
            place = f"{name}[{', '.join(map(str, at))}]"
            raise KernelError(f"{kernel.source.name}: {place} is {got[at]:.9g}, and {wanted[at]:.9g} in "
                              f"the simulator ({int(wrong.sum())} of {wrong.size} elements differ){told}")
