"""How a kernel is launched, as text for people."""

from __future__ import annotations

from transconv.ir import text_of
from transconv.kernel.annotations import Meant
from transconv.kernel.launch.lowering import LoweredKernel
from transconv.target import Target


def explained(made: LoweredKernel, meant: Meant, why: str, chip: Target) -> str:
    """The groups of a kernel, their shape and who chose it, warps, sizes that are arguments and what is
    required of them, masks that were proved away. ``why``: lines about who chose what was not hinted, if
    it was not the compiler."""
    group = made.group
    hinted = group.group_shape_hint is not None
    lines = [f"kernel     {made.name}",
             f"target     {chip.name}",
             f"work       {' x '.join(map(str, group.work))}",
             f"group      {' x '.join(map(str, group.shape))} ({'as hinted' if hinted else 'chosen'})",
             f"groups     {' x '.join(map(str, group.groups))} = {group.count} programs",
             f"sub-group  {group.subgroup_size_hint or chip.warp_size}" + (
                 f" (as hinted; the chip's warps have {chip.warp_size})"
                 if group.subgroup_size_hint not in (None, chip.warp_size) else " (the chip's)"),
             f"warps      {made.warps}" + (" (as hinted)" if group.warps_hint else ""),
             f"stages     {made.num_stages}" + (" (as hinted)" if group.stages_hint else "")]
    lines += [f"tunable    {n} = {v}" for n, v in meant.tuned.items()]
    lines += [why] if why else []
    lines += [f"size       {told}" for told in made.sizing.told]
    sizes = made.kernel.sizes
    lines += [f"requires   {text_of(c)}" for c in (sizes.where if sizes else ())]
    lines += [f"constant   {n.said} = {n.value}" for at, n in enumerate(made.sizing.numbers)
              if not made.sizing.is_argument(at)]
    lines += [f"masks      {note}" for note in made.kernel.notes]
    return "\n".join(lines)
