"""Launches of a kernel: one compiled kernel for each kind of arguments, kept in the process."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

from transconv import knobs
from transconv.backend_triton import Launcher, grid_size, write
from transconv.errors import KernelError
from transconv.kernel.arguments import Arguments, tensors_of
from transconv.kernel.group import Group
from transconv.kernel.lowering import Lowered, lowered
from transconv.target import Target, detect

if TYPE_CHECKING:
    from transconv.kernel.decorator import KernelFunction

KEPT = 256  # kinds of arguments of one kernel


class Launches:
    """The launches of one kernel."""

    def __init__(self, owner: KernelFunction) -> None:
        self.owner = owner
        self.known: dict[Any, tuple[Lowered, Launcher]] = {}
        self.lock = threading.Lock()

    def __call__(self, group: Group, given: dict[str, Any]) -> None:
        """Launch; nothing for work without elements. Raises KernelError."""
        import torch

        arguments = tensors_of(given)
        if arguments.device is None:
            raise KernelError(f"{self.name} is called without an array; expected at least one")
        target = self.target(arguments)
        low, launcher = self.of(group, arguments, target)
        if group.count == 0:
            return
        tensors = []
        for name in low.arguments:
            if name in arguments.floats:
                tensors.append(torch.full((1,), arguments.floats[name], device=arguments.device))
            else:
                tensors.append(arguments.tensors[name])
        launcher(tensors)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.owner.source.name

    def target(self, arguments: Arguments) -> Target:
        """The chip of the arrays, or Triton's interpreter for those of the CPU. KernelError where kernels
        do not run."""
        kind = arguments.device.type
        if kind == "cpu" and not knobs.interpret():
            raise KernelError(f"{self.name} is called with arrays of the CPU; expected arrays of a "
                              "GPU, or TRITON_INTERPRET=1 for Triton's interpreter")
        if kind not in ("cpu", "cuda", "xpu") or kind != "cpu" and knobs.interpret():
            raise KernelError(f"{self.name} is called with arrays of {arguments.device}, where it "
                              "cannot run" + " with TRITON_INTERPRET=1" * (kind == "cuda"))
        return detect(arguments.device)

    def of(self, group: Group, arguments: Arguments, target: Target) -> tuple[Lowered, Launcher]:
        """The kernel for arguments, and its launcher."""
        key = group, arguments.key, target.name, self.owner.precision
        found = self.known.get(key)
        if found is None:
            low = lowered(self.owner.source, group, arguments.specs, target, self.owner.precision,
                          arguments.alike)
            with self.lock:
                if len(self.known) >= KEPT:
                    self.known.clear()
                found = self.known[key] = low, launcher_of(low)
        return found


def launcher_of(low: Lowered) -> Launcher:
    """What launches a kernel."""
    words = f"{low.source} {low.warps} {low.num_stages}".encode()
    digest = hashlib.blake2b(words, digest_size=8).hexdigest()
    path = write(low.source, f"kernel_{low.name}_{digest}"[:100])
    types = tuple(t.dtype.torch for t in low.kernel.params)
    return Launcher(low.source, low.kernel.name, path, grid_size(low.kernel), low.warps, low.num_stages,
                    types=types, key=digest)
