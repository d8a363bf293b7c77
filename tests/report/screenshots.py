"""The pictures of docs/report.md, made anew: ``python -m tests.report.screenshots [FOLDER]``."""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.report.browser import browser, resize, why_not
from transconv.__main__ import main

STRIDED = ("mb32ic64ih56oc128oh28kh3sh2ph1", "dt=bf16", "tag=nhwc")
MEASURED = "bench/results/h200_layers_bf16_nhwc.csv"
COLOURS, LARGEST = 255, 200_000  # bytes of a picture


@dataclass(frozen=True)
class Shot:
    """A page and the pieces of it that the picture shows one above the other: from an element to the next,
    each at most so high."""

    name: str
    words: tuple[str, ...]
    pieces: tuple[tuple[str, str, int], ...]
    width: int = 1180
    dark: bool = False


SHOTS = (
    Shot(
        "roles",
        (*STRIDED, "--target", "sm_90", "--prop", "fwd", "--no-compile"),
        (("s1-1-views", "s1-1-schedule", 900), ("s1-1-grid", "s1-1-stages", 1200)),
    ),
    Shot(
        "phases",
        (*STRIDED, "--target", "sm_90", "--prop", "bwd_d", "--no-compile"),
        (("s1-1-views", "s1-1-schedule", 1344),),
    ),
    Shot(
        "depthwise",
        (
            "g96mb32ic96ih28oc96oh28kh3ph1",
            "dt=bf16",
            "tag=nhwc",
            "--target",
            "sm_90",
            "--prop",
            "fwd",
            "--no-compile",
        ),
        (("content", "s1-1-grid", 1300),),
        dark=True,
    ),
    Shot(
        "split",
        (
            "mb128ic256ih14oc256oh14kh3ph1",
            "dt=bf16",
            "tag=nhwc",
            "--target",
            "sm_90",
            "--prop",
            "bwd_w",
            "--no-compile",
            "--times",
            MEASURED,
        ),
        (("s1-1-views", "s1-1-schedule", 672), ("s1-1-grid", "s1-1-stages", 850), ("s1-1-time", "", 480)),
    ),
    Shot(
        "gfx942",
        (*STRIDED, "--target", "gfx942", "--prop", "fwd"),
        (("s1-1-stages", "s1-1-code", 760), ("s1-1-code", "s1-1-time", 800)),
    ),
)
# Of a stage and of machine code something is to be seen.
OPEN = """
const stage = [...document.querySelectorAll('.stage')].find(
    s => s.querySelector('b').textContent === 'lanewise');
if (stage && arguments[0]) { stage.open = true; stage.querySelector('pre').style.maxHeight = '22rem'; }
for (const first of document.querySelectorAll('.cols pre')) {
    const line = first.querySelector('.matrix');
    if (line) { first.scrollTop = line.offsetTop - first.offsetTop - 90; }
}"""
BETWEEN = """
const top = document.getElementById(arguments[0]).getBoundingClientRect().top + scrollY - 6;
const next = arguments[1] && document.getElementById(arguments[1]);
const end = next ? next.getBoundingClientRect().top + scrollY : document.querySelector('footer').offsetTop;
return [top, end - top - 14];"""


def shoot(driver: Any, shot: Shot, page: Path, to: Path) -> None:
    from PIL import Image

    resize(driver, shot.width, 900, shot.dark)
    driver.get(page.as_uri())
    driver.execute_script(OPEN, shot.name == "gfx942")
    made = []
    for begin, end, most in shot.pieces:
        top, height = driver.execute_script(BETWEEN, begin, end)
        clip = {"x": 0, "y": top, "width": shot.width, "height": min(most, height), "scale": 1}
        found = driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        made.append(Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB"))
    whole = Image.new("RGB", (shot.width, sum(i.height for i in made)), made[0].getpixel((2, 2)))
    at = 0
    for image in made:
        whole.paste(image, (0, at))
        at += image.height
    path = to / f"report_{shot.name}.png"
    few = whole.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {whole.width} x {whole.height}, {size} bytes")
    assert size < LARGEST, f"{path} is larger than {LARGEST} bytes"


def run(to: Path) -> int:
    if reason := why_not():
        print(f"no pictures: {reason}", file=sys.stderr)
        return 2
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="transconv-report-") as folder, browser() as driver:
        for shot in SHOTS:
            page = Path(folder) / f"{shot.name}.html"
            if code := main(["report", *shot.words, "-o", str(page)]):
                return code
            shoot(driver, shot, page, to)
    return 0


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description="photograph the reports")
    asked.add_argument("folder", nargs="?", type=Path, default=Path("docs/images"))
    sys.exit(run(asked.parse_args().folder))
