"""docs/functional.md: every program runs. docs/functional_texts.md is what the library writes.

``python -m tests.functional.test_docs`` writes it anew.
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
TEXTS = PAGE.with_name("functional_texts.md")
FIRST = "## softmax\n"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def texts() -> str:
    """Each function's text and those of its gradients, for one shape."""
    x, w, image = (library.Strided.dense(s, bf16) for s in ((64, 768), (768,), (8, 64, 32, 32)))
    last = library.Strided((8, 64, 32, 32), (65536, 1, 2048, 64), bf16)
    v, half = (library.Strided.dense(s, bf16) for s in ((64,), (8, 64, 16, 16)))
    stats = library.Strided.dense((64,), f32)
    t, wide = library.Strided.dense((64,), i64), library.Strided.dense((256, 768), bf16)
    taken = [library.Strided.dense(n, bf16) for n in ((2, 64, 100), (64, 4), (64,), (2, 64, 3))] + [None]
    whole = library.FeatureParts("silu", (64,), ("",), 1, 1e-6)
    parts = library.FeatureParts("", (16, 48), ("", ""), 1, 1e-6)
    split = [library.Strided.dense((2, n, 100), bf16) for n in parts.counts]
    heads, two = library.FeatureParts("", (64,), ("l2",), 16, 1e-6), library.Strided.dense((64, 2), bf16)
    shown = {
        "softmax": library.softmax(x, 1),
        "log_softmax": library.log_softmax(x, 1),
        "normalize": library.normalize(x, [1]),
        "cross_entropy": library.cross_entropy(x, t, 1),
        "layer_norm": library.layer_norm(x, 1, w, w, saves=True),
        "rms_norm": library.rms_norm(x, 1, w, saves=True),
        "group_norm": library.group_norm(last, 32, v, v, saves=True),
        "batch_norm": library.batch_norm(last, stats, stats, v, v, saves=True),
        **{
            name: library.reduced(name, x, [1])
            for name in ("sum", "mean", "prod", "amax", "logsumexp", "var")
        },
        "norm": library.reduced("norm", x, [1]),
        "any": library.reduced("any", x, [1]),
        "max_pool": library.max_pool(image, (3, 3), (2, 2), (1, 1), (1, 1), half, True),
        "average_pool": library.average_pool(image, (2, 2), (2, 2), (0, 0), half),
        "argmax": library.extreme("argmax", x, [1], library.Strided.dense((64,), i64)),
        "max": library.extreme("argmax", x, [1], library.Strided.dense((64,), i64), y=v),
        "pad": library.pad(image, library.Strided.dense((8, 64, 34, 36), bf16), (0, 0, 1, 2), "circular"),
        "flip": library.flip(image, image, (2, 3)),
        "nearest": library.nearest(half, image, (None, None)),
        "shuffle": library.shuffle(image, library.Strided.dense((8, 16, 64, 64), bf16), 2),
        "join": library.join([half, half], library.Strided.dense((8, 128, 16, 16), bf16), 1),
        "gather": library.gather(
            x, library.Strided.dense((64, 9), i64), library.Strided.dense((64, 9), bf16), 1
        ),
        "embedding": library.embedding(t, wide, library.Strided.dense((64, 768), bf16), 0),
        "unfold": library.unfold(
            image, library.Strided.dense((8, 576, 1024), bf16), (3, 3), (1, 1), (1, 1), (1, 1)
        ),
        "fold": library.fold(
            library.Strided.dense((8, 576, 1024), bf16), image, (3, 3), (1, 1), (1, 1), (1, 1)
        ),
        "adaptive_average_pool": library.adaptive_average_pool(
            image, 2, library.Strided.dense((8, 64, 7, 7), bf16)
        ),
        "linear": library.linear(x, wide, library.Strided.dense((256,), bf16), "gelu"),
        "causal_window": library.causal_window(*taken[:5], [taken[0]], whole),
        "causal_window in parts": library.causal_window(*taken[:3], None, None, split, parts),
        "causal_window with norms": library.causal_window(
            taken[0], two, None, None, None, [taken[0]], heads
        ),
        "causal_step": library.causal_step(
            taken[0], taken[3], *taken[1:3], None, None, [taken[0]], taken[3], whole
        ),
    }
    written = {name: "\n\n".join([f.text, *(g.text for g in f.gradients)]) for name, f in shown.items()}
    return "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in written.items())


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs(program: str) -> None:
    exec(compile(program, "docs/functional.md", "exec"), {"__name__": "__main__"})


def test_the_texts_are_what_the_library_writes() -> None:
    text = TEXTS.read_text(encoding="utf-8")
    assert text[text.index(FIRST) :].strip() == texts().strip()
    for body in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for made in body.strip().split("\n\n"):
            assert parse(made).writes
            assert len([s for s in made.splitlines() if s.split()[0] in ("read", "let", "store")]) <= 14


def test_every_function_stands_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in functional.__all__ if name not in text] == []
    assert transconv.functional is functional


if __name__ == "__main__":
    before = TEXTS.read_text(encoding="utf-8")
    TEXTS.write_text(before.partition(FIRST)[0] + texts(), encoding="utf-8")
