"""docs/functional.md: every program runs, and the gallery is what the library writes.

``python -m tests.functional.test_docs`` writes the gallery anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transconv
from transconv import functional
from transconv.compute import library, parse
from transconv.ir import bf16, f32, i64

PAGE = Path(__file__).parents[2] / "docs" / "functional.md"
HEAD = "## Gallery\n"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def gallery() -> str:
    """Each function's text and those of its gradients, for one shape."""
    x, w, image = (library.Strided.dense(s, bf16) for s in ((64, 768), (768,), (8, 64, 32, 32)))
    last = library.Strided((8, 64, 32, 32), (65536, 1, 2048, 64), bf16)
    v, half = (library.Strided.dense(s, bf16) for s in ((64,), (8, 64, 16, 16)))
    stats = library.Strided.dense((64,), f32)
    t, wide = library.Strided.dense((64,), i64), library.Strided.dense((256, 768), bf16)
    shown = {
        "softmax": library.softmax(x, 1), "log_softmax": library.log_softmax(x, 1),
        "normalize": library.normalize(x, [1]), "cross_entropy": library.cross_entropy(x, t, 1),
        "layer_norm": library.layer_norm(x, 1, w, w, saves=True),
        "rms_norm": library.rms_norm(x, 1, w, saves=True),
        "group_norm": library.group_norm(last, 32, v, v, saves=True),
        "batch_norm": library.batch_norm(last, stats, stats, v, v, saves=True),
        **{name: library.reduced(name, x, [1])
           for name in ("sum", "mean", "prod", "amax", "logsumexp", "var")},
        "norm": library.reduced("norm", x, [1]), "any": library.reduced("any", x, [1]),
        "max_pool": library.max_pool(image, (3, 3), (2, 2), (1, 1), (1, 1), half, True),
        "average_pool": library.average_pool(image, (2, 2), (2, 2), (0, 0), half),
        "linear": library.linear(x, wide, library.Strided.dense((256,), bf16), "gelu")}
    texts = {name: "\n\n".join([f.text, *(g.text for g in f.gradients)]) for name, f in shown.items()}
    return "\n".join(f"### {name}\n\n```text\n{text}\n```\n" for name, text in texts.items())


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs(program: str) -> None:
    exec(compile(program, "docs/functional.md", "exec"), {"__name__": "__main__"})


def test_the_gallery_is_what_the_library_writes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(HEAD) + len(HEAD):].strip() == gallery().strip()
    for body in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for made in body.strip().split("\n\n"):
            assert parse(made).writes
            assert len([s for s in made.splitlines() if s.split()[0] in ("read", "let", "store")]) <= 14


def test_every_function_stands_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in functional.__all__ if name not in text] == []
    assert transconv.functional is functional


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(f"{before[:before.index(HEAD) + len(HEAD)]}\n{gallery()}", encoding="utf-8")
