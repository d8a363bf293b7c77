"""Groups: how the work of a launch is divided. The simulator and the compiled kernels divide it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from transconv.kernel.tiles.lanes import PLACES, capacity
from transconv.support import KernelError

LONGEST = 1024  # elements of a group of one dimension that gets no hint
MOST_STAGES = 8
SQUARE = 32  # rows and columns of a group of more dimensions


def _sizes(name: str, given: int | Sequence[int], least: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Sequence) else (given,)
    if not sizes or len(sizes) > len(PLACES) or any(not isinstance(n, int) or n < least for n in sizes):
        raise KernelError(f"{name}={given!r}; expected 1 to {len(PLACES)} whole numbers from {least} on")
    return sizes


@dataclass(frozen=True, slots=True)
class Group:
    """The work of a launch: ``work_shape`` elements, divided into groups.

    ``group_shape_hint``: the elements of a group, any sizes, of as many dimensions; default: 1,024, or 32
    by 32 along the last two dimensions, not beyond the work. ``subgroup_size_hint``: the items of a
    sub-group; chips have one size, which ``explain`` reports. ``warps_hint``: the warps of a group;
    ``stages_hint``: how many iterations' loads of a loop are in flight. Sizes may be given as one number.
    Raises KernelError for sizes below 1 (of the work: below 0).
    """

    work_shape: tuple[int, ...] | int
    group_shape_hint: tuple[int, ...] | int | None = None
    subgroup_size_hint: int | None = None
    warps_hint: int | None = None
    stages_hint: int | None = None

    def __post_init__(self) -> None:
        work = _sizes("work_shape", self.work_shape, 0)
        object.__setattr__(self, "work_shape", work)
        if self.group_shape_hint is not None:
            hint = _sizes("group_shape_hint", self.group_shape_hint, 1)
            if len(hint) != len(work):
                raise KernelError(f"group_shape_hint={hint} has {len(hint)} dimensions; work_shape="
                                  f"{work} has {len(work)}")
            object.__setattr__(self, "group_shape_hint", hint)
        size = self.subgroup_size_hint
        if size is not None and (not isinstance(size, int) or size < 1 or size & (size - 1)):
            raise KernelError(f"subgroup_size_hint={size!r}; expected a power of two")
        if self.warps_hint not in (None, 1, 2, 4, 8, 16, 32):
            raise KernelError(f"warps_hint={self.warps_hint!r}; expected 1, 2, 4, 8, 16 or 32")
        stages = self.stages_hint
        if stages is not None and (not isinstance(stages, int) or not 1 <= stages <= MOST_STAGES):
            raise KernelError(f"stages_hint={stages!r}; expected 1 to {MOST_STAGES}")

    @property
    def work(self) -> tuple[int, ...]:
        """The work's sizes."""
        assert isinstance(self.work_shape, tuple)
        return self.work_shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The elements of one group."""
        if isinstance(self.group_shape_hint, tuple):
            return self.group_shape_hint
        if len(self.work) == 1:
            return (min(LONGEST, capacity(max(1, self.work[0]))),)
        sizes = [min(SQUARE, capacity(max(1, n))) for n in self.work[-2:]]
        return (*(1 for _ in self.work[:-2]), *sizes)

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of groups along each dimension; the last ones may reach beyond the work."""
        return tuple(-(-n // m) for n, m in zip(self.work, self.shape, strict=True))

    @property
    def count(self) -> int:
        """The number of groups."""
        return prod(self.groups)
