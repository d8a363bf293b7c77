"""Writes the files of plans: a Python file for each, and on request a folder of machine code."""

from __future__ import annotations

from collections.abc import Sequence

from transconv.runtime import Plan
from transconv.standalone.c_files import folder_of
from transconv.standalone.machine_code import machine_code
from transconv.standalone.package import PlanPackage, packaged
from transconv.standalone.python_file import python_text


def files_of(plans: Sequence[Plan], ahead: bool = False, timeout_s: float = 120.0,
             workers: int = 1) -> tuple[list[PlanPackage], dict[str, bytes]]:
    """The packages of plans and their files by their paths. ``ahead``: also their machine code, each in a
    folder ``NAME_CHIP``, made by ``workers`` processes. Raises Unsupported, with the reason, for a plan
    that cannot be exported."""
    packages = [packaged(plan) for plan in plans]
    files = {f"{p.name}.py": python_text(p).encode() for p in packages}
    if ahead:
        made = machine_code(packages, timeout_s, workers)
        for package, binaries in zip(packages, made, strict=True):
            inside = folder_of(package, binaries)
            files |= {f"{code_folder(package)}/{name}": text for name, text in inside.items()}
    return packages, files


def code_folder(package: PlanPackage) -> str:
    """The name of the folder of a package's machine code."""
    return f"{package.name}_{package.target.name}"
