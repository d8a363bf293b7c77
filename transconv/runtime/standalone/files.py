"""The files of exported plans: a Python file for each, and on request a folder of machine code.

The folder has the code of each kernel, launchers in C and in Python, and a JSON that says what every
launch passes. All of its files are written, or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transconv.runtime.plans import Plan
from transconv.runtime.standalone.machine_code import (
    ALIGNED,
    KernelBinary,
    PackagedTensor,
    PlanPackage,
    described,
    kind_of,
    machine_code,
    packaged,
    readable_copy,
    requirements,
    workspace,
)
from transconv.runtime.standalone.python_file import python_text, templates
from transconv.support import __version__, triton_version


def files_of(
    plans: Sequence[Plan], ahead: bool = False, timeout_s: float = 120.0, workers: int = 1
) -> tuple[list[PlanPackage], dict[str, bytes]]:
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


APIS = {
    "cuda": {
        "p": "cu",
        "result": "CUresult",
        "ok": "CUDA_SUCCESS",
        "invalid": "CUDA_ERROR_INVALID_VALUE",
        "stream": "CUstream",
        "address": "CUdeviceptr",
        "module": "CUmodule",
        "function": "CUfunction",
        "alloc": "cuMemAlloc",
    },
    "hip": {
        "p": "hip",
        "result": "hipError_t",
        "ok": "hipSuccess",
        "invalid": "hipErrorInvalidValue",
        "stream": "hipStream_t",
        "address": "hipDeviceptr_t",
        "module": "hipModule_t",
        "function": "hipFunction_t",
        "alloc": "hipMalloc",
    },
}
BUILDS = {
    "cuda": "cc -I/usr/local/cuda/include {0}.c example.c -o example -lcuda",
    "hip": "cc -D__HIP_PLATFORM_AMD__ -I/opt/rocm/include {0}.c example.c -o example "
    "-L/opt/rocm/lib -lamdhip64",
}
# Words of C, and names that the C files use themselves.
WORDS = frozenset(
    """auto break case char const continue default do double else enum extern float for goto
    if inline int long register restrict return short signed sizeof static struct switch typedef union
    unsigned void volatile while stream workspace status none addresses arguments kernels modules loaded
    load start map_of memory file count words device context contents main AT TRY KERNELS errno stdin
    stdout stderr malloc free unix linux""".split()
)


def c_name(name: str) -> str:
    """A name that C and the files leave free."""
    return f"{name}_" if name in WORDS or name.startswith("_") else name


def folder_of(package: PlanPackage, binaries: Sequence[KernelBinary]) -> dict[str, bytes]:
    """The files of a package's folder by name."""
    kind = kind_of(package.target)
    about = about_kernels(package, binaries)
    files = {f"{b.launch.kernel}.{kind}": b.code for b in binaries}
    files["kernels.json"] = (json.dumps(about, indent=1) + "\n").encode()
    files["launch.py"] = readable_copy("launch.py").encode()
    filled = _context(package, about)
    for template, name in (
        ("kernels.h", f"{package.name}.h"),
        ("kernels.c", f"{package.name}.c"),
        ("example.c", "example.c"),
        ("Makefile", "Makefile"),
    ):
        text = templates().get_template(f"{template}.jinja").render(**filled)
        files[name] = text.encode()
    return files


def about_kernels(package: PlanPackage, binaries: Sequence[KernelBinary]) -> dict[str, Any]:
    """The data that a launcher needs."""
    tensors = described(package)
    for t in package.tensors:
        shape, strides = t.held
        tensors[t.name] |= {
            "bytes": t.span * t.dtype.bytes,
            "given_shape": shape,
            "given_strides": strides,
        }
    return {
        "name": package.name,
        "title": package.title,
        "about": list(package.about),
        "target": package.target.name,
        "backend": package.target.backend,
        "made_by": {"transconv": __version__, "triton": triton_version()},
        "aligned": ALIGNED,
        "requirements": requirements(package, binaries),
        "tensors": tensors,
        "workspace_bytes": workspace(package)[1],
        "steps": _steps(package, binaries),
    }


def _steps(package: PlanPackage, binaries: Sequence[KernelBinary]) -> list[dict[str, Any]]:
    """The launches in order, with the memory that is cleared before them."""
    steps: list[dict[str, Any]] = []
    offsets, _ = workspace(package)

    def clear(t: PackagedTensor) -> dict[str, Any]:
        where = (
            {"kind": "address", "tensor": t.name}
            if t.name not in offsets
            else {"kind": "workspace", "tensor": t.name, "offset": offsets[t.name]}
        )
        return {"clear": where, "bytes": t.span * t.dtype.bytes}

    if package.padding:
        steps += [clear(t) for t in package.stored]
    for b in binaries:
        x, r = b.launch, b.resources
        if x.zero:
            steps.append(clear(package.operand(x.zero)))
        if not x.programs:
            continue
        schedule = x.step.schedule
        steps.append(
            {
                "kernel": x.kernel,
                "file": f"{x.kernel}.{kind_of(package.target)}",
                "schedule": str(schedule),
                "grid": [x.programs, 1, 1],
                "warps": b.warps,
                "threads": b.warps * package.target.warp_size,
                "shared_bytes": r.shared_bytes,
                "blocks_in_cluster": 1,
                "registers": r.registers,
                "spill_bytes": r.spill_bytes,
                "early": x.early,
                "passed": list(b.passed),
            }
        )
    return steps


def _context(package: PlanPackage, about: dict[str, Any]) -> dict[str, Any]:
    """The values for the C templates."""
    backend = package.target.backend
    tensors = [
        {
            "name": t.name,
            "c": c_name(t.name),
            "dtype": t.dtype.torch,
            "stored": t.stored,
            "bytes": t.span * t.dtype.bytes,
            "note": _note(t),
        }
        for t in package.tensors
    ]
    steps, number = [], 0
    for step in about["steps"]:
        if "kernel" not in step:
            steps.append({"kernel": "", "place": _place(step["clear"]), "bytes": step["bytes"]})
            continue
        lines, pointers = _arguments(step["passed"], APIS[backend]["address"])
        steps.append({**step, "number": number, "lines": lines, "pointers": ", ".join(pointers)})
        number += 1
    reads = [t for t in tensors if not t["stored"]]
    return {
        "name": package.name,
        "title": package.title,
        "about": package.about,
        "version": __version__,
        "target": package.target.name,
        "hip": backend == "hip",
        "build": BUILDS[backend].format(package.name),
        "requirements": about["requirements"],
        "workspace": about["workspace_bytes"],
        "tensors": tensors,
        "aligned": ALIGNED,
        "api": APIS[backend],
        "steps": steps,
        "count": number,
        "reads": len(reads),
        "ordered": [*reads, *(t for t in tensors if t["stored"])],
        "results": len(tensors) - len(reads),
        "maps": any(x["kind"] == "map" for s in about["steps"] for x in s.get("passed", ())),
    }


def _note(t: PackagedTensor) -> str:
    sizes = " ".join(f"{d}={n}" for d, n in zip(t.dims, t.shape, strict=True))
    if t.strides is None:
        return f"{sizes}, laid out as {t.layout}"
    return f"{sizes}, strides {' '.join(map(str, t.strides))}"


def _place(where: dict[str, Any]) -> str:
    if where["kind"] == "workspace":
        return f"AT(workspace, {where['offset']})"
    return c_name(where["tensor"])


def _arguments(passed: Sequence[dict[str, Any]], address: str) -> tuple[list[str], list[str]]:
    """The lines that make a kernel's arguments, and the pointers to them in order."""
    lines: list[str] = []
    pointers: list[str] = []
    for i, x in enumerate(passed):
        if x["kind"] == "null":
            pointers.append("&none")
        elif x["kind"] == "address":
            pointers.append(f"&{c_name(x['tensor'])}")
        elif x["kind"] == "workspace":
            lines.append(f"{address} at{i} = {_place(x)};  /* {x['tensor']} */")
            pointers.append(f"&at{i}")
        elif x["kind"] == "map":
            lines += _map(i, x)
            pointers.append(f"&map{i}")
        else:
            lines.append(f"int{x['kind'][1:]}_t n{i} = {x['value']};")
            pointers.append(f"&n{i}")
    return lines, pointers


def _map(i: int, x: dict[str, Any]) -> list[str]:
    def array(kind: str, name: str, values: Sequence[int]) -> str:
        return f"static const {kind} {name}{i}[] = {{{', '.join(map(str, values or [0]))}}};"

    return [
        f"CUtensorMap map{i};  /* {x['tensor']} */",
        array("cuuint64_t", "sizes", x["sizes"]),
        array("cuuint64_t", "strides", x["strides"]),
        array("cuuint32_t", "box", x["box"]),
        f"TRY(map_of(&map{i}, CU_TENSOR_MAP_DATA_TYPE_{x['elements_name']}, {x['rank']}, "
        f"{_place(x['of'])},",
        f"           sizes{i}, strides{i}, box{i}, CU_TENSOR_MAP_SWIZZLE_{x['swizzle_name']}));",
    ]


def check(directory: Path, force: bool) -> None:
    """Raises FileExistsError for a folder that is not empty, unless ``force``; NotADirectoryError for a
    path that is no folder."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise NotADirectoryError(f"'{directory}' is no folder; expected a new one, or an empty one")
    if not force and any(directory.iterdir()):
        raise FileExistsError(
            f"'{directory}' is not empty; expected a new or empty folder, or --force "
            "(force=True), which replaces files of the same names and leaves others"
        )


def write(directory: Path, files: Mapping[str, bytes], force: bool = False) -> None:
    """Write files by their paths in a folder, which is made. They are written elsewhere first, so that a
    folder with half of them is never seen. Raises as ``check``, ValueError for a path out of the folder,
    OSError where nothing can be written."""
    check(directory, force)
    for name in files:
        if not name or os.path.isabs(name) or {"", ".", ".."} & {*name.replace(os.sep, "/").split("/")}:
            raise ValueError(f"{name!r} is no path in the folder '{directory}'")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:  # it names another path, which nobody asked for
        raise OSError(
            f"'{directory}' cannot be written: {error.strerror}; expected a folder that can be made"
        ) from error
    try:
        for name, content in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if directory.is_symlink() or (directory.exists() and any(directory.iterdir())):
            for name in files:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, directory / name)
        else:
            made.chmod(0o777 & ~_mask())
            os.replace(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _mask() -> int:
    """The umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
