"""A mode in which calls of functions are looked at and not made: ``explain`` asks so."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ExplainedCall(Exception):
    """What a public function makes of its arguments: the function, its tensors after casts, numbers."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


class Asking(TorchDispatchMode):
    """While it is the current mode, a call raises ``ExplainedCall``; torch's operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def asked(self, *call: Any) -> ExplainedCall:
        """What the call raises."""
        return ExplainedCall(*call)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))
