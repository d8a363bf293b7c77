"""Rows of everything that is no timing of single layers, as Markdown tables: whole networks, host time,
maps and reductions, and what was compared with a right answer."""

from __future__ import annotations

from collections import Counter

from bench.tables import geometric_mean, markdown, two_digits
from transconv.conv import DIRECTIONS
from transconv.tuning.table import Row, number


def check_table(rows: list[Row]) -> str:
    """From ``check.csv``: how many results were right, and the worst errors."""
    lines = []
    keys = sorted({(r["dtype"], r["layout"]) for r in rows})
    for dtype, layout in keys:
        for prop in DIRECTIONS:
            here = [r for r in rows if (r["dtype"], r["layout"], r["prop"]) == (dtype, layout, prop)]
            if not here:
                continue
            words = [r["verdict"] for r in here]
            bad = len(here) - words.count("right") - words.count("refused")
            worst = [
                max((number(r, c) or 0.0 for r in here), default=0.0)
                for c in ("exact_err", "of_bound", "rms")
            ]
            lines.append(
                [
                    dtype,
                    layout,
                    prop,
                    str(len(here)),
                    str(words.count("right")),
                    str(words.count("refused")),
                    str(bad),
                    f"{worst[0]:g}",
                    f"{worst[1]:.2f}",
                    f"{worst[2]:.1e}",
                ]
            )
    return markdown(
        [
            "dtype",
            "layout",
            "direction",
            "ran",
            "right",
            "refused",
            "not right",
            "worst exact error",
            "worst share of the bound",
            "worst 2-norm error",
        ],
        lines,
    )


def networks_table(rows: list[Row]) -> str:
    """A line per model, precision and layout: errors against f64 and times, torch's then ours."""
    whats = list(dict.fromkeys(r["what"] for r in rows))
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for r in rows:
        found.setdefault((r["model"], r["precision"], r["layout"]), {})[r["what"]] = r
    units = {r["what"]: r["unit"] for r in rows if r["unit"]}
    told = {r["what"] for r in rows if number(r, "torch_gpu_ms")}
    head = [
        "model",
        "precision",
        "layout",
        *(f"{w} [{units.get(w, '')}]" for w in whats),
        *(f"{w}, GPU alone [ms]" for w in EAGER if w in told),
    ]
    return markdown(
        head,
        (
            [
                *key,
                *(_both(found[key].get(w)) for w in whats),
                *(_gpu(found[key].get(w)) for w in EAGER if w in told),
            ]
            for key in sorted(found)
        ),
        keys=3,
        cuts=(6, 10),
    )


EAGER = ("forward", "forward+backward")


def _gpu(row: Row | None) -> str:
    """Milliseconds in which the GPU computes, torch's and ours, whatever the host needs."""
    times = [number(row, f"{side}_gpu_ms") for side in ("torch", "transconv")] if row else []
    if len(times) < 2 or not all(times):
        return "not run"
    torch, ours = (t or 0.0 for t in times)
    return f"{torch:.3g} → {ours:.3g} ({two_digits(torch / ours)})"


def _both(row: Row | None) -> str:
    if row is None:
        return "not run"
    torch, ours = number(row, "torch"), number(row, "transconv")
    if torch is None or ours is None:
        return str(row["error"] or "not run")
    return f"{torch:.3g} → {ours:.3g} ({two_digits(number(row, 'ratio'))})"


def overhead_table(rows: list[Row]) -> str:
    """Microseconds of the host per call, torch's and ours, and ours as a share of torch's."""
    found: dict[str, dict[tuple[str, str], Row]] = {}
    compared = {(r["case"], r["mode"]) for r in rows if r["side"] == "torch"}
    rows = [r for r in rows if (r["case"], r["mode"]) in compared]
    for r in rows:
        found.setdefault(r["case"], {})[r["mode"], r["side"]] = r
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    cells = (
        [case, *(_host(of.get((m, "torch")), of.get((m, "transconv"))) for m in modes)]
        for case, of in found.items()
    )
    return markdown(["call", *modes], cells)


def _host(torch: Row | None, ours: Row | None) -> str:
    if torch is None or ours is None:
        return "not run"
    times = (number(r, "median_us") or 0.0 for r in (torch, ours))
    return "{:.1f} → {:.1f}".format(*times) + f" ({two_digits(number(ours, 'ratio'))})"


def maps_table(rows: list[Row]) -> str:
    """Microseconds of maps, reductions and norms beside torch's in its better layout, and shares of two
    limits: each tensor once at the rate of a large copy, and the tensors of each of our kernels once;
    beside them torch's copy of as many bytes, timed in the same way."""
    known = {
        head: [_least(r, f"{side}_us", f"{side}_other_us") for r in rows]
        for side, head in (("torch", "torch"), ("inductor", "torch.compile"))
    }
    others = {head: times for head, times in known.items() if any(times)}
    ours = [float(r["us"]) for r in rows]
    copied = any(r.get("copy_us") for r in rows)
    of_copies = geometric_mean(
        c / us for r, us in zip(rows, ours, strict=True) if (c := number(r, "copy_us"))
    )
    kernels = [float(r.get("kernels_us") or r["limit_us"]) / us for r, us in zip(rows, ours, strict=True)]
    cells = [
        [
            r["case"],
            r["us"],
            *(f"{times[i]:.4g}" if times[i] else "not run" for times in others.values()),
            r["limit_us"],
            r["of_limit"],
            f"{kernels[i]:.3f}",
            *([r.get("copy_us") or "not run"] * copied),
        ]
        for i, r in enumerate(rows)
    ]
    ratios = (
        geometric_mean(t / us for t, us in zip(times, ours, strict=True) if t) for times in others.values()
    )
    shares = geometric_mean(float(r["of_limit"]) for r in rows)
    cells.append(
        [
            "geometric mean of their ratios to ours, and of the shares",
            "",
            *map(two_digits, ratios),
            "",
            f"{shares:.3f}",
            f"{geometric_mean(kernels):.3f}",
            *([f"{of_copies:.3f}" if of_copies else ""] * copied),
        ]
    )
    return markdown(
        [
            "case",
            "us",
            *others,
            "limit",
            "of the limit",
            "of our kernels' limit",
            *(["a copy of as many bytes"] * copied),
        ],
        cells,
    )


def _least(row: Row, *columns: str) -> float | None:
    return min((t for c in columns if (t := number(row, c))), default=None)


def computations_table(rows: list[Row]) -> str:
    """Computations written as text: right or not, and microseconds beside torch and torch.compile."""
    cells = [
        [
            r["compute"],
            r["exact"],
            r["float"],
            r["us"],
            r["torch_us"] or "not run",
            r["inductor_us"] or "not run",
        ]
        for r in rows
    ]
    return markdown(
        ["computation", "exact data", "random data", "us", "torch us", "torch.compile us"], cells
    )


def dropin_table(rows: list[Row]) -> str:
    """Per file of tests of the drop-in: tests that passed, and the samples compared in them: right, of
    these outside torch's tolerances but within the bound of rounding, wrong, computed by torch."""
    columns = ("tests passed", "passed", "rounded", "failed", "fell_back")
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["group"].partition("::")[0], []).append(row)
    cells = [
        [name, *(str(sum(r.get(c, 0) for r in mine)) for c in columns)]
        for name, mine in (*found.items(), ("all", rows))
    ]
    return markdown(
        [
            "tests/",
            "tests passed",
            "samples right",
            "of these by the bound of rounding",
            "samples wrong",
            "samples computed by torch",
        ],
        cells,
    )


def samples_table(rows: list[Row]) -> str:
    """A line per function: torch's own samples that passed, of these with gradients, that torch computes,
    by reason, and that failed. A test without counts is one failure."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: ("of_operations" in r["test"], r["function"])):
        found.setdefault(row["function"], []).append(row)
    cells = []
    for name, mine in (*found.items(), ("all functions", rows)):
        reasons: Counter[str] = Counter()
        for reason, n in (each.rsplit("=", 1) for r in mine for each in r["reasons"].split("; ") if each):
            reasons[reason] += int(n)
        failed = sum(max(int(r["failed"] or 0), r["verdict"] != "right") for r in mine)
        counts = [
            str(sum(int(r.get(c) or 0) for r in mine))
            for c in ("samples", "passed", "gradients", "handed")
        ]
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
        cells.append([name, " ".join(sorted({r["dtype"] for r in mine})), *counts, why, str(failed)])
    return markdown(
        [
            "function",
            "types",
            "samples",
            "passed",
            "of these with gradients",
            "computed by torch",
            "why",
            "failed",
        ],
        cells,
    )


def fuzz_table(rows: list[Row]) -> str:
    """A line per run of the fuzzer: how many trials, and how they ended."""
    columns = ("asked", "computations", "programs", "kernels", *ENDS)
    cells = [
        [
            r["seed"],
            r["first"],
            "interpreters" if r["interpreted"] == "True" else "GPU",
            r["commit"] or "-",
            *(r.get(c) or "0" for c in columns),
        ]
        for r in rows
    ]
    sums = [str(sum(int(r.get(c) or 0) for r in rows)) for c in columns]
    return markdown(
        [
            "seed",
            "first trial",
            "on",
            "commit",
            "trials",
            "of computations",
            "of programs",
            "kernels",
            *ENDS.values(),
        ],
        [*cells, ["all", "", "", "", *sums]],
        keys=2,
        cuts=(8,),
    )


ENDS = {
    "passed": "right",
    "refused": "refused",
    "resources": "too large for the chip",
    "failed": "wrong",
    "crash": "crashed",
    "error": "not compiled",
    "timeout": "too slow",
}


def invariance_table(rows: list[Row]) -> str:
    """From ``invariance.csv``: a line for each direction of the layers and for each model, how many times
    as long invariant mode takes, with the list's batch and with one image."""
    layers = [r for r in rows if r["direction"] in DIRECTIONS]
    groups = [(f"layers, {prop}", [r for r in layers if r["direction"] == prop]) for prop in DIRECTIONS]
    models = [r for r in rows if r["direction"] not in DIRECTIONS]
    groups += [
        (name, [r for r in models if r["what"] == name]) for name in sorted({r["what"] for r in models})
    ]
    lines = []
    for name, here in groups:
        for one in (False, True):
            some = [r for r in here if (r["batch"] == "1") == one]
            ratios = [x for r in some if (x := number(r, "ratio"))]
            if ratios:
                of = str(max(int(r["batch"]) for r in some))
                mean, most = two_digits(geometric_mean(ratios)), two_digits(max(ratios))
                lines.append([name, of, str(len(ratios)), mean, most, ""])
            why = {r["refused"].partition("\n")[0][:100] for r in some if r["refused"]}
            lines += [[name, "", "", "", "", text] for text in sorted(why)]
    return markdown(["what", "samples", "rows", "invariant / usual time", "most", "refused"], lines)
