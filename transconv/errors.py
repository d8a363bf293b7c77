"""The errors that users catch, by their public names."""

from transconv.support import (
    ComputeError,
    ConfigError,
    KernelError,
    LayoutError,
    ProblemError,
    ScheduleError,
    ScopeError,
    StageError,
    TensorError,
    TransconvError,
    Unsupported,
    nearest,
)

__all__ = [
    "ComputeError",
    "ConfigError",
    "KernelError",
    "LayoutError",
    "ProblemError",
    "ScheduleError",
    "ScopeError",
    "StageError",
    "TensorError",
    "TransconvError",
    "Unsupported",
    "nearest",
]
