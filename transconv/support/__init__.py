"""What all rooms stand on: errors, environment variables, versions, and what is kept in memory and on the
disk.

In: texts of the environment; keys and JSON. Out: the records of other processes, if the folder can be
trusted. Knows: no other room.
"""

from transconv.support import files, knobs, records
from transconv.support.errors import (
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
    one_line,
)
from transconv.support.files import (
    leave_text,
    read_named,
    replace_data,
    replace_named,
    why_foreign,
    why_untrusted,
    why_unwritable,
)
from transconv.support.memory_cache import Cache, forget_all
from transconv.support.python_functions import (
    defined,
    executed,
    factory,
    lasting,
    soon_turns,
    without_collections,
)
from transconv.support.records import Content, Drawer
from transconv.support.versions import (
    DIRECT,
    MovedModules,
    __version__,
    has_wide_views,
    is_direct,
    triton_version,
)

__all__ = [
    "DIRECT",
    "Cache",
    "ComputeError",
    "ConfigError",
    "Content",
    "Drawer",
    "KernelError",
    "LayoutError",
    "MovedModules",
    "ProblemError",
    "ScheduleError",
    "ScopeError",
    "StageError",
    "TensorError",
    "TransconvError",
    "Unsupported",
    "__version__",
    "defined",
    "executed",
    "factory",
    "files",
    "forget_all",
    "has_wide_views",
    "is_direct",
    "knobs",
    "lasting",
    "leave_text",
    "nearest",
    "one_line",
    "read_named",
    "records",
    "replace_data",
    "replace_named",
    "soon_turns",
    "triton_version",
    "why_foreign",
    "why_untrusted",
    "why_unwritable",
    "without_collections",
]
