"""A folder that Hugging Face's `kernels` loads: computations as a package of Triton kernels for any size.

    NAME/build.toml, flake.nix, CARD.md     for kernel-builder, which builds the variants anew
    NAME/torch-ext/NAME/...                 the package: torch and triton are all it imports
    NAME/build/torch-cuda/...               the same beside metadata.json, with a digest of each file
    NAME/build/torch-rocm/..., torch-cpu    likewise; torch-cpu runs in Triton's interpreter alone
    NAME/benchmarks/benchmark_OPERATION.py  for `kernels benchmark`
    NAME/compiled.csv                       each kernel as compiled for each chip, without a GPU
    NAME/signature.py                       compares digests, and signs

The layout is that of https://huggingface.co/docs/kernels (kernel requirements, build variants).
Operations with a signature of torch's are files of transconv/data/operations: NAME.txt has the
computations, NAME.py.jinja the functions and layers. Any other text becomes a function of the tensors that
it reads.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transconv.backend_triton import Answer, CompileFailure, CompileJob, Resources, compile_offline
from transconv.ir import DType
from transconv.runtime.standalone.python_file import joined, templates
from transconv.runtime.standalone.sized_launchers import (
    PlannedText,
    Planning,
    launcher_lines,
    read_texts,
    text_record,
)
from transconv.runtime.steps import job_of
from transconv.support import ProblemError, Unsupported, __version__
from transconv.target import TARGETS, Target

OPERATIONS = Path(__file__).parents[2] / "data" / "operations"
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")  # of the loader
TAKEN = ("layers", "_kernels", "_launchers", "_operators", "_ops")
LICENSE = "Apache-2.0"
KERNEL_VERSION = 1
CHIPS = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,gfx90a,gfx942,gfx1100"
"""The chips of a folder by default."""
MOST_SPILLED = 256  # bytes of a thread's registers in memory
ROUNDS = 8  # of other schedules for kernels with more


@dataclass(frozen=True)
class ExportedModule:
    """A module of the package. ``source``, ``benchmark``: their texts."""

    module: str
    texts: tuple[PlannedText, ...]
    source: str
    benchmark: str

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(
            x.name
            for x in ast.parse(self.source).body
            if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")
        )

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(x.name for x in ast.parse(self.source).body if isinstance(x, ast.ClassDef))


def operation_names() -> tuple[str, ...]:
    """The operations that have functions and layers with torch's signatures."""
    return tuple(sorted(p.stem for p in OPERATIONS.glob("*.txt")))


def read_operation(word: str, planning: Planning) -> list[ExportedModule]:
    """The modules of an operation, or of a file of texts. Raises ProblemError for a word that is
    neither."""
    known = OPERATIONS / f"{word}.txt"
    if word in operation_names():
        texts = tuple(read_texts(known.read_text(encoding="utf-8"), planning))
        source, benchmark = (
            (OPERATIONS / f"{word}{end}.py.jinja").read_text(encoding="utf-8")
            for end in ("", "_benchmark")
        )
        return [ExportedModule(word, texts, source, benchmark)]
    path = Path(word)
    if not path.is_file():
        raise ProblemError(
            f"'{word}' is no operation and no file; expected {', '.join(operation_names())}, or a "
            "file with computations as text"
        )
    return [_plain_operation(text) for text in read_texts(path.read_text(encoding="utf-8"), planning)]


def _plain_operation(text: PlannedText) -> ExportedModule:
    """The module of a text without one of its own."""
    if text.name in TAKEN:
        raise Unsupported("export:name", f"{text.name} is a module of every package; rename the text")
    source = _rendered(
        "text_function.py",
        name=text.name,
        reads=[t.name for t in text.read],
        results=text.results,
        lines=str(text.compute).splitlines(),
    )
    title = text.name.title().replace("_", "")
    benchmark = _rendered("text_benchmark.py", title=title, name=text.name, read=text.read)
    return ExportedModule(text.name, (text,), source, benchmark)


def repository_files(
    name: str,
    words: Sequence[str],
    types: Sequence[DType],
    targets: Sequence[Target],
    timeout_s: float = 120.0,
    workers: int = 1,
) -> dict[str, bytes]:
    """The files of the folder by path. Raises ProblemError for a name that the loader refuses or a word
    that names nothing, Unsupported for a computation without kernels, or that fails for a chip."""
    if not NAME.fullmatch(name):
        raise ProblemError(
            f"'{name}' is no name of a kernel; expected lower-case letters, digits and dashes, beginning "
            "with a letter, such as my-kernels (--name)"
        )
    planning = Planning(tuple(types), tuple(targets))
    operations, rows = _compiled_operations(words, planning, timeout_s, workers)
    modules = [o.module for o in operations]
    if twice := [m for m in modules if modules.count(m) > 1]:
        raise ProblemError(f"{twice[0]} is there twice; expected each computation once")
    texts = [t for o in operations for one in o.texts for t in (one, *one.gradients)]
    package = _package_files(operations, texts)
    files = {f"torch-ext/{name.replace('-', '_')}/{path}": text.encode() for path, text in package.items()}
    for backend, chips in _backends(targets).items():
        variant = _variant_files(name, backend, chips, package)
        files |= {f"build/torch-{backend}/{path}": content for path, content in variant.items()}
    files |= {
        f"benchmarks/benchmark_{o.module}.py": _rendered(
            "benchmark.py", module=o.module, body=o.benchmark
        ).encode()
        for o in operations
    }
    files["compiled.csv"] = rows.encode()
    return files | _outer_files(name, operations, types, targets)


def _package_files(operations: Sequence[ExportedModule], texts: Sequence[PlannedText]) -> dict[str, str]:
    """The package's files but for what names its build."""
    steps = [s for t in texts for plan in t.plans.values() for s in plan.steps]
    imports, kernels = joined(list(dict.fromkeys(s.source for s in steps)))
    if "gdc" in "".join(imports):
        raise Unsupported("export:early", "the kernels have instructions that not every chip has")
    return {
        "_kernels.py": _rendered(
            "_kernels.py",
            imports=[i for i in imports if i != "import triton"],
            kernels=[k for k in kernels if k[1]],
        ),
        "_launchers.py": _rendered(
            "_launchers.py",
            functions=[list(launcher_lines(t)) for t in texts],
            texts=[{**text_record(t), "follows_call": t.follows_call} for t in texts],
        ),
        # The first release of Triton to compile for a chip, of those that ask for one.
        "_operators.py": _rendered(
            "_operators.py", releases={t.name: t.since for t in TARGETS.values() if t.since}
        ),
        "layers.py": _rendered("layers.py", layers=[(o.module, o.layers) for o in operations if o.layers]),
        "__init__.py": _rendered(
            "__init__.py",
            title=", ".join(n for o in operations for n in o.functions) + ".",
            modules=[(o.module, o.functions) for o in operations],
        ),
        **{f"{o.module}.py": o.source for o in operations},
    }


def _backends(targets: Sequence[Target]) -> dict[str, list[str]]:
    """The build variants with the chips of each, as its metadata names them."""
    made: dict[str, list[str]] = {}
    for t in targets:
        if t.backend == "cuda":
            major, minor = divmod(int(t.arch), 10)
            made.setdefault("cuda", []).append(f"{major}.{minor}")
        else:
            made.setdefault("rocm", []).append(str(t.arch))
    return {**made, "cpu": []}


def _variant_files(name: str, backend: str, chips: list[str], package: dict[str, str]) -> dict[str, bytes]:
    """A build variant: the package, its name space, the same for older loaders, and its metadata."""
    inner = name.replace("-", "_")
    content = "".join(f"{k}{v}" for k, v in sorted(package.items())).encode()
    identifier = f"_{inner}_{backend}_{hashlib.sha256(content).hexdigest()[:8]}"
    files = {
        **package,
        "_ops.py": _rendered("_ops.py", identifier=identifier),
        f"{inner}/__init__.py": _rendered("inner_init.py", identifier=identifier),
    }
    made = {path: text.encode() for path, text in files.items()}
    metadata: dict[str, Any] = {
        "name": name,
        "id": identifier,
        "version": KERNEL_VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend, **({"archs": chips} if chips else {})},
        "digest": {
            "algorithm": "sha256",
            "files": {
                path: base64.b64encode(hashlib.sha256(content).digest()).decode()
                for path, content in sorted(made.items())
            },
        },
    }
    return {**made, "metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def _compiled_operations(
    words: Sequence[str], planning: Planning, timeout_s: float, workers: int
) -> tuple[list[ExportedModule], str]:
    """The operations, and a row of resources for each kernel and chip. Kernels that keep too much of a
    thread in memory get the next schedule. Raises Unsupported for one that does not compile for a chip, or
    whose machine code has a known mistake."""
    known: dict[CompileJob, Resources] = {}
    for last in (*[False] * ROUNDS, True):
        operations = [o for word in words for o in read_operation(word, planning)]
        each = [one for o in operations for t in o.texts for one in (t, *t.gradients)]
        steps = [s for t in each for plan in t.plans.values() for s in plan.steps]
        jobs = {job_of(s, chip, words=False): s for s in steps for chip in planning.targets}
        new = [job for job in jobs if job not in known]
        known |= zip(new, map(_made, compile_offline(new, timeout_s, workers)), strict=True)
        spilled = [s for job, s in jobs.items() if known[job].spill_bytes > MOST_SPILLED]
        over = {(str(s.compute), str(s.schedule)) for s in spilled}
        if last or not over:
            break
        try:
            planning = replace(planning, passed_over=planning.passed_over | over)
        except Unsupported:  # no schedule is left
            break
    rows = [
        f"{r.function},{r.target},{r.registers},{r.spill_bytes},{r.shared_bytes}"
        for r in map(known.__getitem__, jobs)
    ]
    return operations, "\n".join(["kernel,chip,registers,spilled_bytes,shared_bytes", *rows, ""])


def _made(answer: Answer) -> Resources:
    """What was compiled. Raises Unsupported."""
    about = f"{answer.function} for {answer.target}"
    if isinstance(answer, CompileFailure):
        raise Unsupported("export:compile", f"{about}: {answer.reason}; export for other chips (--target)")
    if answer.flaw:
        raise Unsupported("export:miscompiled", f"{about}: {answer.flaw}")
    return answer


def _outer_files(
    name: str, operations: Sequence[ExportedModule], types: Sequence[DType], targets: Sequence[Target]
) -> dict[str, bytes]:
    """What kernel-builder builds from, the card, and the check of digests."""
    told = {
        "name": name,
        "folder": name,
        "license": LICENSE,
        "kernel_version": KERNEL_VERSION,
        "backends": ", ".join(f'"{b}"' for b in _backends(targets)),
        "modules": [(o.module, o.functions) for o in operations],
        "types": ", ".join(t.torch for t in types),
        "chips": ", ".join(t.name for t in targets) or "no chip",
    }
    each = ("build.toml", "flake.nix", "CARD.md", "signature.py")
    return {file: _rendered(file, **told).encode() for file in each}


def _rendered(template: str, **given: Any) -> str:
    return templates().get_template(f"hub/{template}.jinja").render(version=__version__, **given)
