"""Whether the matrix unit's accumulator takes too many additions in a row under a schedule.

NVIDIA's matrix units do not round what they add to an accumulator in f32, they cut it off (Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). Roundings to the nearest of n
additions are a random walk: some 2^-24 sqrt(n) of the sum. Cuts all go towards zero: each takes half of
the last place on average, 0.36 * 2^-23 of the sum, and as a sum of random terms grows over the whole
chain, all n together take half of n times that from it. Measured on an H200 (bench/results/h200_check.csv,
what is left of the error in the 2-norm without the rounding of the result to f16): 2.04e-4 of 10,900
additions, 3.07e-4 of 16,600, 5.5e-4 of 29,600, which is 1.86e-8 = 0.16 * 2^-23 for each of them.

So 2^15 additions cost 6e-4, twice what rounding the operands to tf32 does, and 16 million terms in six
parts would cost 6e-3. Longer chains are split: the parts are added in another kernel, which rounds to the
nearest. The schedules that were tuned for layers of networks have at most 18,800.
"""

from __future__ import annotations

from transconv.compute import Compute
from transconv.schedule import Schedule, chain
from transconv.target import Target

LONGEST = 1 << 15


def too_long(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the sums of a schedule lose more than the rounding of operands does."""
    return target.backend == "cuda" and chain(schedule, compute) > LONGEST


def fewest_parts(schedule: Schedule, compute: Compute, target: Target) -> int:
    """The least ``split_k`` whose parts are short enough; 1 where the whole sum is."""
    return -(-chain(schedule, compute) // LONGEST) if too_long(schedule, compute, target) else 1
