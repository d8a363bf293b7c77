"""The versions of the package, with the modules that had other names in the one before, and of the
installed Triton, which is found without importing it.

    import transconv.knobs      # DeprecationWarning: transconv.knobs is transconv.support.knobs now

A documented module that moves gets a row in ``MOVED``, which stays for one release.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

__version__ = "0.1.0"

DIRECT = "3.6."
"""The release of Triton whose launch function is called, and whose descriptors are encoded, directly."""


def is_direct() -> bool:
    """Whether the installed Triton's kernels are started without its wrapper, with descriptors that are
    encoded here: other releases have other arguments."""
    return triton_version().startswith(DIRECT)


def has_wide_views() -> bool:
    """Whether the installed Triton takes a view of shared memory that is larger than what it is a view of,
    as steps that share boxes need (``slide=``): 3.8 and 3.9 refuse it."""
    release = [int(n) for n in re.findall(r"\d+", triton_version())[:2]]
    return release < [3, 8]


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


MOVED: Mapping[str, str] = MappingProxyType({
    "transconv.api": "transconv.runtime.api",
    "transconv.compute.autodiff.scatter_to_gather": "transconv.compute.autodiff.gradient_stores",
    "transconv.conv.dynamic_sizes": "transconv.conv.relation",
    "transconv.conv.registry": "transconv.conv.compiler",
    "transconv.disk_cache": "transconv.support",
    "transconv.disk_cache.fields": "transconv.support.records",
    "transconv.disk_cache.seals": "transconv.support.records",
    "transconv.kernel_trials": "transconv.kernel.trials",
    "transconv.knobs": "transconv.support.knobs",
    "transconv.runtime.weight_prepack": "transconv.runtime.launch",
    "transconv.standalone": "transconv.runtime.standalone",
    "transconv.torch_ops.settings": "transconv.calls.settings",
    "transconv.torch_ops.stats": "transconv.calls.stats",
    "transconv.version": "transconv.support.versions",
})
"""Today's names of modules that moved; of a package, those of the modules in it follow."""


def moved_to(name: str) -> str | None:
    """Today's name of a module that moved, if it has one."""
    at, rest = name, ""
    while at not in MOVED:
        at, _, last = at.rpartition(".")
        if not at:
            return None
        rest = f".{last}{rest}"
    return MOVED[at] + rest if find_spec(MOVED[at] + rest) else None


class MovedModules(MetaPathFinder, Loader):
    """The finder of modules by the names that they had: it is asked behind all others, for modules that
    are not there. What it makes has the names of the module in its new place, also those that change; a
    package has no folder, so that modules in it are asked for here, too."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """A module of this package that moved."""
        if not fullname.startswith("transconv.") or moved_to(fullname) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Warn at the line that imports the module, and look its names up in its new place."""
        name = moved_to(module.__name__)
        assert name is not None
        found = import_module(name)
        warnings.warn(f"{module.__name__} is {name} now; the next release has no such module",
                      DeprecationWarning, stacklevel=2)
        vars(module).update(__getattr__=functools.partial(getattr, found),
                            __dir__=functools.partial(dir, found))


sys.meta_path.append(MovedModules())
