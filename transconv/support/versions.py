"""The versions of the package and of the installed Triton, which is found without importing it; and
modules that had other names in the version before."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

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


class MovedModules(MetaPathFinder, Loader):
    """The finder of modules by the names that they had, of which ``today`` has today's: it is asked behind
    all others, for modules that are not there. What it makes has the names of the module in its new place,
    also those that change; a package has no folder, so that modules in it are asked for here, too."""

    def __init__(self, today: Mapping[str, str]) -> None:
        self.today = today

    def moved_to(self, name: str) -> str | None:
        """Today's name of a module, or of one in a package that moved; None if it has no other."""
        at, rest = name, ""
        while at not in self.today:
            at, _, last = at.rpartition(".")
            if not at:
                return None
            rest = f".{last}{rest}"
        found = self.today[at] + rest
        return found if find_spec(found) else None

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """A module of this package that moved."""
        if not fullname.startswith("transconv.") or self.moved_to(fullname) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Warn at the line that imports the module, and look its names up in its new place."""
        name = self.moved_to(module.__name__)
        assert name is not None
        found = import_module(name)
        warnings.warn(
            f"{module.__name__} is {name} now; the next release has no such module",
            DeprecationWarning,
            stacklevel=2,
        )
        vars(module).update(
            __getattr__=functools.partial(getattr, found), __dir__=functools.partial(dir, found)
        )
