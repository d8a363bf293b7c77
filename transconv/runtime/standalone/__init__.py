"""Exported kernels: files of Python or machine code that run without transconv, written whole or not."""

from transconv.runtime.standalone.files import check, code_folder, files_of, write
from transconv.runtime.standalone.kernel_repository import CHIPS, operation_names, repository_files
from transconv.runtime.standalone.machine_code import PlanPackage, described, packaged
from transconv.runtime.standalone.python_file import templates

__all__ = [
    "CHIPS",
    "PlanPackage",
    "check",
    "code_folder",
    "described",
    "files_of",
    "operation_names",
    "packaged",
    "repository_files",
    "templates",
    "write",
]
