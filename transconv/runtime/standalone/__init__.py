"""Exported kernels: files of Python or machine code that run without transconv, written whole or not."""

from transconv.runtime.standalone.files import check as check
from transconv.runtime.standalone.files import code_folder as code_folder
from transconv.runtime.standalone.files import files_of as files_of
from transconv.runtime.standalone.files import write as write
from transconv.runtime.standalone.kernel_repository import CHIPS as CHIPS
from transconv.runtime.standalone.kernel_repository import operation_names as operation_names
from transconv.runtime.standalone.kernel_repository import repository_files as repository_files
from transconv.runtime.standalone.machine_code import PlanPackage as PlanPackage
from transconv.runtime.standalone.machine_code import described as described
from transconv.runtime.standalone.machine_code import packaged as packaged
from transconv.runtime.standalone.python_file import templates as templates
