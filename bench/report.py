"""``python -m bench report``: tables and plots from the CSV files, and the README's numbers.

Only rows whose result is right count. A ratio is cuDNN's time over ours, above 1 is faster; it is
inside the noise when it differs from 1 by less than the spread of the two times together.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.roofline import ceiling_of, intensity
from transconv.conv import DIRECTIONS, KINDS, ConvProblem
from transconv.tuning.table import Row, number, read


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def counted(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a ratio and a right result."""
    return [r for r in rows if r["verdict"] == "right" and number(r, "ratio")]


def outcome(row: Row) -> str:
    """``win``, ``loss`` or ``noise``."""
    ratio, spread = number(row, "ratio") or 1.0, number(row, "spread") or 0.0
    return "noise" if abs(ratio - 1) <= spread else "win" if ratio > 1 else "loss"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of cells."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what is compared: dtype, layout, epilogue."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{row['dtype']} {row['layout']}"
        name += f" {row['epilogue']}" if row["epilogue"] else ""
        found.setdefault(name, []).append(row)
    return found


def summary_table(rows: list[Row]) -> str:
    """Geometric means of the ratio, wins, ties and losses, per direction and kind of layer; beside
    torch.compile where a row has its time."""
    lines = []
    tuned_by_torch = any(number(r, "inductor_us") for r in rows)
    for name, group in _groups(rows).items():
        for kind in (*KINDS, "all"):
            mine = [r for r in group if kind in ("all", r["kind"])]
            if not mine or (kind == "all" and len({r["kind"] for r in mine}) == 1):
                continue
            for direction in DIRECTIONS:
                here = [r for r in mine if r["direction"] == direction]
                good = counted(here)
                if not here:
                    continue
                ratios = [number(r, "ratio") or 1.0 for r in good]
                results = [outcome(r) for r in good]
                share = geometric_mean((number(r, "roofline_us") or 0.0)
                                       / (number(r, "ours_us") or 1.0) for r in good)
                lines.append([name, kind, direction, str(len(good)), str(len(here) - len(good)),
                              _ratio(geometric_mean(ratios)), _ratio(min(ratios, default=None)),
                              _ratio(max(ratios, default=None)),
                              *(str(results.count(w)) for w in ("win", "noise", "loss")),
                              "-" if share is None else f"{share:.0%}"])
                if tuned_by_torch:
                    beside = [number(r, "inductor_us") or 0.0 for r in good]
                    lines[-1].append(_ratio(geometric_mean(
                        t / (number(r, "ours_us") or 1.0) for t, r in zip(beside, good, strict=True)
                        if t)))
    more = ["torch.compile / ours"] if tuned_by_torch else []
    return markdown(["tensors", "layers", "direction", "timed", "not", "geomean", "worst", "best",
                     "faster", "in the noise", "slower", "of the roofline", *more], lines)


def layer_table(rows: list[Row]) -> str:
    """One line per layer: our time, cuDNN's in the same layout and in NCHW, and the ratio with its
    spread; bold where we are faster, ``~`` where the difference is inside the noise."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for name, group in _groups(rows).items():
        for row in group:
            found.setdefault((name, row["layer"]), {}).setdefault(row["direction"], row)
    lines = []
    for (name, layer), by_direction in found.items():
        cells = [layer, name]
        for direction in DIRECTIONS:
            cells.append(_cell(by_direction.get(direction)))
        lines.append(cells)
    head = ["layer", "tensors", *(f"{d}: ours / cuDNN cl / NCHW us, ratio" for d in DIRECTIONS)]
    return markdown(head, lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "right":
        return f"{row['verdict']}: {row['reason'][:60]}".replace("|", "/")
    times = [number(row, c) for c in ("ours_us", "cudnn_cl_us", "cudnn_nchw_us")]
    text = " / ".join("-" if t is None else f"{t:.1f}" if t < 100 else f"{t:.0f}" for t in times)
    mark = {"win": "**", "loss": "", "noise": "~"}[outcome(row)]
    ratio = _ratio(number(row, "ratio"))
    spread = number(row, "spread") or 0.0
    return f"{text}, {mark}{ratio}{mark if mark == '**' else ''} ±{spread:.0%}"


def cpu_table(rows: list[Row]) -> str:
    """Without a GPU: whether our kernels were right, interpreted, and the times of torch's
    libraries on this CPU (microseconds; the interpreter's own say nothing about a kernel)."""
    lines = []
    for row in rows:
        times = [number(row, c) for c in ("onednn_cl_us", "onednn_nchw_us", "inductor_us")]
        lines.append([row["layer"], row["direction"], f"{row['dtype']} {row['layout']}",
                      row["verdict"], *("-" if t is None else f"{t:.0f}" for t in times)])
    return markdown(["layer", "direction", "tensors", "ours, interpreted", "oneDNN cl us",
                      "oneDNN NCHW us", "torch.compile us"], lines)


def check_table(rows: list[Row]) -> str:
    """From ``check.csv``: how many results were right, and the worst errors."""
    lines = []
    keys = sorted({(r["dtype"], r["layout"]) for r in rows})
    for dtype, layout in keys:
        for prop in DIRECTIONS:
            here = [r for r in rows
                    if (r["dtype"], r["layout"], r["prop"]) == (dtype, layout, prop)]
            if not here:
                continue
            words = [r["verdict"] for r in here]
            bad = len(here) - words.count("right") - words.count("refused")
            worst = [max((number(r, c) or 0.0 for r in here), default=0.0)
                     for c in ("exact_err", "of_bound", "rms")]
            lines.append([dtype, layout, prop, str(len(here)), str(words.count("right")),
                          str(words.count("refused")), str(bad), f"{worst[0]:g}",
                          f"{worst[1]:.2f}", f"{worst[2]:.1e}"])
    return markdown(["dtype", "layout", "direction", "ran", "right", "refused", "not right",
                      "worst exact error", "worst share of the bound", "worst 2-norm error"], lines)


def networks_table(rows: list[Row]) -> str:
    """A line per model, precision and layout: errors against f64 and times, torch's then ours."""
    whats = list(dict.fromkeys(r["what"] for r in rows))
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for r in rows:
        found.setdefault((r["model"], r["precision"], r["layout"]), {})[r["what"]] = r
    units = {r["what"]: r["unit"] for r in rows if r["unit"]}
    told = {r["what"] for r in rows if number(r, "torch_gpu_ms")}
    head = ["model", "precision", "layout", *(f"{w} [{units.get(w, '')}]" for w in whats),
            *(f"{w}, GPU alone [ms]" for w in EAGER if w in told)]
    return markdown(head, ([*key, *(_both(found[key].get(w)) for w in whats),
                            *(_gpu(found[key].get(w)) for w in EAGER if w in told)]
                           for key in sorted(found)))


EAGER = ("forward", "forward+backward")


def _gpu(row: Row | None) -> str:
    """Milliseconds in which the GPU computes, torch's and ours, whatever the host needs."""
    times = [number(row, f"{side}_gpu_ms") for side in ("torch", "transconv")] if row else []
    if len(times) < 2 or not all(times):
        return "not run"
    torch, ours = (t or 0.0 for t in times)
    return f"{torch:.3g} → {ours:.3g} ({_ratio(torch / ours)})"


def _both(row: Row | None) -> str:
    if row is None:
        return "not run"
    torch, ours = number(row, "torch"), number(row, "transconv")
    if torch is None or ours is None:
        return str(row["error"] or "not run")
    return f"{torch:.3g} → {ours:.3g} ({_ratio(number(row, 'ratio'))})"


def overhead_table(rows: list[Row]) -> str:
    """Microseconds of the host per call, torch's and ours, and ours as a share of torch's."""
    found: dict[str, dict[tuple[str, str], Row]] = {}
    compared = {(r["case"], r["mode"]) for r in rows if r["side"] == "torch"}
    rows = [r for r in rows if (r["case"], r["mode"]) in compared]
    for r in rows:
        found.setdefault(r["case"], {})[r["mode"], r["side"]] = r
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    cells = ([case, *(_host(of.get((m, "torch")), of.get((m, "transconv"))) for m in modes)]
             for case, of in found.items())
    return markdown(["call", *modes], cells)


def _host(torch: Row | None, ours: Row | None) -> str:
    if torch is None or ours is None:
        return "not run"
    times = (number(r, "median_us") or 0.0 for r in (torch, ours))
    return "{:.1f} → {:.1f}".format(*times) + f" ({_ratio(number(ours, 'ratio'))})"


def maps_table(rows: list[Row]) -> str:
    """Microseconds of maps, reductions and norms beside torch's, and ours as a share of the limit: each
    tensor read or written once, at the rate of a large copy."""
    others = {side: head for side, head in (("torch_us", "torch"), ("inductor_us", "torch.compile"))
              if any(r[side] for r in rows)}
    cells = [[r["case"], r["us"], *(r[side] or "not run" for side in others), r["limit_us"], r["of_limit"]]
             for r in rows]
    ratios = (geometric_mean(float(r[side]) / float(r["us"]) for r in rows if r[side]) for side in others)
    shares = geometric_mean(float(r["of_limit"]) for r in rows)
    cells.append(["geometric mean of their ratios to ours, and of the shares", "",
                  *map(_ratio, ratios), "", f"{shares:.3f}"])
    return markdown(["case", "us", *others.values(), "limit", "of the limit"], cells)


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "summary": ("timing", summary_table), "layers": ("timing", layer_table),
    "check": ("check", check_table), "networks": ("networks", networks_table),
    "overhead": ("overhead", overhead_table), "cpu": ("cpu", cpu_table), "maps": ("maps", maps_table),
}


def kind_of(row: Row) -> str:
    """Which of the tables a row is for; empty if it is for none."""
    if row.get("device") == "cpu" and "ours_us" in row:
        return "cpu"  # beside oneDNN; an interpreter's times are compared with nothing
    return next((kind for column, kind in (("ours_us", "timing"), ("model", "networks"),
                                           ("mode", "overhead"), ("of_limit", "maps"),
                                           ("exact_err", "check")) if column in row), "")


def fill_markers(text: str, tables: dict[str, str]) -> str:
    """Put tables between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``. Raises ValueError if a
    marker has no end; markers without a table stay as they are."""
    for name, table in tables.items():
        start, stop = f"<!-- table:{name} -->", f"<!-- end:{name} -->"
        if start not in text:
            continue
        if text.count(start) != 1 or text.count(stop) != 1:
            raise ValueError(f"'{start}' must occur once and be followed by one '{stop}'")
        pattern = re.escape(start) + ".*?" + re.escape(stop)
        filled = f"{start}\n{table}\n{stop}"
        text = re.sub(pattern, lambda _: filled, text, flags=re.DOTALL)  # noqa: B023
    return text


def main(options: Namespace) -> int:
    """Write ``report.md``, ``ratio.png`` and ``roofline.png`` beside the first CSV (or to --out),
    and fill in the README. Raises ValueError if there is nothing to report."""
    by_kind: dict[str, list[Row]] = {"timing": [], "check": [], "networks": [], "overhead": [],
                                    "cpu": [], "maps": []}
    for source in options.csv:
        for row in read(Path(source)):
            if not kind_of(row):
                raise ValueError(f"{source} is no table of `python -m bench`: it has the columns "
                                 f"{' '.join(row)}")
            by_kind[kind_of(row)].append(row)
    tables = {name: make(by_kind[kind]) for name, (kind, make) in TABLES.items() if by_kind[kind]}
    if not tables:
        raise ValueError(f"{', '.join(map(str, options.csv))}: there is no row to report of")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items())
    (out / "report.md").write_text(f"{provenance(by_kind)}\n\n{text}\n", encoding="utf-8")
    if by_kind["timing"]:
        from bench import plots

        plots.ratios(counted(by_kind["timing"]), out / "ratio.png")
        plots.roofline(by_kind["timing"], out / "roofline.png")
    if options.readme:
        path = Path(options.readme)
        path.write_text(fill_markers(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables.get("summary") or tables.get("cpu", ""))
    return 0


def provenance(by_kind: dict[str, list[Row]]) -> str:
    """What the numbers were measured with, one line."""
    rows = [r for rows in by_kind.values() for r in rows]
    versions = [{**r, "torch": r.get("versions_torch", r["torch"])} for r in rows]
    found = [sorted({r[c] for r in versions}) for c in ("device", "torch", "triton", "commit")]
    return "Measured on {}, torch {}, Triton {}, commit {}.".format(*(", ".join(f) for f in found))


def point(row: Row) -> tuple[float, float, float]:
    """(operations a byte, our TFLOP/s, the ceiling there) of a timed row."""
    p = ConvProblem.parse(row["problem"])
    ceiling = ceiling_of(row["device"])
    at = intensity(p)
    return at, number(row, "tflops") or 0.0, min(ceiling.rate(p), at * ceiling.terabytes)
