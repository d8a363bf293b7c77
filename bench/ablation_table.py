"""The ablation as a document: what each pass and word earns over all layers, and layer by layer.

What a variant *earns* is its time over the base's: 1.20 means that without the pass (or with the
other word) the kernel takes 1.20 times as long. Differences within the spread of the two times are
*nothing*, and said so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench import ablation_graphs
from bench.environment import VERSIONS
from bench.tables import geometric_mean, markdown
from transconv.conv import DIRECTIONS
from transconv.passes import PIPELINE
from transconv.tuning.table import Row, number

SAME = "same text"  # the reason of a variant that is not timed
PHRASES = {"pass": "Passes (- switched off, + switched on)", "word": "Words of the schedule"}

STAYS = {
    "lets": "shorter texts for people; Triton finds the same itself",
    "cse": "kernels for any sizes, each of whose divisions takes some twenty instructions",
    "edges": "kernels for any sizes that keep rows in registers; with fixed sizes there is nothing to do",
    "upright": "chips without warp-specialized kernels (via=tl): sm_80, sm_89, AMD, Intel",
    "quads": "8-bit integers on the units that multiply four bytes at a time (dp4a)",
    "keep=b": "1x1 layers of 8-bit operands: 0.89 of the time (bench/results/h100_small_types_trials.csv)",
}  # passes and words that may earn nothing for 16-bit layers on a Hopper GPU: what needs them


def is_nothing(row: Row) -> bool:
    """Whether a right row differs from its base by less than the noise."""
    return abs((number(row, "earns") or 1.0) - 1) <= (number(row, "spread") or 0.0)


def summary(rows: Sequence[Row], what: str) -> str:
    """One line per variant: geometric means per direction, extremes, and how often nothing."""
    lines = []
    places = {p.name: i for i, p in enumerate(PIPELINE)}
    names = dict.fromkeys(r["variant"] for r in rows if r["what"] == what)
    for name in sorted(names, key=lambda n: places.get(n.lstrip("+-"), len(places))):
        mine = [r for r in rows if r["what"] == what and r["variant"] == name]
        right = [r for r in mine if r["verdict"] == "right"]
        earned = {
            d: geometric_mean(number(r, "earns") or 1.0 for r in right if r["direction"] == d)
            for d in DIRECTIONS
        }
        values = [number(r, "earns") or 1.0 for r in right]
        same = sum(r["reason"] == SAME for r in right)
        nothing = sum(map(is_nothing, right)) - same
        bad = Counter(r["verdict"] for r in mine if r["verdict"] not in ("right", "refused"))
        lines.append(
            [
                f"`{name}`",
                *("-" if v is None else f"{v:.3f}" for v in earned.values()),
                f"{min(values):.2f}" if values else "-",
                f"{max(values):.2f}" if values else "-",
                str(same),
                str(nothing),
                str(len(right) - same - nothing),
                str(sum(r["verdict"] == "refused" for r in mine)),
                ", ".join(f"{n} {verdict}" for verdict, n in sorted(bad.items())) or "0",
            ]
        )
    return markdown(
        [
            "variant",
            *DIRECTIONS,
            "least",
            "most",
            "same text",
            "in the noise",
            "differs",
            "refused",
            "failed",
        ],
        lines,
    )


def layers(rows: Sequence[Row]) -> str:
    """One line per layer, direction and base: every variant that is not nothing."""
    lines = []
    for key in dict.fromkeys((r["layer"], r["direction"], r["base"]) for r in rows):
        mine = [r for r in rows if (r["layer"], r["direction"], r["base"]) == key]
        shown = sorted(
            (r for r in mine if r["verdict"] == "right" and not is_nothing(r)),
            key=lambda r: -(number(r, "earns") or 1.0),
        )
        base = next((number(r, "base_us") for r in mine if number(r, "base_us")), None)
        cells = ", ".join(f"`{r['variant']}` {number(r, 'earns') or 1.0:.2f}" for r in shown)
        lines.append(
            [
                key[0],
                key[1],
                "-" if base is None else f"{base:.1f}",
                f"`{key[2]}`".replace("|", "/"),
                cells or "nothing",
            ]
        )
    return markdown(["layer", "direction", "base us", "base", "time over the base's"], lines)


def refusals(rows: Sequence[Row]) -> str:
    """Why variants could not be: one example for each."""
    lines = []
    for name in dict.fromkeys(r["variant"] for r in rows if r["verdict"] == "refused"):
        mine = [r for r in rows if r["verdict"] == "refused" and r["variant"] == name]
        lines.append([f"`{name}`", str(len(mine)), mine[0]["reason"].replace("|", "/")])
    return markdown(["variant", "times", "for example"], lines)


def _noise(rows: Sequence[Row], graphs: Sequence[Row]) -> str:
    """A sentence: by how much models differ without passes that change the text of no layer."""
    changed = {r["variant"] for r in rows if r["what"] == "pass" and r["reason"] != SAME}
    idle = {r["variant"] for r in rows if r["what"] == "pass"} - changed
    off = [abs(over - 1) for v in idle for over in ablation_graphs.over_base(graphs, v).values()]
    if not off:
        return ""
    names = ", ".join(f"`{name}`" for name in sorted(idle))
    return f" Variants that change no layer's text ({names}) show the noise: up to {max(off):.2f}."


def document(rows: Sequence[Row], graphs: Sequence[Row] = ()) -> str:
    """The whole page, Markdown; ``graphs``: rows of bench/ablation_graphs.py."""
    if not rows:
        return "# Ablation\n\nNothing was measured.\n"
    found = [sorted({r[c] for r in rows}) for c in VERSIONS]
    source = "Measured on {}, torch {}, Triton {}, commit {}.".format(*(", ".join(f) for f in found))
    parts = [
        "# Ablation: what each pass and each word of the schedule earns",
        source,
        "Generated by `python -m bench ablation`; raw numbers in `ablation.csv`, here"
        " bench/results/h200_ablation.csv. A number is the time of the variant over the time of the"
        " schedule that selection chose: 1.20 means that without it the kernel takes 1.20 times as"
        " long, under 1 that the variant is faster."
        " *Same text*: the kernel is the same to the letter; *in the noise*: the times differ by"
        " less than they scatter. The counts of a pass add up to all layers and directions, unless the"
        " run's time was over before.",
    ]
    for what, phrase in PHRASES.items():
        if any(r["what"] == what for r in rows):
            parts.append(f"**{phrase}**\n\n{summary(rows, what)}")
    parts.append(
        "**Passes and words that stay though they may earn nothing above**\n\n"
        + markdown(["pass or word", "what needs it"], [[f"`{n}`", why] for n, why in STAYS.items()])
    )
    if graphs:
        parts.append(
            "**Whole models**: the GPU's time of a call without the pass, over the time with all. Rows:"
            f" bench/results/h200_ablation_graphs.csv.{_noise(rows, graphs)}\n\n"
            + ablation_graphs.document(graphs)
        )
    parts.append(f"## Layer by layer\n\n{layers(rows)}")
    if any(r["verdict"] == "refused" for r in rows):
        parts.append(f"## Not legal\n\n{refusals(rows)}")
    return "\n\n".join(parts) + "\n"
