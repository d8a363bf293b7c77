"""Kernels compiled ahead of time: launches pass the arguments that the machine code takes, and the C
files compile."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.standalone.cases import conv
from transconv.errors import Unsupported
from transconv.runtime.standalone import files_of, launch, machine_code, packaged
from transconv.runtime.standalone.files import c_name

EXPLICIT = "mb:2 oh:8 ow:8 oc:64 ic:32 | mma | a=box b=box c=box swap=1 stages=2 warps=4 via=gluon"
CASES = {
    "roles": lambda: conv(
        "mb2ic32ih8oc32oh8kh3ph1 dt=f16 tag=nhwc", "fwd", EXPLICIT, "bias+relu", target="sm_90"
    ),
    "split": lambda: conv(
        "mb2ic16ih4oc16oh4kh3ph1",
        "bwd_w",
        "ic.kh.kw:32 oc:16 mb.oh.ow:16 | mma | split_k=2 warps=2",
        target="sm_90",
    ),
    "amd": lambda: conv(
        "mb1ic16ih4oc16oh4kh3ph1 dt=f16 tag=nhwc",
        "fwd",
        "mb.oh.ow:16 oc:16 ic:16 | mma | stages=2 warps=1",
        target="gfx942",
    ),
}
SIZES = {"address": 8, "workspace": 8, "null": 8, "i32": 4, "i64": 8, "map": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of machine code of each case."""
    root = tmp_path_factory.mktemp("ahead")
    packages, files = files_of([make() for make in CASES.values()], ahead=True)
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    return {name: root / f"{p.name}_{p.target.name}" for name, p in zip(CASES, packages, strict=True)}


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kernels.json").read_text())
    return found


@pytest.mark.slow
def test_the_folder_holds_what_its_description_says(folders: dict[str, Path]) -> None:
    for name, kind in (("roles", "cubin"), ("split", "cubin"), ("amd", "hsaco")):
        said = about(folders[name])
        code = [s["file"] for s in said["steps"]]
        assert {p.name for p in folders[name].iterdir()} == {
            *code,
            "kernels.json",
            "launch.py",
            "example.c",
            "Makefile",
            f"{said['name']}.h",
            f"{said['name']}.c",
        }
        for file in code:
            assert file.endswith(kind) and (folders[name] / file).read_bytes()[:4] == b"\x7fELF"
    assert about(folders["amd"])["steps"][0]["threads"] == 64
    roles = about(folders["roles"])["steps"][0]
    assert roles["warps"] == 8 and roles["early"]  # four warps that multiply, and the producer's
    assert len(about(folders["split"])["steps"]) == 2
    assert about(folders["split"])["workspace_bytes"] == 2 * 16 * 16 * 9 * 4


def test_what_is_passed_is_what_the_machine_code_takes(folders: dict[str, Path]) -> None:
    from triton import knobs

    for name in ("roles", "split"):
        for step in about(folders[name])["steps"]:
            told = subprocess.run(
                [knobs.nvidia.cuobjdump.path, "-elf", str(folders[name] / step["file"])],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            taken = {
                int(number, 16): int(size, 16)
                for number, size in re.findall(
                    r"Ordinal : (0x[0-9a-f]+)\s+Offset\s+: 0x[0-9a-f]+\s+Size\s+: (0x[0-9a-f]+)", told
                )
            }
            assert taken == dict(enumerate(SIZES[x["kind"]] for x in step["passed"]))


@pytest.mark.every(2)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("name", CASES)
def test_the_files_in_c_compile(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import triton

    vendors = Path(triton.__file__).parent / "backends"  # the headers that Triton's own launchers need
    kernels = about(folders[name])["name"]
    for file in (f"{kernels}.c", "example.c"):
        subprocess.run(
            [
                "gcc",
                "-std=c11",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fsyntax-only",
                "-D__HIP_PLATFORM_AMD__",
                f"-I{vendors / 'nvidia' / 'include'}",
                f"-isystem{vendors / 'amd' / 'include'}",
                file,
            ],
            cwd=folders[name],
            check=True,
        )


class Driver:
    """Stands for libcuda: notes calls and fills in what they return."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.passed: list[list[bytes]] = []
        self.sizes: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.calls.append((name, given))
            if name == "cuMemAlloc_v2":
                given[0]._obj.value = 1 << 20
            if name == "cuLaunchKernel":
                pointers = given[9]
                self.passed.append(
                    [ctypes.string_at(p, n) for p, n in zip(pointers, self.sizes.pop(0), strict=True)]
                )
            return 0

        return call


@pytest.mark.slow
def test_the_launcher_in_python_passes_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    steps = about(folders["split"])["steps"]
    driver.sizes = [[SIZES[x["kind"]] for x in s["passed"]] for s in steps]
    kernels = launch.LoadedKernels(folders["split"])
    kernels(src=0x1000, wei=0x2000, dst=0x3000, stream=5)
    numbers = [[int.from_bytes(x, "little") for x in given] for given in driver.passed]
    assert numbers == [[0x1000, 0x3000, 1 << 20, 0, 0], [1 << 20, 0x2000, 0, 0]]
    (first, second) = [given for name, given in driver.calls if name == "cuLaunchKernel"]
    assert [x.value for x in first[1:8]] == [
        *steps[0]["grid"],
        steps[0]["threads"],
        1,
        1,
        steps[0]["shared_bytes"],
    ]
    assert second[8].value == 5
    with pytest.raises(ValueError, match="src: expected an address that is a multiple of 16"):
        kernels(src=0x1008, wei=0x2000, dst=0x3000)
    with pytest.raises(ValueError, match="expected src wei dst, got src"):
        kernels(src=0x1000)


def test_the_page_imports_what_the_file_defines() -> None:
    """A GPU is needed to run these programs, not to see that their names exist."""
    page = Path(__file__).parents[3] / "docs" / "export.md"
    said = [page.read_text(encoding="utf-8"), launch.__doc__ or ""]
    names = re.findall(r"from launch import (\w+)", "".join(said))
    assert len(names) == 2 and all(hasattr(launch, name) for name in names)


def test_maps_of_tensors_are_encoded(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    step = about(folders["roles"])["steps"][0]
    driver.sizes = [[SIZES[x["kind"]] for x in step["passed"]]]
    launch.LoadedKernels(folders["roles"])(src=0x1000, wei=0x2000, dst=0x3000, bia=0x4000)
    maps = [given for name, given in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert [m[3].value for m in maps] == [0x1000, 0x2000, 0x3000]
    assert all(m[0].value % 64 == 0 and m[1].value == 6 for m in maps)  # of float16
    assert list(maps[0][4]) == [32, 8, 8, 2] and list(maps[0][5])[:3] == [64, 512, 4096]
    assert list(maps[0][6]) == [32, 8, 8, 2]
    wide = [x for x in driver.calls if x[0] == "cuFuncSetAttribute"]
    assert bool(wide) == (step["shared_bytes"] > 48 << 10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: conv("mb1ic4ih4oc4oh4kh3ph1", "fwd"),
            "no machine code is made ahead of time for interpreter",
        ),
        (
            lambda: conv(
                "mb2ic8ih4oc8oh4kh3ph1 tag=nchw:strides(100,9,3,1):nchw",
                "bwd_w",
                "ic.kh.kw:64 oc:16 mb.oh.ow:16 | mma | split_k=2 reduce=atomic",
                target="sm_90",
            ),
            "wei is cleared before, and has gaps",
        ),
    ],
)
def test_what_cannot_be_made_is_said(make: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        machine_code.machine_code([packaged(make())])


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"global_scratch_size": 64}, "64 bytes of scratch memory for each program"),
        ({"num_ctas": 2}, "clusters of 2 blocks"),
        ({"launch_cooperative_grid": True}, "at once"),
        ({"num_ctas": 1, "global_scratch_size": None}, ""),
    ],
)
def test_launches_that_need_more_are_refused(known: dict[str, Any], says: str) -> None:
    assert says in machine_code._why_not(known) and bool(says) == bool(machine_code._why_not(known))


def test_names_in_c() -> None:
    assert [c_name(n) for n in ("src", "int", "workspace", "_x")] == ["src", "int_", "workspace_", "_x_"]
