"""Stage 10, launches that overlap (feature ``early``, CUDA's programmatic dependent launch).

A kernel may be made ready, its programs placed and its barriers laid out, while the one before it in the
stream still runs: between two launches lie about 2 us otherwise, which a plan of three kernels pays
twice. Every kernel begins with two lines: it waits until all before it have ended and what they wrote
can be seen, and lets the next one be made ready. Nothing reaches memory before the first of them, so
it does not matter whose kernel came before, nor whether that one knew of this.
"""

from __future__ import annotations

IMPORT = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait"
BEGIN = ("gdc_wait()  # until the kernels before this one have ended",
         "gdc_launch_dependents()  # the next one may be made ready meanwhile")


def imported(early: bool) -> list[str]:
    return [IMPORT] if early else []


def begun(early: bool) -> list[str]:
    """The first lines of a kernel's body."""
    return [f"    {line}" for line in BEGIN] if early else []
