"""Measured rates of a chip's multiprocessor that its data sheet does not give, for the cost model.

``python -m bench.fit`` fitted ``Constants`` on an H200, except where a comment says otherwise; other chips
use these figures, with the multiprocessors, bandwidth and matrix rate of their records.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    behind_ns: float = 0.2  # to load what a lane takes at once behind a sum: 0.12 to 0.3 in 8 layers
    copy_us: float = 3.0  # of a copy's launch, and of its start after the kernel before
    baton_ns: float = 150.0  # from the end of one consumer's products to the start of the other's
    meeting_us: float = 20.0  # more for stream-K, whose numbers of parts differ from tile to tile
    through_ns: float = 0.15  # more for an access of f32 that goes through registers
    older: float = 1.6  # factor on products of ``mma.sync``, which takes operands from registers
    shared_gbs: float = 190.0  # shared memory of one multiprocessor, GB/s, if operands are transposed
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
    called_ns: float = 0.0045  # of an instruction of one element, in functions behind a sum
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
SM90 = Rates(gluon=Constants(
    narrow=22.0, short_rows=0.515, fill_ns=3843, store_gbs=5.8, box_store=0.332, flat_positions=1.114,
    persistent=0.424, memory_share=0.72, exposed=0.168, launch_us=0.7))
