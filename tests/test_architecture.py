"""The house keeps its plan: layers, words that must not occur, sizes, and what importing costs."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transconv"

# Lowest first; a module may import its own layer and those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "knobs", "keep", "drawer"),
    ("ir",),
    ("simplify",),
    ("problem", "problem_lists", "layers", "descriptor", "tags", "element_types",
     "target"),
    ("algorithm", "algorithm_text", "epilogue"),
    ("merging", "boxes", "box_rules", "piles", "packing", "config", "counts", "legality",
     "legality_boxes", "strides", "issue", "work", "cost", "tiling", "explicit", "sliding",
     "elementwise", "heuristics"),
    ("passes",),
    ("backend_triton",),
    ("sampling", "spotcheck", "verdicts"),
    ("database",),
    ("pipeline", "allocator", "plans", "steps", "compiler"),
    ("trust",),
    ("proving", "matrix"),
    ("tuning",),
    ("torch_ops", "cli", "nn", "__main__", "__init__"),
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
HEAVY = ("torch", "triton", "sympy")
# Files below the torch border that may import torch or triton, inside of functions.
LATE = ("target.py", "plans.py", "allocator.py", "sampling.py", "spotcheck.py", "trust.py", "tune.py",
        "backend_triton/module.py", "backend_triton/launch.py", "backend_triton/descriptors.py",
        "backend_triton/offline_child.py", "backend_triton/resources.py", "backend_triton/interpreter.py")
# Files above the compiler that are about tensors from their first line on.
TENSORS = ("proving/data.py", "proving/oracle.py", "proving/case.py",
           "tuning/timing.py")
SOURCES = sorted(p for p in PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether it is imported when the file is (not in a function, not
    for types alone)."""
    def visit(at: ast.AST, early: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(at):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, False)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from visit(child, False)
            elif isinstance(child, ast.Import):
                yield from ((a.name, early) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{relative(path)}: a relative import"
                assert child.module is not None
                whole = child.module == "transconv"
                yield from ((f"transconv.{a.name}" if whole else child.module, early)
                            for a in child.names)
            else:
                yield from visit(child, early)
    yield from visit(ast.parse(path.read_text()), True)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_layers(path: Path) -> None:
    own = layer_of(path)
    assert own in RANK, f"{relative(path)} is in no layer; add it to LAYERS"
    for name, _ in imports(path):
        if name.startswith("transconv.") and name != "transconv.__version__":
            other = name.split(".")[1]
            assert RANK.get(other, 99) <= RANK[own], f"{relative(path)} imports {name} from above"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_imports(path: Path) -> None:
    """sympy in one file; torch and triton at the border, and below it only when they are needed."""
    border = RANK[layer_of(path)] >= RANK["proving"]
    for name, early in imports(path):
        root = name.split(".")[0]
        if root == "sympy":
            assert relative(path) == "simplify/linear.py" and not early
        if root in ("torch", "triton") and not (
                layer_of(path) in ("torch_ops", "nn") or relative(path) in TENSORS):
            assert border or relative(path) in LATE or not runs(path, name), (
                f"{relative(path)} imports {name}")
            assert not early, f"{relative(path)} imports {name} before it is needed"


def runs(path: Path, name: str) -> bool:
    """Whether an import happens at all: not when it only serves annotations."""
    tree = ast.parse(path.read_text())
    for at in ast.walk(tree):
        if isinstance(at, ast.If) and "TYPE_CHECKING" in ast.unparse(at.test):
            at.body = [ast.Pass()]
    return any(name in ast.unparse(at) for at in ast.walk(tree)
               if isinstance(at, (ast.Import, ast.ImportFrom)))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("backend_triton/emit_*.py")), ids=relative)
def test_emitters_see_the_ir_alone(path: Path) -> None:
    seen = {name for name, _ in imports(path) if name.startswith("transconv.")}
    assert all(re.match(r"transconv\.(ir|backend_triton)\b", name) for name in seen), seen


def test_no_pass_knows_the_direction() -> None:
    """What is computed from what is decided in algorithm.py, and by nobody after it."""
    found = [f"{relative(path)}:{n}: {line.strip()}"
             for folder in ("passes", "simplify", "backend_triton")
             for path in sorted((PACKAGE / folder).rglob("*.py"))
             for n, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"(?<![a-z])(fwd|bwd|prop)(?![a-z])", line, re.IGNORECASE)]
    assert not found, "\n".join(found)


def test_names_of_files_say_what_is_in_them() -> None:
    vague = {"utils", "util", "helpers", "common", "base", "misc", "tools", "core", "manager"}
    everywhere = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    assert not [p for p in everywhere if p.stem in vague]


def test_sizes_of_files() -> None:
    lines = {relative(p): len(p.read_text().splitlines()) for p in SOURCES}
    assert not {name: n for name, n in lines.items() if n > 500}
    assert statistics.median(n for name, n in lines.items() if n > 1) < 250


def test_only_knobs_reads_the_environment() -> None:
    readers = [relative(p) for p in SOURCES
               if re.search(r"\b(environ|getenv)\b", p.read_text()) and p.name != "knobs.py"]
    assert not readers


def test_every_module_says_its_place() -> None:
    silent = [relative(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def alone(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_cheap() -> None:
    code = f"import sys, transconv; print([m for m in {HEAVY} if m in sys.modules])"
    assert alone(code) == "[]"


def test_everything_up_to_the_text_works_without_torch_and_triton() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from transconv import compiler
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS
p = ConvProblem.parse("mb2ic16ih14oc32oh7kh3sh2ph1 dt=bf16 tag=nhwc")
for prop in Prop:
    made = compiler.build(p, prop, TARGETS["sm_90"])
    print(made.source.count("tl.dot"))
"""
    assert [int(n) for n in alone(code).split()] == [1, 4, 1]
