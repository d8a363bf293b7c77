"""Exported kernels: files that run without transconv.

In: plans, models. Out: files of Python, machine code with its launchers, an index of a model's kernels.
Knows: plans, convolutions, torch's calls.
"""

from transconv.standalone.files import code_folder, files_of
from transconv.standalone.folder import check, write
from transconv.standalone.package import Package, packaged

__all__ = ["Package", "check", "code_folder", "files_of", "packaged", "write"]
