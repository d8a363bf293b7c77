"""Exported kernels on a GPU: files of Python where transconv cannot be imported, machine code launched
through ctypes and by a program in C. Each gives the same bits as transconv's own launch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import cases as c
from tests.runtime.standalone.alone import load
from tests.runtime.standalone.cases import compute, computed_here, conv, run_alone
from transconv.runtime import Plan
from transconv.runtime.standalone import PlanPackage, files_of, packaged
from transconv.target import detect

pytestmark = pytest.mark.gpu

EXPLICIT = "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 stages=3 warps=4 via=gluon"
BOXES = "mb:2 oh:8 ow:8 oc:64 ic:32 | mma | a=box b=box swap=1 stages=3 warps=4"
SPLIT = "ic.kh.kw:64 oc:32 mb.oh.ow:64 | mma | split_k=4 stages=2 warps=4"
SOFTMAX = """compute softmax
    axes   n=64 | k=777
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
BOXED = ("roles", "roles_tf32", "tf32")  # of sm_90
# Name: problem, direction, schedule (empty: the chosen one), epilogue.
CONVOLUTIONS = {
    "roles": ("mb4ic64ih16oc64oh16kh3ph1 dt=f16 tag=nhwc", "fwd", EXPLICIT, "bias+relu"),
    "chosen": ("mb4ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc", "fwd", "", ""),
    "tf32": ("mb2ic64ih16oc64oh16kh3ph1 tag=nhwc", "fwd", BOXES, ""),
    "roles_tf32": ("mb2ic64ih16oc64oh16kh3ph1 tag=nhwc", "fwd", f"{BOXES} via=gluon", ""),
    "phases": ("mb2ic64ih28oc64oh14kh3sh2ph1 dt=f16 tag=nhwc", "bwd_d", "", ""),
    "split": ("mb4ic32ih14oc32oh14kh3ph1 dt=f16 tag=nhwc", "bwd_w", SPLIT, ""),
    "packed": (
        "mb2ic64ih14oc64oh14kh3ph1 dt=f16",
        "fwd",
        "mb.oh.ow:64 oc:64 ic:32 | mma | pack=a.c stages=2",
        "bias",
    ),
    "depthwise": ("g64mb2ic64ih14oc64oh14kh3ph1 dt=bf16 tag=nhwc", "fwd", "", "bias+silu"),
    "residual": ("mb2ic64ih14oc64oh14kh3ph1 dt=bf16 tag=nhwc", "fwd", "", "bias+res+relu"),
    "blocked": ("mb2ic17ih9oc20oh9kh3ph1 dt=f16 tag=nChw16c", "fwd", "", "relu"),
}


def made(name: str) -> Callable[[], Plan]:
    if name == "softmax":
        return lambda: compute(SOFTMAX, target=detect().name)
    text, prop, schedule, epilogue = CONVOLUTIONS[name]
    return lambda: conv(text, prop, schedule, epilogue, detect().name)


def plans(*names: str) -> dict[str, Plan]:
    """The plans of this chip, which may have no copy engine."""
    some = [n for n in names if n not in BOXED or "wgmma" in detect().features]
    return {name: made(name)() for name in some}


def test_files_give_the_same_bits_without_transconv(tmp_path: Path) -> None:
    known = plans(*CONVOLUTIONS, "softmax")
    packages, files = files_of(list(known.values()))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = run_alone(tmp_path / "found", [tmp_path / f"{p.name}.py" for p in packages])
    for (name, plan), package in zip(known.items(), packages, strict=True):
        came = found[package.name]
        assert came["code"] == 0, f"{name}: its own check says it is wrong"
        for got, want in zip(came["got"], computed_here(plan, came["given"]), strict=True):
            assert got.device.type == c.DEVICE and torch.equal(got, want), name
    if "wgmma" in detect().features:
        assert any(x.explicit and x.early for p in packages for x in p.launches)


AHEAD = ("roles", "roles_tf32", "tf32", "split", "packed", "blocked")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PlanPackage, Path]]:
    """Packages with their folders of machine code for this chip."""
    if detect().backend not in ("cuda", "hip"):
        pytest.skip("machine code needs a GPU to run on")
    root = tmp_path_factory.mktemp("ahead")
    known = plans(*AHEAD)
    packages, files = files_of(list(known.values()), ahead=True, workers=4)
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    return {name: (p, root / f"{p.name}_{p.target.name}") for name, p in zip(known, packages, strict=True)}


def drawn(package: PlanPackage, folder: Path) -> dict[str, torch.Tensor]:
    """Operands as the file of Python beside the folder draws them."""
    module = load(str(folder.parent / f"{package.name}.py"))
    draw = torch.Generator().manual_seed(3)
    return {t.name: module.drawn(t.name, draw) for t in package.read}


def memory(tensor: torch.Tensor, span: int) -> bytes:
    """The bytes of a tensor's memory."""
    flat = tensor.as_strided((span,), (1,)).contiguous().cpu()
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def each(ahead: dict[str, tuple[PlanPackage, Path]]) -> Any:
    """The packages with operands and what transconv makes of them."""
    for name, (package, folder) in ahead.items():
        given = drawn(package, folder)
        (want,) = computed_here(package.plan, given)
        torch.cuda.synchronize()
        yield name, package, folder, given, want


def test_machine_code_through_ctypes(ahead: dict[str, tuple[PlanPackage, Path]]) -> None:
    """Twice, on a stream of its own and on the current one; the result before holds NaN."""
    for name, package, folder, given, want in each(ahead):
        kernels = load(str(folder / "launch.py")).LoadedKernels(folder)
        (result,) = package.stored
        for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
            got = torch.full_like(want, float("nan"))
            assert got.stride() == want.stride()
            torch.cuda.synchronize()
            kernels(**given, **{result.name: got}, stream=stream.cuda_stream)
            torch.cuda.synchronize()
            assert torch.equal(got, want), name
        with pytest.raises(ValueError, match=f"{result.name}: expected torch"):
            kernels(**given, **{result.name: want.double()})


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_machine_code_from_a_program_in_c(
    ahead: dict[str, tuple[PlanPackage, Path]], tmp_path: Path
) -> None:
    if detect().backend != "cuda":
        pytest.skip("headers of CUDA come with Triton, those of HIP need ROCm")
    for name, package, folder, given, want in each(ahead):
        program = tmp_path / name
        build(package, folder, program)
        files = []
        for t in package.read:
            files.append(tmp_path / f"{name}-{t.name}.bin")
            files[-1].write_bytes(memory(given[t.name], t.span))
        (result,) = package.stored
        out = tmp_path / f"{name}-out.bin"
        done = subprocess.run(
            [program, folder, *files, out], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert out.read_bytes() == memory(want, result.span), name


def build(package: PlanPackage, folder: Path, program: Path) -> None:
    """The example, with the header and the driver that Triton's own launchers are built with."""
    import triton
    from triton.backends.nvidia.driver import libcuda_dirs

    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    places = [x for d in libcuda_dirs() for x in (f"-L{d}", f"-Wl,-rpath,{d}")]
    done = subprocess.run(
        [
            "gcc",
            "-std=c11",
            "-O1",
            "-Wall",
            "-Werror",
            f"-I{header}",
            "-o",
            str(program),
            str(folder / "example.c"),
            str(folder / f"{package.name}.c"),
            *places,
            "-l:libcuda.so.1",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_packages_are_named_by_what_they_are() -> None:
    """Two chips, two schedules: two names, so that their files lie beside each other."""
    one, two = packaged(made("split")()), packaged(made("packed")())
    assert one.name != two.name and one.name.startswith("conv_bwd_w_")
