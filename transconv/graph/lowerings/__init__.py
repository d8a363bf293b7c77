"""The rows of aten's operations: each file here enters its own into the table of operations when it is
imported; a new file is all that an operation needs."""

import pkgutil
from importlib import import_module

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
