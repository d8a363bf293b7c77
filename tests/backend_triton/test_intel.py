"""Intel's GPUs: what is read of their compiler's listing and help, its command line, SPIR-V for CPUs;
and, where the compilers are there, a kernel compiled, and one executed through OpenCL."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from transconv.__main__ import main
from transconv.backend_triton import machine_code, opencl_child
from transconv.backend_triton.offline_compilation import (
    BACKENDS,
    CompileJob,
    Resources,
    backends_of,
    compile_offline,
    compiles_for,
    triton_version,
)
from transconv.errors import ScheduleError, Unsupported
from transconv.ir.dtype import bf16, f32, f64
from transconv.target import records
from transconv.target.records import TARGETS, Target
from transconv.verify import machine

XPU = Path(__file__).parents[2] / ".xpu"
CHIPS = [t for t in TARGETS.values() if t.backend == "xpu"]
LISTING = """\
//.kernel conv
//.platform XE2
//.thread_config numGRF=256, numAcc=8, numSWSB=32
//.spill size 960
(W)     mad (1|M0)   r127.2<1>:ud  r127.2<0;0>:ud    r127.0<0;0>:uw    0xC0:uw    {I@1}
        mad (16|M0)  r10.0<1>:f    r12.0<1;0>:f      r17.0<1;0>:f      r18.0<1>:f {F@1}
(W)     load.ugm.d32x16t.a32.ca.cc (1|M0)  r1:1 bti[255][r127:1]   {A@1,$0} // ex_desc:0xFF000000
        load.ugm.d32x4.a64 (16|M0)  r36:4       [r42:2]            {I@1,$4} // ex_desc:0x0; desc:0x4403580
        load.ugm.d16u32.a64 (16|M0)  r36:1      [r42:2]            {I@1,$5} // $264
        store.ugm.d64x2.a64 (16|M0)  [r42:2]    r36:4              {I@1,$6} // $282
        load_block2d.ugm.d16.a64.ca.ca (1|M0)  r9:8 [r3:1]         {A@1,$1}
        load.slm.d16u32.a32 (16|M0)  r36:1      [r42:1]            {I@1,$7}
(W)     dpas.8x8 (16|M0)  r82:f    r82:f    r58:bf    r50.0:bf    {Atomic,Compacted}
        sync.bar                             flag0
// sync.bar is a comment here
"""


def test_what_the_listing_tells() -> None:
    assert (machine_code.registers(LISTING), machine_code.spilt(LISTING)) == (256, 960)
    assert machine_code.spilt(LISTING.replace("//.spill size 960\n", "")) == 0
    assert machine_code.words_of(LISTING) == {
        "dpas": 1,
        "mad.f": 1,
        "load.ugm": 3,
        "load.ugm.128": 1,
        "load_block2d.ugm": 1,
        "store.ugm": 1,
        "store.ugm.128": 1,
        "load.slm": 1,
        "sync.bar": 1,
    }
    with pytest.raises(RuntimeError, match="does not tell the registers"):
        machine_code.registers("//.kernel conv")


def test_chips_in_the_help() -> None:
    page = """
  -device <device_type>         Target device.
                                <device_type> can be: bdw, dg2-g10, pvc-sdv, pvc, xe-hpg, version  or
                                hexadecimal Deprecated notation that is still supported:
                                <device_type> can be: xe_hp_sdv, dg2
"""
    assert {"pvc", "dg2", "dg2-g10"} <= machine_code.devices_in(page)
    assert "bmg" not in machine_code.devices_in(page)


def test_the_command_line() -> None:
    words = machine_code.command(Path("/tmp/x/kernel.spv"), "pvc", machine_code.LARGE)
    assert words[:6] == ["compile", "-spirv_input", "-file", "/tmp/x/kernel.spv", "-device", "pvc"]
    assert words[-2:] == ["-options", "-cl-intel-256-GRF-per-thread"]
    assert "-options" not in machine_code.command(Path("/tmp/x/kernel.spv"), "dg2")


def test_without_ocloc_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    machine_code.ocloc_devices.cache_clear()
    with pytest.raises(
        ValueError, match="there is no ocloc, Intel's offline compiler; install it with: apt-get"
    ):
        machine_code.ocloc_devices()


def test_attributes_leave_spirv_and_barriers_follow_shuffles() -> None:
    def instruction(kind: int, *words: int) -> tuple[int, ...]:
        return ((len(words) + 1) << 16 | kind, *words)

    def text(name: bytes) -> tuple[int, ...]:
        padded = name + b"\0" * (4 - len(name) % 4)
        return struct.unpack(f"<{len(padded) // 4}I", padded)

    head = (0x07230203, 0x10400, 0, 9, 0)
    kept = (
        *instruction(17, 6),
        *instruction(10, *text(b"SPV_INTEL_subgroups")),
        *instruction(16, 1, 31, 16),
        *instruction(5, 1, *text(b"SPV_INTEL_kernel_attributes")),  # a name, no extension
    )
    gone = (
        *instruction(17, 5892),
        *instruction(10, *text(b"SPV_INTEL_kernel_attributes")),
        *instruction(16, 1, 5893, 128, 1, 1),
    )
    whole = struct.pack(f"<{len(head + gone + kept)}I", *head, *gone, *kept)
    more = (*head[:3], head[3] + 2, head[4])  # two names for constants
    assert opencl_child.for_cpus(whole) == (struct.pack(f"<{len(head + kept)}I", *more, *kept), False)
    integer, shuffle = instruction(21, 5, 32, 0), instruction(346, 5, 8, 6, 7, 6)
    made, exchanged = opencl_child.for_cpus(struct.pack(f"<{5 + 4 + 6}I", *head, *integer, *shuffle))
    waits = (*instruction(43, 5, 9, 2), *instruction(43, 5, 10, 0x110)), instruction(224, 9, 9, 10)
    expected = (*more, *integer, *waits[0], *shuffle, *waits[1])
    assert exchanged and made == struct.pack(f"<{len(expected)}I", *expected)


def test_a_help_that_ends_as_an_error_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ocloc of Debian 12 (22.43) prints it, and fails."""
    script = tmp_path / "ocloc"
    script.write_text("#!/bin/sh\necho '  <device_type> can be: dg1, dg2, pvc'\nexit 212\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine_code.ocloc_devices.cache_clear()
    try:
        assert {"dg2", "pvc"} <= machine_code.ocloc_devices()
        with pytest.raises(RuntimeError, match="ocloc query failed"):
            machine_code._ocloc("query", "OCL_DRIVER_VERSION")
    finally:
        machine_code.ocloc_devices.cache_clear()


def test_rows_of_the_chips() -> None:
    assert [t.name for t in CHIPS] == ["pvc", "dg2", "bmg", "lnl"]
    assert Target.parse("xpu") is TARGETS["pvc"]  # its name before there were several
    found = TARGETS["pvc"].mma(bf16, bf16, f32)
    assert found is not None and (found.name, found.n) == ("dpas", 16)
    assert TARGETS["dg2"].mma(bf16, bf16, f32) is None
    assert TARGETS["dg2"].why_not_held(f64) == "dg2 has no f64" and not TARGETS["pvc"].why_not_held(f64)


@pytest.mark.parametrize(
    ("card", "chip"),
    [
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("Intel(R) Arc(TM) A770 Graphics", "dg2"),
        ("Intel(R) Arc(TM) B580 Graphics", "bmg"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "lnl"),
    ],
)
def test_cards_by_the_names_of_their_drivers(card: str, chip: str) -> None:
    assert records.of_intel(card).name == chip


def test_a_card_without_a_record() -> None:
    with pytest.raises(
        Unsupported, match="no record for Intel Iris Xe; expected a card of pvc dg2 bmg lnl"
    ):
        records.of_intel("Intel Iris Xe")


def test_the_installed_triton_does_not_compile_for_them(tmp_path: Path) -> None:
    assert backends_of() == BACKENDS and not any(compiles_for(t.backend, t.arch) for t in CHIPS)
    (tmp_path / "triton_xpu-3.3.0b1.dist-info").mkdir()
    (tmp_path / "triton_xpu-3.3.0b1.dist-info" / "METADATA").write_text(
        "Name: triton-xpu\nVersion: 3.3.0b1\n"
    )
    assert backends_of(tmp_path) == ("xpu",)


def test_opencl_takes_no_other_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_OPENCL", ".xpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert machine.executable(TARGETS["pvc"], "cpu") is TARGETS["pvc"] is records.detect()
    with pytest.raises(
        ScheduleError, match="executes kernels for Intel GPUs, not for sm_90; expected pvc"
    ):
        machine.executable(TARGETS["sm_90"], "cpu")


# -- with the compilers ----------------------------------------------------------------------------------

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def product(x, y, c):
    at = tl.arange(0, 32)
    a = tl.load(x + at[:, None] * 32 + at[None, :])
    b = tl.load(y + at[:, None] * 32 + at[None, :])
    tl.store(c + at[:, None] * 32 + at[None, :], tl.dot(a, b))
"""


@pytest.mark.xpu
@pytest.mark.skipif(
    not (XPU / "ready").exists() or not shutil.which("ocloc"),
    reason="Triton's release for Intel GPUs is not in .xpu (`make .xpu/ready`), or there is no ocloc",
)
def test_a_product_is_compiled_to_dpas() -> None:
    params = (("f16", ()), ("f16", ()), ("f32", ()))
    job = CompileJob(KERNEL, "product", params, "pvc", "xpu", "pvc", 16)
    (found,) = compile_offline([job], triton=XPU)
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    assert (
        found.words["dpas"]
        and found.words["load.ugm"]
        and found.registers == 128
        and not found.spill_bytes
    )
    assert "3.3" in triton_version(XPU) and "/" in triton_version(XPU)


@pytest.mark.xpu
@pytest.mark.skipif(
    not (XPU / "ready").exists() or not Path(sys.prefix, "lib", "libintelocl.so").exists(),
    reason="Triton's release for Intel GPUs is not in .xpu, or transconv[opencl] is not installed",
)
@pytest.mark.parametrize(
    "text",
    [
        "compute twice ;; tensor X f32 [300] ;; tensor C f32 [300] ;; axes m=300 ;; read x = X[m] ;; "
        "store C[m] = x * 2",
        "compute rows ;; tensor X f32 [5, 300] ;; tensor C f32 [5] ;; axes m=5 k=300 ;; "
        "read x = X[m, k] ;; let s = sum(x; k) ;; store C[m] = s",
        # A shuffle whose result one lane stores; a helper that asks for the width of its argument.
        "compute most ;; tensor X f32 [5] ;; tensor C f32 [5] ;; axes m=5 k=300 ;; read x = X[m] ;; "
        "let s = max(x; k) ;; store C[m] = s",
        "compute gate ;; tensor X f32 [300] ;; tensor C f32 [300] ;; axes m=300 ;; read x = X[m] ;; "
        "store C[m] = silu(x)",
    ],
)
def test_texts_are_executed_through_opencl(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSCONV_OPENCL", str(XPU))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))
    assert main(["check", "--engine=opencl", text]) == 0
    told = capsys.readouterr().out
    assert "right  exact" in told and "right  float" in told
