"""Kernels from Triton's cache without its front end: the same ones; and whatever is stale, foreign or
damaged is left to Triton."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests import programs
from transconv.backend_triton.launch import compile_records
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.support import files, knobs

HASH = "cd" * 32
ROOT = Path(__file__).parents[2]
CODE = b"\x7fELF" + bytes(range(200))
H200 = GPUTarget("cuda", 90, 32)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton's folder of the kernel ``f``, which the record ``k`` names, on a chip that is not there."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(compile_records, "folder", lambda: tmp_path / "triton")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: H200))
    compile_records.forget()
    files.forget()
    found = tmp_path / "triton" / compile_records.folder_of(HASH)
    found.mkdir(parents=True)
    about = {
        "hash": HASH,
        "name": "f",
        "num_warps": 8,
        "num_ctas": 1,
        "shared": 1024,
        "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
        "tensordesc_meta": None,
    }
    (found / "f.json").write_text(json.dumps(about))
    (found / "f.cubin").write_bytes(CODE)
    (found / "__grp__f.json").write_text("{}")
    kernel = SimpleNamespace(
        hash=HASH,
        name="f",
        asm={"cubin": CODE},
        metadata=SimpleNamespace(target=H200),
        src=SimpleNamespace(constants={}, signature={"z": "*bf16", "a": "i32"}),
    )
    compile_records.note("k", True, kernel)
    yield found
    compile_records.forget()
    files.forget()


def test_a_kernel_comes_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_records.again("k", "f", True)
    assert (kernel.kernel, kernel.name, kernel.hash) == (CODE, "f", HASH)
    assert kernel.packed_metadata == (8, 1, 1024)
    assert [*kernel.src.signature.items()] == [("z", "*bf16"), ("a", "i32")], "in the order of a launch"
    assert (
        compile_records.again("k", "f", False) is None
        and compile_records.again("other", "f", True) is None
    )
    monkeypatch.setattr(TritonKernel, "_function", lambda self: pytest.fail("Triton was asked"))
    kernel = TritonKernel("", "f", None, 1, 8, 3, key="k")
    assert kernel._compiled([], True).kernel == CODE


def test_a_kernel_of_other_types_does_not(place: Path) -> None:
    """Texts do not say the types of their tensors."""
    about = SimpleNamespace(constants={}, signature={"z": "*bf16"})
    kernel = SimpleNamespace(
        hash=HASH, name="f", asm={"cubin": CODE}, metadata=SimpleNamespace(target=H200), src=about
    )
    compile_records.note("k", True, kernel, ("bfloat16",))
    assert compile_records.again("k", "f", True, ("bfloat16",)).kernel == CODE
    assert compile_records.again("k", "f", True, ("float16",)) is None
    kernel = TritonKernel("", "f", None, 1, 8, 3, types=("bfloat16",), key="k")
    assert kernel._compiled([], True).kernel == CODE


def changed(**words: Any) -> Callable[[Path], None]:
    """What changes the kernel's metadata."""

    def change(place: Path) -> None:
        about = json.loads((place / "f.json").read_text())
        (place / "f.json").write_text(json.dumps({**about, **words}))

    return change


def told(**words: Any) -> Callable[[Path], None]:
    """What changes our record."""
    return lambda place: (
        compile_records.DRAWER.put("k", {**(compile_records.DRAWER.get("k") or {}), **words}) and None
    )


@pytest.mark.parametrize(
    "attack",
    [
        changed(hash="ab" * 32),
        changed(name="g"),
        changed(target=7),
        changed(target={"backend": "cuda", "arch": 80, "warp_size": 32}),
        changed(target={"backend": "hip", "arch": "gfx942", "warp_size": 64}),
        told(triton="3.5.1"),
        told(library=1),
        told(rules="another"),
        told(variables={"TRITON_X": "1"}),
        told(signature=[["z"]]),
        told(signature=7),
        told(signature=[]),
        told(function="g"),
        told(folder="../.."),
        told(folder="/etc"),
        told(folder=compile_records.folder_of("ab" * 32)),
        told(code="another"),
        lambda place: (place / "f.json").write_text('{"hash": "cd'),
        lambda place: (place / "f.json").write_bytes(b"\xff\xfe\x00"),
        lambda place: (place / "f.json").unlink(),
        lambda place: (place / "f.cubin").unlink(),
        lambda place: (place / "f.cubin").write_bytes(CODE[:-1]),
        lambda place: (place / "f.cubin").write_bytes(CODE[:9] + b"\x00" + CODE[10:]),
    ],
)
def test_triton_decides_about_anything_else(place: Path, attack: Callable[[Path], Any]) -> None:
    assert compile_records.again("k", "f", True) is not None
    attack(place)
    assert compile_records.again("k", "f", True) is None


def test_a_stale_record_is_replaced(place: Path) -> None:
    kernel = compile_records.again("k", "f", True)
    kernel.src.signature["b"] = "*fp32"
    told(rules="another")(place)
    compile_records.note("k", True, kernel)  # by which Triton has compiled or found it
    again = compile_records.again("k", "f", True)
    assert [*again.src.signature] == ["z", "a", "b"]


def test_damaged_machine_code_is_compiled_anew(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "f.cubin").write_bytes(CODE[:50])
    with caplog.at_level(logging.WARNING, "transconv.cache"):
        assert (
            compile_records.again("k", "f", True) is None and compile_records.again("k", "f", True) is None
        )
    assert not (place / "__grp__f.json").exists(), "by which Triton finds it"
    assert [r.getMessage() for r in caplog.records] == [
        f"cache {place}/f.cubin: the machine code is not what was compiled; it is compiled anew"
    ]


def test_who_watches_triton_sees_all_kernels(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group, name in (
        ("compilation", "always_compile"),
        ("compilation", "dump_ir"),
        ("runtime", "debug"),
    ):
        with monkeypatch.context() as m:
            m.setattr(getattr(triton.knobs, group), name, True)
            assert compile_records.again("k", "f", True) is None, name
    with monkeypatch.context() as m:
        m.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
        assert compile_records.again("k", "f", True) is None
    with monkeypatch.context() as m:
        m.setattr(triton, "__version__", "3.9.0")
        assert compile_records.again("k", "f", True) is None
    assert compile_records.again("k", "f", True) is not None


def test_a_compiling_process_also_builds_what_starts_a_kernel(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the types of arguments that a launch has, so that it finds it. A machine that cannot goes on."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    built: list[str] = []
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda src, **_: built.append(src))
    compile_records.build_start(compile_records.again("k", "f", True), False)
    assert len(built) == 1 and "launch" in built[0]

    def missing() -> list[str]:
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(nvidia, "library_dirs", missing)
    compile_records.build_start(compile_records.again("k", "f", True), False)
    monkeypatch.setattr(compile_records, "build_start", lambda kernel, patient: built.append(kernel.name))
    TritonKernel("", "f", None, 1, 8, 3, key="k").compile(True)
    assert built[1:] == ["f"]


@pytest.mark.slow  # a child compiles two kernels
def test_it_is_what_triton_finds() -> None:
    """Of products with boxes, in both languages: names and types of arguments, metadata, machine code."""
    code = """
        import torch, transconv
        from transconv.backend_triton import pretend
        from transconv.backend_triton.launch import compile_records
        from transconv.conv import ConvProblem, Prop, compiler
        from transconv.target import Target
        target = Target.parse("sm_90")
        pretend(target.backend, target.arch, target.warp_size)
        scale = "compute scale; sizes M=8 in 1..4096; axes m=M; read x = X[m]; store Y[m] = 2*x"
        problem = ConvProblem.parse("mb4ic64ih16oc64oh16kh1ph0 dt=bf16 tag=nhwc")
        plans = [compiler.plan(problem, Prop.FWD, target),
                 transconv.compile(scale.replace("; ", "\\n"), target="sm_90")]
        again = compile_records.again
        for run in (step.triton for plan in plans for step in plan.steps):
            run.compile(True)
            run.jit = None
            ours = again(run.key, run.function, True, run.types)
            compile_records.again = lambda *_: None
            theirs = run._compiled([torch.empty(1, dtype=getattr(torch, t), device="meta")
                                    for t in run.types], True)
            compile_records.again = again
            assert ours is not theirs and ours.hash == theirs.hash
            assert [*ours.src.signature.items()] == [*theirs.src.signature.items()]
            assert dict(theirs.src.constants) == ours.src.constants == {}
            assert ours.metadata == theirs.metadata and ours.kernel == theirs.kernel
            print(run.sizes is not None, run.explicit)
    """
    made = programs.run(
        ["-c", textwrap.dedent(code)],
        timeout=120,
        env=knobs.child_environment({"TRITON_INTERPRET": None}, str(ROOT)),
    )
    assert made.returncode == 0, made.stderr
    assert "True False" in made.stdout and "False True" in made.stdout
