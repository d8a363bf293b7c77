"""Random numbers in kernels, from a place and a seed: nothing is stored, and every engine has the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from transconv.kernel.device_functions import func


@func
def uniform(place: Any, seed: Any) -> Any:
    """Numbers from 0 to below 1, multiples of 2**-24, one for each whole number of ``place`` (of 32 bits).
    A hash with two multiplications: for dropout and noise, not for cryptography."""
    h = place.astype(np.int32) * 747796405 + seed
    h = (h ^ (h >> 16 & 0xffff)) * 0x21f0aaad
    h = (h ^ (h >> 15 & 0x1ffff)) * 0x735a2d97
    return (h >> 8 & 0xffffff) * 2.0**-24
