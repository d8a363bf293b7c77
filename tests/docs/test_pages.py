"""Pages of docs/: what they show is printed anew and compared, programs run, commands end well.

``pytest tests/docs/test_pages.py --update-golden`` rewrites what is shown. The walk through, the
computations, the functional and the drop-in page have tests of their own.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.shown import ROOT, Block, anew, blocks, commands
from transconv import config, ir, passes
from transconv.__main__ import main

DOCS = ROOT / "docs"
PAGES = (
    *(
        DOCS / f"{name}.md"
        for name in (
            "README",
            "models",
            "graphs",
            "kernels",
            "reading",
            "architecture",
            "four_stages",
            "generated_kernels",
            "glossary",
            "guide_source",
            "invariance",
            "quantized",
            "kernel_api",
            "kernel_masks",
            "kernel_functions",
            "onednn",
            "simplification",
            "streaming",
        )
    ),
    *sorted((DOCS / "how_to_add").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
)
BLOCKS = [(page, block) for page in PAGES for block in blocks(page.read_text("utf-8"))]
SHOWN = [(page, block) for page, block in BLOCKS if block.rule]
# Pages whose programs, which one process runs, are for `make check-all`.
LONG = ("graphs", "kernel_functions", "kernel_masks", "activation", "lowering", "pass")

PROGRAMS = [(page, b) for page, b in BLOCKS if b.kind == "python" and not b.rule]
COMMANDS = [(page, line) for page, b in BLOCKS if b.kind == "sh" and not b.rule for line in commands(b)]


def name(case: tuple[Path, object]) -> str:
    """Of a page and one of its blocks or lines."""
    what = case[1]
    line = (what.heads or what.body.splitlines())[0] if isinstance(what, Block) else str(what)
    return f"{case[0].stem}: {line.strip()[:60]}"


def marked(case: tuple[Path, Block]) -> Any:
    long = case[0].stem in LONG and "$ python " in case[1].body
    return pytest.param(case, marks=[pytest.mark.slow] * long)


@pytest.mark.parametrize("case", map(marked, SHOWN), ids=name)
def test_what_is_shown(case: tuple[Path, Block], request: pytest.FixtureRequest) -> None:
    path, block = case
    page = path.read_text("utf-8")
    now = anew(block, page)
    if request.config.getoption("--update-golden"):
        path.write_text(page.replace(block.whole, now), "utf-8")
        return
    assert now == block.whole, "the page is stale; --update-golden if that is meant"


@pytest.mark.every(3)
@pytest.mark.parametrize("case", PROGRAMS, ids=name)
def test_programs(case: tuple[Path, Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose first line names them are run by the blocks that show what they print."""
    path, block = case
    if head := re.match(r"# (\w+\.py)\n", block.body):
        assert f"$ python {head[1]}\n" in path.read_text("utf-8"), "nothing shows what it prints"
        return
    monkeypatch.chdir(tmp_path)
    with config.changed(invariant=False):  # one program's promise is not for those of other pages
        exec(compile(block.body, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.every(3)
@pytest.mark.parametrize("case", COMMANDS, ids=name)
def test_commands(
    case: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of transconv run here; recipes and commands of other programs exist."""
    line = case[1].partition("  #")[0].strip()
    if found := re.fullmatch(r'(?:export )?(\w+)=("?)(.*)\2', line):
        assert found[3]
        return
    words = shlex.split(re.sub(r"\$(\w+)", lambda m: variable(case[0], m[1]), line))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "transconv":
        assert main(words[1:]) == 0
        assert capsys.readouterr().out.strip()
    elif words[0] == "make":
        assert all(
            re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words[1:]
        )
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word.split("::")[0]).exists() for word in words[3:] if word[0] != "-")
    else:
        assert words == ["source", ".venv/bin/activate"], f"no test knows how to run: {line}"


def variable(page: Path, called: str) -> str:
    return dict(re.findall(r'^(\w+)="(.*)"$', page.read_text("utf-8"), re.MULTILINE))[called]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_files_of_a_page_exist(page: Path) -> None:
    paths = re.findall(r"`((?:transconv|tests|bench|docs)/[\w./]+)`", page.read_text("utf-8"))
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_there_are_examples() -> None:
    assert len(SHOWN) >= 40 and len(PROGRAMS) >= 5 and len(COMMANDS) >= 8


def test_the_table_of_the_four_stages_is_whole() -> None:
    """A row for each operation of the Gen IR, and every node that one names is a node."""
    table = (DOCS / "four_stages.md").read_text("utf-8").partition("## Every operation")[2]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert len({name for left, _ in rows for name in re.findall(r"`(\w+)`", left)}) == 27
    nodes = {name for _, right in rows for name in re.findall(r"`([A-Z][a-zA-Z]+)[`(]", right)}
    assert len(nodes) >= 8 and [n for n in nodes if not hasattr(ir, n)] == []


ONEDNN = """
inject_external_var_let merge_slm_buffers inject_prefetch_pipeline inject_slm_reorder inject_send
lift_buffer_offsets_in_send split_wide_stores lift_alloc lift_send_2d_header_store split_shuffle
fixup_if_conditions optimize_int64_exprs fix_int32_overflow optimize_alloc_let unroll_loops inject_dp4a
update_loops_for_unrolling optimize_barrier inject_bank_conflict_attribute verify_buffer_access
dpasw dpas GRF SLM send sub-group SIMD16 mad dp4a add3 sync.bar
""".split()


def test_the_page_about_onednn_names_every_pass_and_word() -> None:
    """Theirs, and ours: of each pass of ours there is what it corresponds to, or that nothing does."""
    page = (DOCS / "onednn.md").read_text("utf-8")
    assert [word for word in ONEDNN if not re.search(rf"\b{re.escape(word)}\b", page)] == []
    own = [s.name for s in passes.stages() if s.name not in ("problem", "compute", "schedule", "final")]
    assert [n for n in own if f"`{n}`" not in page and f"--stage {n}" not in page] == []
