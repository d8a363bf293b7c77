"""A folder that Hugging Face's `kernels` loads: computations as a package of Triton kernels for any size.

    NAME/build.toml, flake.nix, CARD.md     for kernel-builder, which builds the variants anew
    NAME/torch-ext/NAME/...                 the package: torch and triton are all it imports
    NAME/build/torch-cuda/...               the same beside metadata.json, with a digest of each file
    NAME/build/torch-rocm/..., torch-cpu    likewise; torch-cpu runs in Triton's interpreter alone
    NAME/benchmarks/benchmark_OPERATION.py  for `kernels benchmark`
    NAME/compiled.csv                       each kernel as compiled for each chip, without a GPU
    NAME/signature.py                       compares digests, and signs

The layout is that of https://huggingface.co/docs/kernels (kernel requirements, build variants). Operations
with a signature of torch's are files of transconv/data/operations: NAME.txt has the computations,
NAME.py.jinja the functions and layers. Any other text becomes a function of the tensors that it reads."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transconv.backend_triton import (
    Answer,
    CompileFailure,
    CompileJob,
    Resources,
    compile_offline,
    is_explicit,
)
from transconv.compute import Alone, Compute, differentiate, parse
from transconv.ir import DType, Expr, Tensor, Var, python_of, readable
from transconv.runtime.compiler import build
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.standalone.python_file import joined, templates
from transconv.runtime.standalone.reference_check import safe
from transconv.runtime.steps import job_of
from transconv.schedule import Schedule, why_not
from transconv.selection import shortlist
from transconv.support import ComputeError, ProblemError, Unsupported, __version__
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


# -- launchers ------------------------------------------------------------------------------------

CALLS_TYPE = "bf16"  # the word of a text that stands for the type of a call: there is a plan for each
PROPOSED = 40  # schedules that are looked at for one that is legal on every chip
MOST_THREADS = 1024  # of a program, on every chip
RANKED_FOR = "sm_80"  # has tiles, and none of the copy engines that other chips lack
GRADIENT = "_gradient"  # begins the rest of the name of a text that computes gradients


@dataclass(frozen=True)
class PlannedText:
    """One computation and its plans by element type. ``gradients``: the texts of its gradients in the
    order
    in which they run; they read dY, the gradient of the result Y, and store dX, that of the operand X."""

    compute: Compute
    plans: Mapping[DType, Plan]
    follows_call: bool  # whether tensors have the type of a call
    gradients: tuple[PlannedText, ...] = ()

    @property
    def name(self) -> str:
        return self.compute.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sizes."""
        return self.compute.named.names if self.compute.named else ()

    @cached_property
    def stored(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(w.view.tensor for w in self.compute.writes))

    @cached_property
    def read(self) -> tuple[Tensor, ...]:
        written = {t.name for t in self.stored}
        return tuple(t for t in self.compute.tensors if t.name not in written)

    @property
    def results(self) -> tuple[str, ...]:
        """The stored tensors that are results: those with a gradient, if it has gradients."""
        stored = [t.name for t in self.stored]
        read = {t.name for g in self.gradients for t in g.read}
        return tuple(n for n in stored if not self.gradients or f"d{n}" in read)

    def type_of(self, tensor: Tensor) -> str:
        """torch's type of a tensor, as text; None for that of a call."""
        follows = self.follows_call and tensor.dtype.name == CALLS_TYPE
        return "None" if follows else f"torch.{tensor.dtype.torch}"


@dataclass(frozen=True)
class Planning:
    """What plans are made for: the element types of calls, the chips, and schedules that are passed
    over, as computation and schedule, since their machine code was looked at."""

    types: tuple[DType, ...]
    targets: tuple[Target, ...]
    passed_over: frozenset[tuple[str, str]] = frozenset()


def read_texts(text: str, planning: Planning) -> list[PlannedText]:
    """The computations of a file, each with the gradients behind it: texts named NAME_gradient..., or, of
    one whose sizes are numbers, those that are derived. Raises ComputeError for a text that cannot be
    read, Unsupported for one without kernels."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = [p for p in re.split(r"(?m)^(?=compute\s)", "\n".join(lines)) if p.strip()]
    made: list[tuple[str, list[str]]] = []
    for part in parts:
        name = parse(part).name
        if made and name.startswith(parse(made[-1][0]).name + GRADIENT):
            made[-1][1].append(part)
        else:
            made.append((part, []))
    return [_planned(part, gradients, planning) for part, gradients in made]


def _planned(part: str, gradients: Sequence[str], planning: Planning) -> PlannedText:
    compute = parse(part)
    if compute.named is None and not gradients:
        try:
            gradients = [str(c) for c in differentiate(compute).computes]
        except ComputeError:
            gradients = ()  # such a text has none
    behind = tuple(_planned_alone(g, planning) for g in gradients)
    made = _planned_alone(part, planning, behind)
    told = {t.name for t in (*made.read, *made.stored)} | {f"d{t.name}" for t in made.stored}
    for g in behind:
        if missing := [t.name for t in g.read if t.name not in told]:
            raise ComputeError(
                f"{g.name} reads {missing[0]}; expected tensors of {made.name}, gradients of its results "
                f"({' '.join(f'd{t.name}' for t in made.stored)}), or what a text before it stores"
            )
        told |= {t.name for t in g.stored}
    return made


def _planned_alone(part: str, planning: Planning, gradients: tuple[PlannedText, ...] = ()) -> PlannedText:
    word = re.compile(rf"\b{CALLS_TYPE}\b")
    compute = parse(part)
    typed = [t for t in compute.tensors if t.dtype.name == CALLS_TYPE]
    each = (
        [(t, parse(word.sub(t.name, part))) for t in planning.types]
        if typed
        else [(compute.tensors[0].dtype, compute)]
    )
    plans = {}
    for dtype, text in each:

        def choose(c: Compute, target: Target) -> Schedule:
            return _everywhere(c, target, planning)

        plans[dtype] = build(Alone(text), Target.parse(RANKED_FOR), None, choose, False, Plan)
    made = PlannedText(compute, plans, bool(typed), gradients)
    _refuse(made)
    return made


def _everywhere(compute: Compute, target: Target, planning: Planning) -> Schedule:
    """The best schedule for one chip that is legal on all, copies nothing and is not passed over."""
    targets = (target, *planning.targets)
    for listed in shortlist(PROPOSED, compute, target, Alone(compute)):
        schedule = listed.schedule
        if (str(compute), str(schedule)) in planning.passed_over or schedule.pack:
            continue
        if all(
            why_not(schedule, compute, t) is None and schedule.warps * t.warp_size <= MOST_THREADS
            for t in targets
        ):
            return schedule
    raise Unsupported(
        "export:everywhere",
        f"{compute.name}: none of {PROPOSED} schedules is legal on {' '.join(t.name for t in targets)}; "
        "export for fewer chips (--target)",
    )


def _refuse(made: PlannedText) -> None:
    """Raise Unsupported for what the launchers lack."""
    for t in (*made.read, *made.stored):
        if safe(t.name, ()) != t.name or t.name in made.names:
            raise Unsupported("export:name", f"{made.name}: {t.name} cannot be the name of an argument")
    if not made.read:
        raise Unsupported("export:reads", f"{made.name} reads no tensor, whose device it would run on")
    alone = {e.name for t in made.read for e in t.bounds if isinstance(e, Var)}
    if missing := [n for n in made.names if n not in alone]:
        raise Unsupported(
            "export:sizes",
            f"{made.name}: the size {missing[0]} is no dim of a tensor that is read; expected one, "
            f"such as a view [.., {missing[0]}, ..] of it",
        )
    for plan in made.plans.values():
        if plan.padding or any(s.triton.boxes or is_explicit(s.kernel) for s in plan.steps):
            raise Unsupported(
                "export:boxes", f"{made.name}: a kernel for one kind of chip ({plan.schedule})"
            )


# -- text ------------------------------------------------------------------------------------------


def launcher_lines(made: PlannedText) -> Iterator[str]:
    """The functions ``sizes_of_NAME``, ``shapes_of_NAME`` and ``run_NAME_TYPE``. Sizes are read from the
    tensors of a call, which are looked at first:

        def sizes_of_scale(X):                          from the text's line of sizes, and its tensors
            expect_dims("scale", X=(X, 2))
            M, K = X.shape[0], X.shape[1]
            expect_shapes("scale", X=(X, (M, K), None))
            expect(1 <= M <= 4096, "scale", "M in 1..4096")
            return M, K,
        def run_scale_float16(X, M, K):                 from the plan of one element type
            Y = X.new_empty((M, K, ), dtype=torch.float16)
            _kernels.scale_mk_f0e1[((M * K + 1023) // 1024, )](X, Y, M, K, num_warps=4, num_stages=1)
            return Y
    """
    names, read = made.names, [t.name for t in made.read]
    yield f"def sizes_of_{made.name}({', '.join(read)}):"
    yield f'    """{_listed(names) or "No size"} of a call; ValueError for tensors that do not fit."""'
    dims = ", ".join(f"{t.name}=({t.name}, {len(t.shape)})" for t in made.read)
    yield f'    expect_dims("{made.name}", {dims})'
    for name in names:
        tensor, dim = _place(name, made.read)
        yield f"    {name} = {tensor}.shape[{dim}]"
    shapes = ", ".join(f"{t.name}=({t.name}, ({_dims(t, names)}), {made.type_of(t)})" for t in made.read)
    yield f'    expect_shapes("{made.name}", {shapes})'
    if made.compute.named:
        for size in made.compute.named.each:
            said = f"{size.name} in {size.least}..{size.most}"
            yield f'    expect({size.least} <= {size.name} <= {size.most}, "{made.name}", "{said}")'
        yield from _conditions(made.name, made.compute.named.where, names)
    yield f"    return {_listed(names) or '()'}"
    yield ""
    yield ""
    yield f"def shapes_of_{made.name}({', '.join(names)}):"
    yield '    """The shapes and types of what is stored; None: the type of the call."""'
    yield f"    return {_listed([f'(({_dims(t, names)}), {made.type_of(t)})' for t in made.stored])}"
    for dtype, plan in made.plans.items():
        yield ""
        yield ""
        yield from _run_lines(made, dtype, plan)


def _run_lines(made: PlannedText, dtype: DType, plan: Plan) -> Iterator[str]:
    names = made.names
    given = ", ".join([*(t.name for t in made.read), *names])
    yield f"def run_{made.name}_{dtype.torch}({given}):"
    near = made.read[0].name
    if plan.required is not None:
        own = [c for c in plan.required.sizes.where if c not in made.compute.named.where]  # type: ignore[union-attr]
        yield from _conditions(made.name, own, names)
    for t in made.stored:
        kind = f"torch.{dtype.torch}" if made.type_of(t) == "None" else made.type_of(t)
        yield f"    {t.name} = {near}.new_empty(({_dims(t, names)}), dtype={kind})"
    for name, t in plan.workspaces.items():
        room = python_of(t.room, names)
        yield f"    {name} = {near}.new_empty(({room},), dtype=torch.{t.dtype.torch})"
    for step in plan.steps:
        yield from _launch_lines(step, names)
    yield f"    return {', '.join(t.name for t in made.stored)}"


def _launch_lines(step: PlanStep, names: Sequence[str]) -> Iterator[str]:
    if step.zero is not None:
        yield f"    {step.zero.name}.zero_()"
    run = step.triton
    yield f"    _kernels.{step.kernel.name}[({python_of(run.programs, names)},)]("
    given = ", ".join([*step.params, *run.names])
    yield f"        {given}, num_warps={run.warps}, num_stages={run.stages})"


def _conditions(title: str, where: Sequence[Expr], names: Sequence[str]) -> Iterator[str]:
    for condition in where:
        yield f'    expect({python_of(condition, names)}, "{title}", "{readable(condition)}")'


def _place(name: str, read: Sequence[Tensor]) -> tuple[str, int]:
    """A tensor and its dim that a size is read from."""
    return next((t.name, d) for t in read for d, e in enumerate(t.bounds) if e == Var(name))


def _dims(tensor: Tensor, names: Sequence[str]) -> str:
    return _listed([python_of(e, names) for e in tensor.bounds])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def text_record(made: PlannedText) -> dict[str, Any]:
    """What the package's table says of a text."""
    return {
        "name": made.name,
        "reads": [t.name for t in made.read],
        "stores": [t.name for t in made.stored],
        "results": list(made.results),
        "types": [dtype.torch for dtype in made.plans],
        "gradients": [g.name for g in made.gradients],
    }
