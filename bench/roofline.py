"""The floor under a time: arithmetic at the matrix rate, or each tensor once through memory.

The ceilings are measured ones (a large matrix product on random data, a device copy), not the data
sheet's. Taps on padding are counted as work, as framework tables do, so a kernel that skips them
can pass the floor; so can one whose tensors stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from transconv.conv import ConvProblem


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Rates of one machine: matrix TFLOP/s of 16-bit operands (of 8-bit ones twice as many), f32 (vector)
    TFLOP/s, memory TB/s."""

    tflops: float
    vector_tflops: float
    terabytes: float

    def rate(self, problem: ConvProblem) -> float:
        """TFLOP/s that the operands' type can reach."""
        bits = sorted(x.dtype.bits for x in problem.specs.values())[1]  # the wider operand's
        if bits <= 16:
            return self.tflops * 16 / bits
        return self.tflops / 2 if problem.math == "tf32" else self.vector_tflops


CEILINGS = {
    "H200": Ceiling(780, 60, 4.3),
    "H100": Ceiling(780, 60, 3.0),
    "A100": Ceiling(270, 19, 1.7),
    "": Ceiling(780, 60, 4.3),  # an unknown device is compared with the H200
}


def ceiling_of(device: str) -> Ceiling:
    """The ceilings of a device, by the name that its driver gives it."""
    return next(c for name, c in CEILINGS.items() if name in device)


def compute_us(problem: ConvProblem, ceiling: Ceiling) -> float:
    return problem.flops(valid=False) / ceiling.rate(problem) / 1e6


def memory_us(problem: ConvProblem, ceiling: Ceiling) -> float:
    return problem.bytes_moved() / ceiling.terabytes / 1e6


def floor_us(problem: ConvProblem, ceiling: Ceiling) -> float:
    """The least time to expect of a kernel, in microseconds."""
    return max(compute_us(problem, ceiling), memory_us(problem, ceiling))


def intensity(problem: ConvProblem) -> float:
    """Operations a byte of compulsory traffic."""
    return problem.flops(valid=False) / max(1, problem.bytes_moved())
