"""Measured rates of a chip's multiprocessor that its data sheet does not give, for the cost model.

All but the instruction figures were fitted on an H200 by ``python -m bench.fit``; other chips use these
figures, scaled by the clocks, multiprocessors and bandwidth of their records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted rates of one spelling's kernels."""

    narrow: float = 25.0  # columns that the start of a matrix instruction is worth
    fetch_gbs: float = 102.0  # L2 to one multiprocessor, GB/s
    short_rows: float = 0.4  # added to fetching a row of 64 bytes, relative to one of 128 bytes
    access_ns: float = 0.011  # to compute and issue one gathered access of up to 16 bytes
    unpack_ns: float = 0.09  # more where positions are summed: each step finds and masks other ones
    gather_step_ns: float = 50.0  # waiting per step of the sum, one program alone
    fill_ns: float = 1260.0  # start of a program until its first product
    store_gbs: float = 14.8  # of results that a multiprocessor stores
    box_store: float = 0.45  # time to store a box, relative to storing its elements one by one
    flat_positions: float = 1.33  # how much slower sums over positions are in a persistent program
    persistent: float = 0.62  # of the store that is left when the next tile's loads run behind it
    memory_share: float = 0.69  # of the memory's bandwidth that a kernel reaches
    exposed: float = 0.24  # of the shorter one of computing and moving bytes that nothing hides
    launch_us: float = 4.1
    # Not fitted: the sweeps hold too little about these.
    latency_ns: float = 900.0  # from asking for a tile until it can be multiplied
    late_access_ns: float = 0.07  # more for one of less than 4 bytes: it goes through registers
    scatter_ns: float = 1.6  # to store an element that has no neighbour beside it
    copy_us: float = 3.0  # a copy's launch, and that it begins when the kernel before has ended
    baton_ns: float = 150.0  # from the end of one consumer's products to the start of the other's
    meeting_us: float = 20.0  # more for sums dealt out evenly, whose parts differ from tile to tile
    through_ns: float = 0.15  # more for one of f32 that goes through registers, transposed or rounded
    older: float = 1.6  # how much slower the older matrix unit is, which takes operands from registers
    shared_gbs: float = 190.0  # of a multiprocessor's shared memory, GB/s; bounds what turns operands
    fma_share: float = 0.35  # of the multiply-adds of the cores


@dataclass(frozen=True, slots=True)
class Issue:
    """What a multiprocessor issues; round figures, for kernels whose instructions are counted."""

    clock: float = 1.7  # clocks of a multiprocessor in a nanosecond
    cores: int = 128  # multiply-adds of f32 in a clock
    schedulers: int = 4  # of a multiprocessor: each issues an instruction a clock
    share: float = 0.8  # of these clocks in which something is issued
    latency_ns: float = 800.0  # of a step of one warp that nothing overlaps: its loads
    stall: float = 1.5  # clocks between two instructions of a warp that is alone
    fill_ns: float = 1500.0  # start and end of a program
    cache_gbs: float = 42.0  # second cache to one multiprocessor
    barriers_ns: float = 600.0  # to add up the lanes of a sum through shared memory
    threads: int = 2048  # that a multiprocessor keeps at a time
    most_registers: int = 240  # of a thread; more are spilled


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of kernels in Triton, of explicit ones in Gluon, and of instructions."""

    triton: Constants = Constants()
    gluon: Constants = Constants()
    issue: Issue = Issue()

    def __hash__(self) -> int:
        # Targets are keys of caches that are asked thousands of times: two figures tell enough.
        return hash((self.triton.fetch_gbs, self.gluon.fill_ns))


# Explicit kernels: boxes land while others are multiplied, so little but the products is left.
SM90 = Rates(gluon=Constants(
    narrow=22.0, short_rows=0.515, fill_ns=3843, store_gbs=5.8, box_store=0.332, flat_positions=1.114,
    persistent=0.424, memory_share=0.72, exposed=0.168, launch_us=0.7))
