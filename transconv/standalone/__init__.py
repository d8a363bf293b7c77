"""Exported kernels: files that run without transconv.

In: plans. Out: files of Python, machine code with its launchers, folders that are written whole or not.
Knows: plans, the workloads' own texts of what torch computes.
"""

from transconv.standalone.files import check, code_folder, files_of, write
from transconv.standalone.package import PlanPackage, described, packaged
from transconv.standalone.python_file import templates

__all__ = ["PlanPackage", "check", "code_folder", "described", "files_of", "packaged", "templates",
           "write"]
