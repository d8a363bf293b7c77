"""8-bit types of ``--dtypes``: what each direction multiplies and stores, and the table
beside bf16.

    int8        integers to integers: a scale for each output channel, a zero point, one rounding
    fp8         8-bit floats to bf16, gradients of f8e5m2; sums stay in the matrix unit
    fp8_exact   the same with sums that move to f32
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.tables import geometric_mean, markdown, two_digits
from transconv.conv import DIRECTIONS, KINDS, ConvProblem, Prop
from transconv.tuning.table import Row, number


@dataclass(frozen=True, slots=True)
class Mixture:
    """The types of src, wei and dst by direction (a direction that is not there is not computed), the
    precision of sums, and what is done to the sums of products with weights."""

    types: dict[str, str]
    epilogue: str
    math: str = "tf32"


FLOATS = {"fwd": "f8e4m3:f8e4m3:bf16", "bwd_d": "bf16:f8e4m3:f8e5m2", "bwd_w": "f8e4m3:bf16:f8e5m2"}
MIXTURES = {
    "int8": Mixture(dict.fromkeys(("fwd", "bwd_d"), "s8:s8:s8"), "mul:f32:per_oc+add:s32:common"),
    "fp8": Mixture(FLOATS, "mul:f32:common"),
    "fp8_exact": Mixture(FLOATS, "mul:f32:common", "ieee"),
}


def mixed(plain: ConvProblem, prop: Prop, name: str) -> tuple[ConvProblem, str] | None:
    """The problem in a mixture, and its epilogue; None if it is not timed in this mixture."""
    how = MIXTURES[name]
    types = how.types.get(prop.value)
    if types is None:
        return None
    return (
        replace(plain.with_dtype(types), math=how.math),
        how.epilogue if prop.roles[1] == "wei" else "",
    )


# -- the table -------------------------------------------------------------------------------------

WIDE = "dense, 128 channels and more"


def small_types_table(rows: list[Row]) -> str:
    """How many times as fast as our bf16 kernel of the same layer: geometric means, the least and its
    layer; and the time of a product of matrices over ours."""
    known = {(r["layer"], r["direction"], r["dtype"]): r for r in rows if r["verdict"] == "right"}
    lines = []
    for name in MIXTURES:
        for kind in (WIDE, *KINDS):
            for direction in DIRECTIONS:
                found = [
                    (float(base["ours_us"]) / float(r["ours_us"]), r)
                    for (layer, d, t), r in known.items()
                    if (d, t) == (direction, name)
                    and _is(r, kind)
                    and (base := known.get((layer, d, "bf16"))) is not None
                ]
                if found:
                    lines.append([name, kind, direction, *_line(found)])
    return markdown(
        ["types", "layers", "direction", "timed", "bf16 / ours", "least", "of it", "product / ours (3x3)"],
        lines,
    )


def _line(found: list[tuple[float, Row]]) -> list[str]:
    least, slowest = min(found, key=lambda f: f[0])
    products = (
        gemm / float(r["ours_us"])
        for _, r in found
        if (gemm := number(r, "gemm_us")) and ConvProblem.parse(r["problem"]).k == (3, 3)
    )
    return [
        str(len(found)),
        two_digits(geometric_mean(ratio for ratio, _ in found)),
        two_digits(least),
        f"`{slowest['layer']}`",
        two_digits(geometric_mean(products)),
    ]


def _is(row: Row, kind: str) -> bool:
    if kind != WIDE or row["kind"] != "dense":
        return row["kind"] == kind
    p = ConvProblem.parse(row["problem"])
    return min(p.icg, p.ocg) >= 128
