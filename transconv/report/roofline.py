"""The estimate and measured times on a roofline of the chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10, prod

from markupsafe import Markup

from transconv.compute import Workload
from transconv.cost import estimate
from transconv.report import svg
from transconv.report.subject import LabeledTime, Subject
from transconv.target import Target

WIDTH, HEIGHT, LEFT, BELOW, RIGHT = 560.0, 300.0, 52.0, 40.0, 14.0


@dataclass(frozen=True)
class Roof:
    """Operations and bytes of a plan, and the chip's peak rates per second: operations of its type, bytes
    of memory."""

    operations: float
    bytes: float
    peak: float
    bandwidth: float

    @property
    def intensity(self) -> float:
        return self.operations / max(1.0, self.bytes)

    @property
    def floor_us(self) -> float:
        """The least time of a kernel that moves every tensor once and does all operations."""
        return max(self.operations / self.peak, self.bytes / self.bandwidth) * 1e6

    @property
    def bound(self) -> str:
        by_memory = self.bytes / self.bandwidth > self.operations / self.peak
        return "memory" if by_memory else "arithmetic"


def roof_of(subject: Subject) -> Roof:
    """By the data sheet: two operations for each product of a sum, one for each point elsewhere."""
    target, mains = subject.target, [c for c, _ in subject.mains]
    operations = sum((2 if c.factors else 1) * prod(x.size for x in c.axes) for c in mains)
    operations = max(1, operations)
    product = any(c.factors for c in mains)
    bits = max([c.a.tensor.dtype.bits for c in mains if c.reads], default=16)
    issue = target.rates.issue
    vector = 2e9 * target.sms * issue.cores * issue.clock
    peak = target.tflops * 1e12 * 16 / max(16, bits) if product else vector
    return Roof(operations, _moved(subject.workload), peak, target.bandwidth_gbs * 1e9)


def _moved(workload: Workload) -> float:
    return float(sum(prod(t.shape) * t.dtype.bytes for t in workload.tensors))


def estimated(subject: Subject) -> LabeledTime:
    """The estimates of all computations, one launch after another."""
    us = sum(estimate(s, c, subject.target) for c, s in subject.mains)
    return LabeledTime(
        "estimate of this schedule",
        us,
        True,
        True,
        "of each computation by itself" if len(subject.mains) > 1 else "",
    )


def draw(roof: Roof, times: Sequence[LabeledTime]) -> Markup:
    """Both ceilings on logarithmic scales, with a point for every time at the plan's intensity."""
    rates = [roof.operations / t.us / 1e6 for t in times]  # TFLOP/s
    ridge = roof.peak / roof.bandwidth
    x0, x1 = _around([roof.intensity, ridge], 8)
    y0, y1 = _around([*rates, roof.peak / 1e12], 2)
    y0 = min(y0, y1 / 100)

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = LEFT + (log10(intensity) - log10(x0)) / (log10(x1) - log10(x0)) * (WIDTH - LEFT - RIGHT)
        y = (log10(y1) - log10(max(rate, y0))) / (log10(y1) - log10(y0)) * (HEIGHT - BELOW - 10) + 10
        return round(x, 1), round(y, 1)

    start, knee = at(x0, x0 * roof.bandwidth / 1e12), at(ridge, roof.peak / 1e12)
    low = max(x0, y0 * 1e12 / roof.bandwidth)
    start = at(low, low * roof.bandwidth / 1e12)
    end = at(x1, roof.peak / 1e12)
    parts = [
        *_axes(x0, x1, y0, y1, at),
        svg.tag("path", d=f"M{start[0]} {start[1]}L{knee[0]} {knee[1]}L{end[0]} {end[1]}", class_="roof"),
        svg.text(end[0] - 4, end[1] - 5, f"{roof.peak / 1e12:.4g} TFLOP/s", "tick", "end"),
    ]
    top = at(roof.intensity, min(roof.peak, roof.intensity * roof.bandwidth) / 1e12)
    parts.append(svg.tag("path", d=f"M{top[0]} {top[1]}V{HEIGHT - BELOW}", class_="here"))
    for t, rate in zip(times, rates, strict=True):
        x, y = at(roof.intensity, rate)
        kind = "estimated" if t.from_estimate else "ours" if t.own else "theirs"
        parts.append(
            svg.tag(
                "circle",
                svg.tag("title", f"{t.name}: {t.us:.4g} us, {rate:.4g} TFLOP/s"),
                cx=x,
                cy=y,
                r=5,
                class_=f"point {kind}",
            )
        )
    words = f"Roofline: {roof.intensity:.3g} operations a byte, bound by {roof.bound}; " + "; ".join(
        f"{t.name} {r:.3g} TFLOP/s" for t, r in zip(times, rates, strict=True)
    )
    return svg.drawing(WIDTH, HEIGHT, words, *parts, kind="roofline")


def _around(values: Sequence[float], factor: float) -> tuple[float, float]:
    found = [v for v in values if v > 0]
    return min(found) / factor, max(found) * factor


def _axes(x0: float, x1: float, y0: float, y1: float, at: object) -> list[Markup]:
    assert callable(at)
    made = []
    for x in _decades(x0, x1):
        px, _ = at(x, y0)
        made += [
            svg.tag("path", d=f"M{px} 10V{HEIGHT - BELOW}", class_="mesh"),
            svg.text(px, HEIGHT - BELOW + 14, f"{x:g}", "tick", "middle"),
        ]
    for y in _decades(y0, y1):
        _, py = at(x0, y)
        made += [
            svg.tag("path", d=f"M{LEFT} {py}H{WIDTH - RIGHT}", class_="mesh"),
            svg.text(LEFT - 5, py + 3, f"{y:g}", "tick", "end"),
        ]
    middle = (HEIGHT - BELOW) / 2
    return [
        *made,
        svg.text((LEFT + WIDTH) / 2, HEIGHT - 6, "operations a byte", "axis", "middle"),
        svg.tag(
            "text",
            "TFLOP/s",
            x=12,
            y=middle,
            class_="axis",
            text_anchor="middle",
            transform=f"rotate(-90 12 {middle:g})",
        ),
    ]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(-6, 9) if low <= 10.0**n <= high]


@dataclass(frozen=True)
class Bar:
    """A time beside the others: its share of the longest in percent, and how many times as long as ours
    it takes."""

    timed: LabeledTime
    share: float
    ratio: float | None
    kind: str


def bars(roof: Roof, times: Sequence[LabeledTime]) -> list[Bar]:
    """The times, the floor first."""
    every = [LabeledTime("floor: each tensor once, all operations", roof.floor_us, False, True), *times]
    longest = max(t.us for t in every)
    own = next((t.us for t in times if t.own and not t.from_estimate), None)
    return [
        Bar(
            t,
            max(0.4, 100 * t.us / longest),
            t.us / own if own else None,
            "floor" if i == 0 else "estimated" if t.from_estimate else "ours" if t.own else "theirs",
        )
        for i, t in enumerate(every)
    ]


def chip(target: Target) -> str:
    return (
        f"{target}: {target.sms} multiprocessors, {target.tflops:g} TFLOP/s of 16-bit products, "
        f"{target.bandwidth_gbs:g} GB/s, {target.shared_bytes} bytes of shared memory a program "
        "(data sheet)"
    )
