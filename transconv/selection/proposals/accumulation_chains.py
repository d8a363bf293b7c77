"""Whether the matrix unit's accumulator takes too many additions in a row under a schedule.

NVIDIA's matrix units truncate additions to an f32 accumulator instead of rounding them (Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). Errors of n additions that round to
nearest are a random walk of some 2^-24 sqrt(n) of the sum. Truncations all go towards zero: each loses
half a unit in the last place on average, 0.36 * 2^-23 of the sum, and because a sum of random terms grows
over the whole chain, n additions lose half of n times that. Measured on an H200
(bench/results/h200_check.csv, relative error in the 2-norm without that of rounding the result to f16):
2.04e-4 for 10,900 additions, 3.07e-4 for 16,600, 5.5e-4 for 29,600, which is 1.86e-8 = 0.16 * 2^-23 for
each addition.

2^15 additions thus lose 6e-4, twice the error of rounding the operands to tf32; 16 million terms in six
parts would lose 6e-3. Longer chains are split, and another kernel, which rounds to nearest, adds the
parts. The schedules tuned for layers of networks have at most 18,800 additions.
"""

from __future__ import annotations

from transconv.compute import Compute
from transconv.schedule import Schedule, chain
from transconv.target import Target

LONGEST = 1 << 15  # additions to one accumulator


def too_long(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a schedule adds more than ``LONGEST`` products to one accumulator, on a CUDA target."""
    return target.backend == "cuda" and chain(schedule, compute) > LONGEST


def fewest_parts(schedule: Schedule, compute: Compute, target: Target) -> int:
    """The smallest ``split_k`` whose parts are not too long; 1 if the whole sum is not."""
    return -(-chain(schedule, compute) // LONGEST) if too_long(schedule, compute, target) else 1
