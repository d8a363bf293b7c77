"""The architecture: layers of packages, words that must not occur, sizes of files, costs of imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.metrics import FIGURES, Figure, limit_of, limits
from tests.house.source import PACKAGE, ROOT, imports, relative, sources, statements, tree_of
from tests.house.source import room_of as layer_of

# The packages, lowest first; a module may import its own package and those of earlier lines. Packages of
# one line do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("support",),
    ("errors", "ir"),
    ("simplify", "target"),
    ("compute",),
    ("schedule",),
    ("cost",),
    ("passes",),
    ("backend_triton",),
    ("selection",),
    ("runtime",),
    ("conv", "report"),
    ("verify",),
    ("calls",),
    ("torch_ops", "tuning"),
    ("nn", "functional", "quantized", "kernel"),
    ("graph", "distributed"),
    ("integrations",),
    ("cli",),
    ("__main__", "__init__"),
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
HEAVY = ("torch", "triton", "sympy")
# Files below torch_ops that may import torch or triton, inside functions.
LATE = (
    "target/records.py",
    "runtime/operands.py",
    "runtime/first_run_check.py",
    "compute/sampled_points.py",
    "conv/spotcheck.py",
    "conv/compensation.py",
    "backend_triton/launch/jit_module.py",
    "backend_triton/launch/triton_kernel.py",
    "backend_triton/launch/bound_start.py",
    "backend_triton/offline_child.py",
    "backend_triton/machine_code.py",
    "backend_triton/machine_code.py",
    "backend_triton/launch/interpreter.py",
    "backend_triton/launch/compile_records.py",
)
# Files above the compiler that import torch at the top, because they are about tensors.
TENSORS = (
    "verify/data.py",
    "verify/judgement.py",
    "verify/machine.py",
    "verify/case.py",
    "verify/computation.py",
    "verify/network_blocks.py",
    "verify/invariance/drawn_batches.py",
    "runtime/timing.py",
)
SOURCES = sources()


def test_every_file_is_in_a_layer() -> None:
    assert not [relative(p) for p in SOURCES if layer_of(p) not in RANK], "add it to LAYERS"


def test_layers() -> None:
    """No module imports one of a layer above, nor of another package of its layer."""
    found = [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        for name, _ in imports(path)
        if name.startswith("transconv.")
        and name.split(".")[1] != layer_of(path)
        and RANK.get(name.split(".")[1], 99) >= RANK[layer_of(path)]
    ]
    assert not found


# Importing these packages would import torch: their modules are imported by their own names.
OPEN_ROOMS = ("calls", "torch_ops", "functional", "graph", "distributed", "verify", "tuning", "cli")


def test_packages_import_what_others_export() -> None:
    """From another package a module imports what its ``__init__`` exports, and modules by their names, not
    from the files inside."""
    found = [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        if path != PACKAGE / "__init__.py"
        for name, _ in imports(path)
        if name.startswith("transconv.")
        and name.count(".") > 1
        and name.split(".")[1] not in (layer_of(path), *OPEN_ROOMS)
        and not (PACKAGE.parent / name.replace(".", "/")).is_dir()
    ]
    assert not found


def test_every_package_says_what_it_is_for() -> None:
    for door in PACKAGE.glob("*/__init__.py"):
        said = (ast.get_docstring(tree_of(door)) or "").split("\n\n")
        assert len(said) == 2 and said[1].startswith("In:") and "Out:" in said[1], relative(door)
        assert "Knows:" in said[1], relative(door)


def test_heavy_imports() -> None:
    """sympy is imported by the file that reads torch's symbolic sizes, which are sympy's, and by the
    simplifier, inside functions: a process that finds its kernels on the disk needs none. torch and triton
    are imported by the packages from verify on, below them only by files of a list, and inside
    functions."""
    for path in SOURCES:
        for name, early in imports(path):
            if name.split(".")[0] == "sympy":
                assert relative(path) == "graph/symbols.py" or layer_of(path) == "simplify", relative(path)
                assert relative(path) == "graph/symbols.py" or not early, relative(path)
            if name.split(".")[0] in ("torch", "triton") and not (
                layer_of(path)
                in (
                    "calls",
                    "torch_ops",
                    "nn",
                    "functional",
                    "quantized",
                    "graph",
                    "distributed",
                    "integrations",
                    "kernel",
                )
                or relative(path) in TENSORS
            ):
                above = RANK[layer_of(path)] >= RANK["verify"]
                assert above or relative(path) in LATE or not runs(path, name), (
                    f"{relative(path)} imports {name}"
                )
                assert not early, f"{relative(path)} imports {name} before it is needed"


def runs(path: Path, name: str) -> bool:
    """Whether an import happens at all: not when it only serves annotations."""
    tree = ast.parse(path.read_text())
    for at in ast.walk(tree):
        if isinstance(at, ast.If) and "TYPE_CHECKING" in ast.unparse(at.test):
            at.body = [ast.Pass()]
    return any(
        re.search(rf"\b(from|import) {re.escape(name)}\b", ast.unparse(at))
        for at in ast.walk(tree)
        if isinstance(at, (ast.Import, ast.ImportFrom))
    )


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("backend_triton/emitters/*.py")), ids=relative)
def test_emitters_see_the_ir_and_its_simplifier(path: Path) -> None:
    seen = {name for name, _ in imports(path) if name.startswith("transconv.")}
    assert all(re.match(r"transconv\.(ir|simplify|backend_triton)\b", name) for name in seen), seen


@pytest.mark.parametrize("room", ["selection", "runtime"])
def test_choices_and_plans_are_about_any_workload(room: str) -> None:
    """A convolution is a front end above the rooms that choose schedules and make plans."""
    found = [
        f"{relative(path)}:{n}: {line.strip()}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"transconv[./]conv\b|\bConv[A-Z]\w*|\bProp\b|\bEpilogue\b", line)
    ]
    assert not found, "\n".join(found)


FORMS = ("merged", "over_copies", "copies", "workspaces")


def test_what_a_schedule_makes_of_a_computation_is_derived_in_one_place() -> None:
    """All other files ask ``Scheduled`` for the computation with merged groups, or over copies."""
    found = [
        f"{relative(path)}: {alias.name}"
        for path in SOURCES
        for at in statements(path)
        if isinstance(at, ast.ImportFrom) and str(at.module).startswith("transconv.schedule")
        for alias in at.names
        if alias.name in FORMS and relative(path) != "schedule/tiles/copy_kernels.py"
    ]
    assert not found, "\n".join(found)


def test_stages_are_named_in_one_tuple() -> None:
    """STAGES has all stages from the problem to the text; a stage that is no pass is imported as its row,
    not compared by name."""
    from transconv.passes import STAGES, Form, Pass

    given = {""}
    for stage in STAGES:
        assert stage.takes in given, f"{stage.name} takes a {stage.takes}, which no stage before it gives"
        given.add(stage.gives)
    assert [s.name for s in STAGES] == list(dict.fromkeys(s.name for s in STAGES))
    plain = "|".join(s.name for s in STAGES if not isinstance(s, (Form, Pass)))
    literal = re.compile(rf"(stage|shown|wanted|name)\w* (==|in) \(?[\"']({plain})[\"']")
    found = [
        f"{relative(path)}:{n}: {line.strip()}"
        for path in SOURCES
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if literal.search(line)
    ]
    assert not found, "\n".join(found)


# The words of the convolution front end, whole or as a part of a name; not torch's names of orders.
FRONT_END = re.compile(
    r"(?<![a-z])(conv|pixels?|taps?|channels?(?!_last|_first)|src|wei|dst|(?-i:mb)|fwd|bwd)"
    r"(?![a-z])",
    re.IGNORECASE,
)  # MB is a million bytes
NEUTRAL = (
    "ir",
    "simplify",
    "passes",
    "backend_triton",
    "schedule",
    "cost",
    "compute",
    "selection",
    "target",
    "support",
    "runtime",
    "report",
    "tuning",
    "kernel",
    "calls",
)


@pytest.mark.parametrize("room", NEUTRAL)
def test_the_compiler_does_not_speak_of_convolutions(room: str) -> None:
    """What is computed is decided by a front end; a computation is axes with roles and views."""
    files = [p for p in SOURCES if layer_of(p) == room]
    assert files
    found = [
        f"{relative(path)}:{n}: {line.strip()}"
        for path in files
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if FRONT_END.search(line)
    ]
    assert not found, "\n".join(found)


SPELLING = re.compile(r"\.name *(==|!=|in |not in )|\.name\.\w+\(|\.name\[")
# Places that mean the name itself, and why.
MEANT = (
    (r"\bx\.name in seen\b", "a schedule names the axes that it tiles"),
    (r"\bx\.name not in kept\b", "a statistic names the axes that it keeps"),
    (r"\bwindow\[-2\]\.name not in written\b", "a schedule names the axes that it writes out"),
    (r"\bf\.name not in \(", "the words of a schedule"),
    (r"\bx\.name not in compute\.reduced\b", "a computation names the axes that it reduces"),
    (r"\b(parts|c)\.name not in (spaces|around)\b", "the workspaces and copies of one plan, each once"),
    (r"\b(step\.name in names|p\.name (==|!=) \w+)", "passes are registered by their names"),
    (r"\b(place|path)\.name\b", "the name of a file"),
    (r"\bv\.name not in given\b", "arguments keep their names where others are renamed"),
    (r"\b(w|word)\.name (==|!=|in|not in) ", "the words of a schedule are read by their names"),
)


def test_no_pass_reads_a_name() -> None:
    """What a later stage needs to know about a value is a field of it, not how it is spelled."""
    found = [
        f"{relative(path)}:{n}: {line.strip()}"
        for folder in ("passes", "backend_triton", "schedule", "cost", "selection", "runtime")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.parent.name != "standalone"  # files for people, who know tensors by their names
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if SPELLING.search(line) and not any(re.search(known, line) for known, _ in MEANT)
    ]
    assert not found, "\n".join(found)


def test_names_of_files_say_what_is_in_them() -> None:
    vague = {"utils", "util", "helpers", "common", "base", "misc", "tools", "core", "manager"}
    everywhere = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    assert not [p for p in everywhere if p.stem in vague]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_figures_do_not_grow(figure: Figure) -> None:
    """What is counted is at most its limit; of a list, no member is new and none that is gone is still
    allowed. ``python -m tests.house.metrics --lower`` lowers limits."""
    allowed = limits()[figure.name]
    if figure.members is not None:
        assert isinstance(allowed, list)
        assert not set(figure.members) - set(allowed), "write it so that it needs no exception"
        assert not set(allowed) - set(figure.members), "gone: lower the limits"
    assert figure.value <= limit_of(figure)


def test_the_root_has_few_files() -> None:
    assert len([p for p in SOURCES if p.parent == PACKAGE]) <= 9


def test_only_knobs_reads_the_environment() -> None:
    readers = [
        relative(p)
        for p in SOURCES
        if re.search(r"\b(environ|getenv)\b", p.read_text()) and p.name != "knobs.py"
    ]
    assert not readers


def test_every_module_says_its_place() -> None:
    silent = [relative(p) for p in SOURCES if not ast.get_docstring(tree_of(p))]
    assert not silent


# What says where a thing stands, or that it is one, before it is said what it is.
FILLING = re.compile(
    r"(This|Also|Beside|Stage \d+|A (module|file|class|function) (that|which|for)|"
    r"Helpers?|Utilit(y|ies)|Various|Contains|Provides)\b"
)


def test_docstrings_of_modules_begin_with_the_thing() -> None:
    found = [relative(p) for p in SOURCES if FILLING.match(ast.get_docstring(tree_of(p)) or "")]
    assert not found
    assert FILLING.match("Stage 3. Tiles") and not FILLING.match("Stages of a pipeline")


def alone(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_cheap() -> None:
    code = f"import sys, transconv; print([m for m in {HEAVY} if m in sys.modules])"
    assert alone(code) == "[]"


def test_everything_up_to_the_text_works_without_torch_and_triton() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from transconv.conv import compiler
from transconv.conv import ConvProblem, Prop
from transconv.target import TARGETS
p = ConvProblem.parse("mb2ic16ih14oc32oh7kh3sh2ph1 dt=bf16 tag=nhwc")
for prop in Prop:
    made = compiler.build(p, prop, TARGETS["sm_90"])
    print(made.source.count("tl.dot"))
"""
    assert [int(n) for n in alone(code).split()] == [1, 4, 1]
