"""The chips that kernels are generated for: one record each, with numbers from data sheets.

A record describes one common product of its architecture; ``detect`` replaces its counts by those that the
device reports. To add a GPU, add a row, or call ``register``.

``Constants`` are rates of a multiprocessor that no data sheet gives, for the cost model.
``python -m bench.fit`` fitted them on an H200, except where a comment says otherwise; other chips
use these figures, with the multiprocessors, bandwidth and matrix rate of their records."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transconv.ir import DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8
from transconv.support import ScheduleError, Unsupported, knobs, nearest, triton_release
from transconv.target.matrix_units import BLOCKS, BlockMma, Mma, families, sums

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted rates of one spelling's kernels."""

    narrow: float = 25.0  # overhead of a matrix instruction, as the columns that take as long
    fetch_gbs: float = 102.0  # from the L2 cache to one multiprocessor, GB/s
    short_rows: float = 0.4  # extra time of a row of 64 bytes, as a fraction of that of 128 bytes
    access_ns: float = 0.011  # to compute the address of a gathered access of up to 16 bytes and issue it
    unpack_ns: float = 0.09  # more if positions are summed: their indices and masks change each step
    gather_step_ns: float = 50.0  # waiting per step of the sum, with one program on a multiprocessor
    fill_ns: float = 1260.0  # from the start of a program to its first product
    store_gbs: float = 14.8  # results that one multiprocessor stores, GB/s
    box_store: float = 0.45  # time to store a box, as a fraction of storing its elements one by one
    flat_positions: float = 1.33  # factor on the steps of sums over positions in persistent programs
    persistent: float = 0.62  # the fraction of a store that the loads of the next tile do not hide
    memory_share: float = 0.69  # the fraction of the memory's bandwidth that a kernel reaches
    exposed: float = 0.24  # the part of the shorter one of computing and moving bytes that is not hidden
    launch_us: float = 4.1
    # Not fitted, because the sweeps have too few kernels that depend on these.
    latency_ns: float = 900.0  # from the load of a tile until it can be multiplied
    late_access_ns: float = 0.07  # more for an access of less than 4 bytes: it goes through registers
    scatter_ns: float = 1.6  # to store an element that is not contiguous with others
    behind_ns: float = 0.2  # to load what a lane takes at once in an epilogue: 0.12 to 0.3 in 8 layers
    copy_us: float = 3.0  # of a copy's launch, and of its start after the kernel before
    baton_ns: float = 150.0  # from the end of one consumer's products to the start of the other's
    meeting_us: float = 20.0  # more for stream-K, whose numbers of parts differ from tile to tile
    through_ns: float = 0.15  # more for an access of f32 that goes through registers
    older: float = 1.6  # factor on products of ``mma.sync``, which takes operands from registers
    shared_gbs: float = 250.0  # shared memory of one multiprocessor, GB/s, if operands are transposed
    fma_share: float = 0.35  # the fraction of the peak of multiply-adds that unit fma reaches


@dataclass(frozen=True, slots=True)
class Issue:
    """Rates of a multiprocessor's instructions, as round figures, for kernels whose instructions are
    counted."""

    clock: float = 1.7  # GHz
    cores: int = 128  # multiply-adds of f32 a clock
    schedulers: int = 4  # each issues an instruction a clock
    share: float = 0.8  # the fraction of clocks in which an instruction is issued
    latency_ns: float = 800.0  # of the loads of one step, if no other warp runs
    stall: float = 1.5  # clocks between two instructions of a warp, if no other warp runs
    fill_ns: float = 1500.0  # start and end of a program
    cache_gbs: float = 42.0  # from the L2 cache to one multiprocessor, GB/s
    whole_ns: float = 0.035  # to make a stored number of a sum of integers; 38 kernels of int8 on an H100
    turned_ns: float = 0.15  # more where Triton turns a tile of bytes before it stores them (2 kernels)
    called_ns: float = 0.0045  # of an instruction of one element, in functions of an epilogue
    hiding_warps: float = 9.0  # that issue them without waiting for results; 48 kernels on an H100
    barriers_ns: float = 600.0  # to add up the lanes of a sum through shared memory
    threads: int = 2048  # resident on a multiprocessor
    most_registers: int = 240  # of a thread; more are spilled
    # Atomic additions are not measured here. NVIDIA says of Kepler (GK110 white paper, 2012) that one is
    # done in a clock at one address, and that others are nearly as fast as loads (``cache_gbs``).
    adds_clocks: float = 1.0  # between two additions to one place
    empty_us: float = 2.2  # of a launch that computes nothing; fitted with the maps (cost/maps.py)
    # More of a product's time at the chip's rate where an operand passes through registers before it is
    # multiplied: one that is computed there, not fitted; and one of 8 bits that becomes a float, of 27
    # convolutions on an H200 (tests/cost/test_fitted_numbers.py). The times behind the latter are of two
    # commits, between which products of floats became faster; beside the earlier one's of torch it is 1.0.
    computed_late: float = 0.5
    converted_late: float = 1.4


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of Triton kernels, of explicit Gluon kernels, and of instructions."""

    triton: Constants = Constants()
    gluon: Constants = Constants()
    issue: Issue = Issue()

    def __hash__(self) -> int:
        # Targets are keys of caches that are read thousands of times, so only two figures are hashed.
        return hash((self.triton.fetch_gbs, self.gluon.fill_ns))


# In explicit kernels loads and products overlap, so that the products take most of the time.
SM90 = Rates(
    gluon=Constants(
        narrow=22.0,
        short_rows=0.515,
        fill_ns=3843,
        store_gbs=5.8,
        box_store=0.332,
        flat_positions=1.114,
        persistent=0.424,
        memory_share=0.72,
        exposed=0.168,
        launch_us=0.7,
    )
)

KIB, MIB = 1 << 10, 1 << 20
FEATURES = ("mma", "async_copy", "box", "wgmma", "tcgen05", "early")
ANY_F32 = ("tf32", "tf32x3", "ieee")
IEEE = ("ieee",)
F8 = (f8e4m3, f8e5m2)  # not on gfx942: it multiplies the fnuz formats, with another zero and no infinities


L2_GBS = 102.0
"""``Target.l2_gbs`` of the card that the rates were fitted on, an H200, in GB/s."""
# Of other cards, for kernels of any size (36 of them, bench/results/h100_any_size_trials.csv).
CROWDED_GBS = {"H100": 76.0}


@dataclass(frozen=True, slots=True)
class Target:
    """A chip. ``sms``: its multiprocessors; ``shared_bytes``: shared memory that one program may use;
    ``regs``: 32-bit registers of one multiprocessor; ``bandwidth_gbs``: of its memory, in GB/s;
    ``tflops``: dense rate of 16-bit matrix products; ``mma_dtypes``: operand types of its matrix unit;
    ``precisions``: of a dot of f32.

    ``features``: ``mma`` (matrix unit), ``async_copy`` (from global to shared memory without registers),
    ``box`` (a tensor-copy engine that moves boxes), ``wgmma`` and ``tcgen05`` (asynchronous matrix
    units), ``early`` (programmatic dependent launch: a kernel's programs may start before the kernel
    before it has ended). ``upcast16``: 16-bit arithmetic is wrong, so operands are cast to f32 after
    their load. ``rates``: measured rates for estimates; those of sm_90 until a chip has its own.
    ``l2_gbs``: what boxes bring from the L2 cache to one multiprocessor while all fetch, in GB/s.
    ``lane_regs``: 32-bit registers of a lane where operands on their way to the matrix unit take some; 0
    where shared memory holds them. Tiles that are estimated to need more are proposed last.
    ``link_gbs``: what copies to and from pinned host memory bring each way, in GB/s; nowhere measured.
    ``products_bytes``: the workspace that torch's library of products takes once on each stream, unless
    ``CUBLAS_WORKSPACE_CONFIG`` says otherwise (torch 2.13, CublasHandlePool.cpp).
    ``without``: element types that its kernels cannot have. ``since``: the oldest release of Triton whose
    kernels may run on it, empty for any, and ``why_since``: what those of earlier ones do there.
    ``compiled_since``: the oldest one that the compile matrix compiles for it; ``blocks_since``: that has
    products in blocks for it, empty if its matrix unit takes no scales of blocks."""

    name: str
    backend: str  # "cuda", "hip", "xpu" or "interpreter"
    arch: int | str
    warp_size: int
    sms: int
    shared_bytes: int
    regs: int
    l2_bytes: int
    bandwidth_gbs: float
    tflops: float
    features: frozenset[str]
    mma_dtypes: frozenset[DType]
    precisions: tuple[str, ...]
    upcast16: bool = False
    rates: Rates = SM90
    l2_gbs: float = L2_GBS
    lane_regs: int = 0
    link_gbs: float = 25.0
    products_bytes: int = 0
    without: frozenset[DType] = frozenset()
    since: tuple[int, ...] = ()
    why_since: str = "may read outside of their tensors"
    compiled_since: tuple[int, ...] = ()
    blocks_since: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:  # of some fields, because caches ask for it for every schedule
        return hash((self.name, self.sms, self.features))

    @property
    def ridge(self) -> float:
        """Operations a byte (FLOP/B) above which 16-bit matrix products are bound by arithmetic."""
        return self.tflops * 1e3 / self.bandwidth_gbs

    def mma(self, a: DType, b: DType, acc: DType) -> Mma | None:
        """The matrix instruction that multiplies operands of types ``a`` and ``b`` and accumulates in
        ``acc``; None if the chip has none."""
        if a is not b and a.bits == 8 and self.backend == "hip" and self.warp_size == 32:
            return None  # Triton 3.6 does not compile mixed 8-bit floats there
        if not {a, b} <= self.mma_dtypes or (a.kind, a.bits) != (b.kind, b.bits) or acc is not sums(a):
            return None
        found = (f.of(a.bits) for f in families(self.backend, self.warp_size, self.features))
        return next((m for m in found if m is not None), None)

    def block_mma(self, bits: tuple[int, int], scales: str, size: int) -> BlockMma | None:
        """The matrix instruction that multiplies elements of so many bits in blocks, or None."""
        units = families(self.backend, self.warp_size, self.features) if self.blocks_since else ()
        rows = (m for unit in units for m in BLOCKS.get(unit.name, ()))
        return next((m for m in rows if m.takes(bits, scales, size)), None)

    def least_steps(self, a: DType, b: DType) -> int:
        """The least steps of a sum that a dot of these operand types takes: 256 bits on NVIDIA's and
        Intel's matrix units (Triton 3.6 refuses fewer), of wide types 16 steps."""
        return 32 if a.bits == b.bits == 8 and self.backend in ("cuda", "xpu") else 16

    def lacks(self, a: DType, b: DType, acc: DType) -> bool:
        """Whether an operand has 8 bits or is of integers and there is no instruction: such a dot does not
        compile. A dot of wider floats does, because its operands are cast."""
        return (8 in (a.bits, b.bits) or a.is_integer) and self.mma(a, b, acc) is None

    def why_not_held(self, dtype: DType) -> str | None:
        """None if kernels can have elements of this type, else the reason."""
        if dtype in self.without:
            return f"{self.name} has no {dtype}"
        if dtype is f8e4m3 and self.backend == "cuda" and int(self.arch) < 89:
            return f"Triton has no {dtype} for {self.name}; expected f8e5m2, or a chip from sm_89 on"
        return None

    @staticmethod
    def parse(name: str) -> Target:
        """The target of this name, with the features that TRANSCONV_FEATURES switches. A chip of a known
        family (``sm_103``, ``gfx1101``) gets that family's record under its own name. Raises ScheduleError
        for an unknown name, and for words of TRANSCONV_FEATURES that do not fit the chip."""
        found = _nearest(name)
        if found is None:
            if name.lower() in TOO_OLD:
                raise ScheduleError(
                    f"target '{name}': Triton compiles for chips from sm_80 on, so torch "
                    f"computes there; expected one of {' '.join(TARGETS)}"
                )
            here = name.lower() in HERE
            hint = "; left out, it is the GPU's here" if here else nearest(name, TARGETS, CARDS)
            raise ScheduleError(f"target '{name}' is unknown; expected one of {' '.join(TARGETS)}{hint}")
        return _switched(found)


CARDS = {
    "a100": "sm_80",
    "a800": "sm_80",
    "a10": "sm_86",
    "a40": "sm_86",
    "3090": "sm_86",
    "l4": "sm_89",
    "l40s": "sm_89",
    "4090": "sm_89",
    "h100": "sm_90",
    "h200": "sm_90",
    "gh200": "sm_90",
    "hopper": "sm_90",
    "b200": "sm_100",
    "b300": "sm_103",
    "5090": "sm_120",
    "gb10": "sm_121",
    "mi200": "gfx90a",
    "mi250": "gfx90a",
    "mi300": "gfx942",
    "mi300x": "gfx942",
    "mi350": "gfx950",
    "mi355x": "gfx950",
    "8060s": "gfx1151",
    "mi455x": "gfx1250",
    "max 1550": "pvc",
    "max 1100": "pvc",
    "a770": "dg2",
    "a750": "dg2",
    "b580": "bmg",
    "b570": "bmg",
    "140v": "lnl",
    "cpu": "interpreter",
}
"""What cards are called, and their chips."""
HERE = ("cuda", "gpu", "auto", "native")  # the chip of this machine, as others say it
FORMER = {"xpu": "pvc"}  # a record's name before it had this one
TOO_OLD = ("sm_70", "sm_72", "sm_75", "v100", "t4")


def _cuda(
    arch: int,
    sms: int,
    shared: int,
    l2: int,
    bandwidth: float,
    tflops: float,
    *features: str,
    dtypes: tuple[DType, ...] = (),
    since: tuple[int, ...] = (),
    blocks: tuple[int, ...] = (),
) -> Target:
    return Target(
        f"sm_{arch}",
        "cuda",
        arch,
        32,
        sms,
        shared,
        65536,
        l2 * MIB,
        bandwidth,
        tflops,
        frozenset({"mma", "async_copy", *features}),
        frozenset({f16, bf16, f32, i8, *(F8 if arch >= 89 else ()), *dtypes}),
        ANY_F32,
        link_gbs=50.0 if arch >= 90 else 25.0,  # assumed: PCI Express 5.0 and 4.0 carry 63 and 31.5
        products_bytes=32 * MIB if arch // 10 in (9, 10, 12) else 2 * 4096 * KIB + 8 * 16 * KIB,
        since=since,
        blocks_since=(3, 6) if "tcgen05" in features else blocks,
    )


def _xpu(
    arch: str,
    sms: int,
    shared: int,
    l2: int,
    bandwidth: float,
    tflops: float,
    *features: str,
    lane_regs: int = 256,
    without: tuple[DType, ...] = (),
) -> Target:
    # A thread has 128 registers, of 16 lanes each if they are wide, or 256 where half the threads run.
    return Target(
        arch,
        "xpu",
        arch,
        16,
        sms,
        shared,
        131072,
        l2 * MIB,
        bandwidth,
        tflops,
        frozenset(features),
        frozenset({f16, bf16, f32, i8}),
        ANY_F32 if "mma" in features else IEEE,
        lane_regs=lane_regs,
        without=frozenset(without),
    )


def _hip(
    arch: str,
    warp_size: int,
    sms: int,
    shared: int,
    regs: int,
    l2: int,
    bandwidth: float,
    tflops: float,
    *features: str,
    precisions: tuple[str, ...] = IEEE,
) -> Target:
    # The matrix units of wave-64 chips multiply f32; those of wave-32 chips do not.
    dtypes = {f16, bf16, i8} | ({f32} if warp_size == 64 else set())
    dtypes |= {*F8} if arch in ("gfx950", "gfx1201", "gfx1250") else set()
    return Target(
        arch,
        "hip",
        arch,
        warp_size,
        sms,
        shared,
        regs,
        l2 * MIB,
        bandwidth,
        tflops,
        frozenset({"mma", *features}),
        frozenset(dtypes),
        precisions,
        lane_regs=0 if "async_copy" in features else 8 * warp_size,
        products_bytes=(128 if arch.startswith(("gfx94", "gfx95")) else 32) * MIB,
        blocks_since=(3, 6) if arch == "gfx950" else (),
    )


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        _cuda(80, 108, 163 * KIB, 40, 2039, 312, dtypes=(f64,)),  # A100 80 GB
        _cuda(86, 84, 99 * KIB, 6, 696, 149.7),  # A40
        _cuda(89, 142, 99 * KIB, 96, 864, 362),  # L40S
        _cuda(90, 132, 227 * KIB, 50, 3350, 989, "box", "wgmma", "early", dtypes=(f64,)),  # H100 SXM
        # B200. Before 3.7.1 lanes whose mask does not hold may read at a wrong address (pytorch#187081).
        _cuda(100, 148, 227 * KIB, 126, 8000, 2250, "box", "tcgen05", dtypes=(f64,), since=(3, 7, 1)),
        # B300. Products of i8 have a thirtieth of B200's rate there, which the record does not have.
        _cuda(103, 148, 227 * KIB, 126, 8000, 2250, "box", "tcgen05", dtypes=(f64,), since=(3, 7, 1)),
        _cuda(120, 170, 99 * KIB, 96, 1792, 209.5, "box", blocks=(3, 6)),  # RTX 5090
        # GB10 (DGX Spark). Its 16-bit rate is unknown: that of sparse f4 (1000), divided as the 5090's.
        _cuda(121, 48, 99 * KIB, 24, 273, 62.5, "box", blocks=(3, 9)),  # 3.6 makes 16-bit floats of them
        _hip("gfx90a", 64, 110, 64 * KIB, 131072, 8, 1638, 191.5),  # MI250X, one die
        _hip("gfx942", 64, 304, 64 * KIB, 131072, 32, 5300, 1307, precisions=("tf32", "ieee")),  # MI300X
        _hip("gfx950", 64, 256, 160 * KIB, 131072, 32, 8000, 2516, "async_copy"),  # MI355X
        _hip("gfx1100", 32, 96, 64 * KIB, 98304, 6, 960, 122.8),  # RX 7900 XTX
        _hip("gfx1151", 32, 40, 64 * KIB, 98304, 2, 256, 59.4),  # Radeon 8060S (Ryzen AI Max+ 395)
        _hip("gfx1201", 32, 64, 64 * KIB, 98304, 8, 644, 194.6),  # RX 9070 XT
        # MI455X. Published are 19.6 TB/s and 20 PFLOP/s of 8-bit products; 16-bit ones are taken as half.
        # Unknown, and those of MI355X: compute units, their registers, and the L2 cache.
        replace(
            _hip("gfx1250", 32, 256, 320 * KIB, 131072, 32, 19600, 10000),
            since=(3, 7, 1),
            why_since="multiply without the matrix unit, in registers that spill,",
            compiled_since=(3, 7, 1),  # 3.6 did not end a product of 8-bit floats in 180 s
        ),
        _xpu("pvc", 64, 128 * KIB, 204, 1638, 419, "mma"),  # Max 1550, one die
        # Arc A770, with registers of half the width. The products of its matrix unit have 8 columns, which
        # Triton's release 3.3 does not compile; ocloc drops those of 16, so none may be in the SPIR-V.
        _xpu("dg2", 32, 64 * KIB, 16, 560, 131, lane_regs=128, without=(f64,)),
        _xpu("bmg", 20, 128 * KIB, 18, 456, 116.5, "mma"),  # Arc B580
        _xpu("lnl", 8, 128 * KIB, 8, 136.5, 33.5, "mma"),  # Arc 140V
        # Triton's interpreter: memory is not limited. Its bf16 arithmetic is that of the bits as integers.
        Target(
            "interpreter",
            "interpreter",
            "numpy",
            32,
            1,
            1 << 30,
            1 << 30,
            MIB,
            10,
            0.01,
            frozenset({"mma", "box"}),
            frozenset({f16, bf16, f32, f64, i8, *F8}),
            ANY_F32,
            upcast16=True,
            blocks_since=(3, 9),  # 3.6 does not interpret tl.dot_scaled
        ),
    )
}
"""The chips with a record, by name."""


def register(target: Target) -> Target:
    """Add a chip and return it. ``Target.parse`` then knows its name, and newer chips of its family.
    ValueError for a name that is taken, ScheduleError for an unknown feature."""
    if target.name in TARGETS:
        raise ValueError(f"there is a record of {target.name} already")
    for feature in sorted(target.features - {*FEATURES}):
        raise ScheduleError(
            f"{target.name}: there is no feature '{feature}'; expected some of " + " ".join(FEATURES)
        )
    TARGETS[target.name] = target
    return target


def unregister(name: str) -> None:
    """Remove a chip. KeyError for an unknown name."""
    del TARGETS[name]


def _nearest(name: str) -> Target | None:
    """The record of this name, or that of the newest older chip of its family (for gfx1... the nearest of
    any age) under this name; None if there is none."""
    name = FORMER.get(name, name)
    if name in TARGETS:
        return TARGETS[name]
    family, number = _family(name)
    older = [
        (n, t)
        for t in TARGETS.values()
        for f, n in [_family(t.name)]
        if f == family and (n <= number or family.startswith("gfx1"))
    ]
    if not family or not older:
        return None
    found = min(older, key=lambda pair: abs(pair[0] - number))[1]
    return replace(found, name=name, arch=number if found.backend == "cuda" else name)


def _switched(target: Target) -> Target:
    """The chip with the features that TRANSCONV_FEATURES switches. Raises ScheduleError for words that do
    not fit the chip."""
    if reason := why_no_switches():
        raise ScheduleError(reason)
    made = set(target.features)
    for feature, on in knobs.features():
        if on and feature not in target.features and (feature != "early" or "box" not in target.features):
            raise ScheduleError(
                f"{knobs.features.name}: {target} has no feature '{feature}'"
                + (
                    ", which came with the chips that move boxes (sm_90)"
                    if feature == "early"
                    else "; what a chip has can be switched off"
                )
            )
        made = made | {feature} if on else made - {feature}
    return target if made == target.features else replace(target, features=frozenset(made))


def why_no_switches() -> str:
    """Why TRANSCONV_FEATURES is invalid on every chip; empty if it is not."""
    unknown = [feature for feature, _ in knobs.features() if feature not in FEATURES]
    return (
        f"{knobs.features.name}: there is no feature '{unknown[0]}'; expected some of {' '.join(FEATURES)}"
        if unknown
        else ""
    )


def _family(name: str) -> tuple[str, int]:
    """The family and the number of a chip, ("sm_8", 86) for sm_86; ("", 0) if the name is unreadable.
    Records of one family differ in counts and rates, so one can replace another."""
    if found := re.fullmatch(r"sm_(\d+)\d", name):
        return f"sm_{found.group(1)}", int(name[3:])
    if found := re.fullmatch(r"(gfx9|gfx11|gfx12)[0-9a-f]{2}", name):
        return found.group(1), int(name[3:], 16)
    return "", 0


def detect(device: torch.device | int | None = None) -> Target:
    """The target of a torch device (default: the current one), with the counts that it reports. The
    interpreter if there is no GPU or no torch, or with TRITON_INTERPRET=1. Raises Unsupported for a GPU
    of a family without a record."""
    if knobs.interpret():
        return TARGETS["pvc" if knobs.opencl() else "interpreter"]
    try:
        import torch
    except ImportError:
        return TARGETS["interpreter"]
    kind = getattr(device, "type", "cuda")
    if kind == "cpu":
        return TARGETS["interpreter"]
    if kind == "cuda" and torch.cuda.is_available():
        index = device if isinstance(device, int) else getattr(device, "index", None)
        return _of_gpu(torch.cuda.current_device() if index is None else index)
    if kind == "xpu" or (device is None and hasattr(torch, "xpu") and torch.xpu.is_available()):
        return of_intel(torch.xpu.get_device_name(device))
    return TARGETS["interpreter"]


def of_intel(card: str) -> Target:
    """The record of an Intel GPU, by the name that its driver tells. Raises Unsupported
    (``target:xpu``) if there is none."""
    chip = next((chip for word, chip in CARDS.items() if word in card.lower()), "")
    if chip not in TARGETS or TARGETS[chip].backend != "xpu":
        known = " ".join(t.name for t in TARGETS.values() if t.backend == "xpu")
        raise Unsupported("target:xpu", f"no record for {card}; expected a card of {known}")
    return TARGETS[chip]


@functools.cache
def _of_gpu(index: int) -> Target:
    import torch

    is_hip = torch.version.hip is not None
    return from_properties(torch.cuda.get_device_properties(index), is_hip)


def expect_release(record: Target, card: str = "") -> None:
    """Raises Unsupported (``target:sm_100``) where kernels of the Triton that is installed may not run on
    this chip. ``card``: its name for people."""
    if (held := triton_release()) and held < record.since:
        asked, has = (".".join(map(str, v)) for v in (record.since, held))
        raise Unsupported(
            f"target:{record.name}",
            f"kernels of Triton {has} {record.why_since} on {card or record.name}; "
            f"expected Triton {asked} or later (pip install 'triton>={asked}')",
        )


def of_card(record: Target, card: str) -> Target:
    """The record with what a card of this name has instead and its driver does not report."""
    crowded = next((gbs for name, gbs in CROWDED_GBS.items() if name in card), record.l2_gbs)
    return replace(record, l2_gbs=crowded)


def from_properties(properties: Any, is_hip: bool = False) -> Target:
    """The record for torch's properties of a device, with the counts that they report and the features
    that TRANSCONV_FEATURES switches; warns if those do not fit the chip. Raises Unsupported
    (``target:sm_75``) if there is no record, or if it asks for a later release of Triton."""
    p = properties
    name = p.gcnArchName.split(":")[0] if is_hip else f"sm_{p.major}{p.minor}"
    found = _nearest(name)
    if found is None:
        raise Unsupported(f"target:{name}", f"no record for {p.name}; expected one of {' '.join(TARGETS)}")
    expect_release(replace(found, name=name), p.name)
    try:
        found = _switched(found)
    except ScheduleError as error:
        knobs.ignore(str(error))
    clock_khz = getattr(p, "memory_clock_rate", 0)
    bits = getattr(p, "memory_bus_width", 0)
    # Two transfers a clock. Some drivers report 0.
    bandwidth = 2 * clock_khz * (bits // 8) / 1e6 or found.bandwidth_gbs
    sms = p.multi_processor_count or found.sms
    # HIP reports compute units or pairs of them, depending on the chip, so the rate is not scaled there.
    share = 1.0 if is_hip else sms / found.sms
    l2_bytes = getattr(p, "L2_cache_size", 0) or found.l2_bytes
    return replace(
        of_card(found, p.name),
        sms=sms,
        l2_bytes=l2_bytes,
        bandwidth_gbs=round(bandwidth, 1),
        tflops=found.tflops * share,
    )
