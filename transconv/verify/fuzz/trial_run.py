"""Runs one trial in a worker process and returns a row with the outcome.

One trial is compiled and executed in one of three ways: ``numpy``, the final kernel in the
interpreter of the IR; ``triton``, the emitted text in Triton's interpreter; ``device``, the compiled
kernel on a GPU, twice, as the second launch takes another way to the driver than the first.
Data are whole numbers, so that results are compared bit for bit, and then random, to find roundings
that should not be there; results are poisoned and everything around tensors and between their elements
is guarded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any

from transconv import knobs
from transconv.conv import Epilogue, compiler, without_zeros
from transconv.errors import ScheduleError, Unsupported
from transconv.schedule import Schedule, Scheduled, k_steps, programs
from transconv.selection.proposals import heuristics
from transconv.verify.fuzz import trial_kinds
from transconv.verify.fuzz.compute_trial import ComputeTrial, outcome
from transconv.verify.fuzz.conv_trial import ConvTrial
from transconv.verify.fuzz.worker import prepare
from transconv.verify.pool import is_fatal

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection
    from transconv.runtime import Plan
    from transconv.verify.data import Guarded

    Tensors = dict[str, Guarded]

Row = dict[str, Any]
GUARD = 1 << 12  # elements on either side: fewer than a check has, there are many small tensors
SETS_APART = 7919  # between the seeds of two sets of values
MOST_STEPS = 1000  # of loops in Triton's interpreter, several ms each
MOST_STEPS_TWICE = 100  # the same, of trials that it runs on float data, too
LAUNCHES = ("first", "second")
DATA = ("exact", "float")
GOOD = ("passed", "refused", "resources")


def work(seed: int | str = 0, number: int = -1, line: str = "", way: str = "numpy",
         scratch: str = "", target: str = "sm_90", computes: bool = False, small: bool = False,
         sets: int = 1) -> Row:
    """One trial, by its number or its line, in a worker; ``computes``: a drawn one of a computation,
    ``small``: of a convolution with types of 8 bits. ``sets``: with how many sets of scales and zero
    points the kernels run, where they are arguments; each is a problem with its own check, counted in
    ``problems``.
    ``status`` is ``passed``, ``failed`` (with a reason), ``error`` (of our compiler or of Triton),
    ``refused`` or ``resources``. What ends the use of the GPU is raised: the worker is then lost."""
    start = time.perf_counter()
    try:
        trial = trial_kinds.read(line) if line else trial_kinds.drawn(
            seed, number, target, computes, small)
    except Exception as error:  # to choose a schedule is a part of what is tested
        return {"line": "", "facts": {}, "way": way, "status": "error", "seconds": 0.0,
                "reason": f"{number} of seed {seed} cannot be drawn: {type(error).__name__}: {error}"}
    schedule = Schedule.parse(f"{trial.schedule}") if trial.schedule else None
    if way == "triton" and schedule is not None and schedule.via != "tl":
        way = "numpy"  # Triton's interpreter cannot read explicit kernels
    row: Row = {"line": str(trial), "facts": trial.facts, "way": way}
    prepare(scratch, "triton" if way == "device" else "")
    passes = () if isinstance(trial, ComputeTrial) else trial.passes
    knobs.adopt({knobs.passes.name: ",".join(f"{'+' if on else '-'}{n}" for n, on in passes)})
    try:
        if isinstance(trial, ComputeTrial):
            row |= outcome(trial, way, row)
        else:
            row |= _outcome(trial, way, number % (1 << 31) if number >= 0 else 0, row, sets)
    except (ScheduleError, Unsupported) as refusal:
        row |= {"status": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
    except Exception as error:
        row |= of_error(error)
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def of_error(error: Exception) -> Row:
    """The outcome of a trial that ended with an error. Raises one that ends the use of the GPU."""
    if is_fatal(error):
        raise error
    name = type(error).__name__
    return {"status": "resources" if name == "OutOfResources" else "error",
            "reason": " ".join(f"{name}: {error}".split())[:600]}


def _outcome(trial: ConvTrial, way: str, seed: int, row: Row, sets: int) -> Row:
    """Compile, run and judge."""
    from transconv.verify.machine import executable

    started = time.perf_counter()
    chip = executable(trial.chip, "cpu") if way == "triton" else trial.chip
    compiled = compiler.build(trial.problem, trial.prop, chip, trial.schedule,
                              Epilogue.parse(trial.epilogue), heuristics.default)
    row["kernels"], row["generate_s"] = len(compiled.steps), round(time.perf_counter() - started, 4)
    if way == "triton" and interpreted_steps(compiled) > MOST_STEPS:
        way = row["way"] = "numpy"
    slow = way == "triton" and interpreted_steps(compiled) > MOST_STEPS_TWICE
    found: Row = {}
    for data in DATA[:1] if slow else DATA:
        tensors = _filled(trial, seed, data)
        found = _run(trial, compiled, tensors, way, row, data)
        if found["status"] != "passed":
            return found | {"reason": f"{data} data: {found['reason']}"}
        row["nonzero"] = row.get("nonzero", found["nonzero"])  # the share in the exact data
    row["problems"] = 1
    for other, data in zip(_others(trial, sets, slow), cycle(DATA)):
        found = _run(other, compiled, _filled(other, seed, data), way, row, data, LAUNCHES[1:])
        if found["status"] != "passed":
            return found | {"reason": f"{data} data: {found['reason']}", "line": str(other)}
        row["problems"] += 1
    return {**found, "nonzero": row["nonzero"]}


def _others(trial: ConvTrial, sets: int, slow: bool) -> Iterator[ConvTrial]:
    """The same kernels' other problems: other scales, zero points and operands of post-ops."""
    if sets > 1 and not slow and is_of_values(trial):
        yield from (replace(trial, values=trial.values + n) for n in range(1, sets))


def is_of_values(trial: ConvTrial) -> bool:
    """Whether other values may show what the first do not: there are zero points or operands of post-ops,
    and what they make is rounded or saturates in the result."""
    from transconv.verify.epilogue_data import epilogue_operands

    after = Epilogue.parse(trial.epilogue)
    result = trial.problem.specs[trial.prop.result].dtype
    return bool(epilogue_operands(trial.problem, trial.prop, after)) and (
        bool(after.zeros) or after.random or result.bits < trial.problem.acc.bits)


def _run(trial: ConvTrial, compiled: CompiledDirection, tensors: Tensors, way: str, row: Row, data: str,
         launches: Sequence[str] = LAUNCHES) -> Row:
    """Launch and judge."""
    if way == "numpy":
        return _interpreted(trial, compiled, tensors, data)
    if way == "triton":
        _launch(compiled, tensors)
        return _judged(trial, compiled, tensors, data)
    return _on_device(trial, compiled, tensors, row, data, launches)


def interpreted_steps(compiled: Plan) -> int:
    """How often Triton's interpreter goes through the body of a loop, program by program."""
    return sum(max(s.launcher.grid, programs(s.schedule, seen))
               * max(1, k_steps(s.schedule, seen) // s.schedule.split_k)
               for s in compiled.steps
               for seen in [Scheduled(s.compute, s.schedule, compiled.target).grouped])


def _filled(trial: ConvTrial, seed: int, data: str) -> Tensors:
    """The tensors on the CPU, guarded: operands with data of a kind, the result poisoned."""
    import torch

    from transconv.verify.data import Guarded, fill, torch_dtype
    from transconv.verify.epilogue_data import epilogue_operands, epilogue_values

    p, after = trial.problem, Epilogue.parse(trial.epilogue)
    layouts = {n: (spec.layout, p.shapes[n]) for n, spec in p.specs.items()}
    read = epilogue_operands(p, trial.prop, after)
    layouts |= {n: (t.layout, t.shape) for n, t in read.items()}
    tensors: Tensors = {}
    for name, (layout, shape) in layouts.items():
        memory = torch.empty(max(1, layout.span) + 2 * GUARD + trial.shift,
                             dtype=torch_dtype(layout.dtype))
        tensors[name] = Guarded(memory, layout, tuple(shape), GUARD + trial.shift)
        tensors[name].poison()
    seed += SETS_APART * trial.values
    fill(tensors, p, trial.prop, data, seed)
    for place, (name, tensor) in enumerate(read.items()):
        tensors[name].put(epilogue_values(tensor, data, "cpu", seed + place))
        tensors[name].seal()
    return tensors


def _judged(trial: ConvTrial, compiled: CompiledDirection, tensors: Tensors, data: str) -> Row:
    """Compare with the answer in f64, and check that nothing else was written."""
    from transconv.verify.case import longest_chain
    from transconv.verify.data import poison
    from transconv.verify.judgement import judge

    result = tensors[trial.prop.result]
    extra = {n: t.view for n, t in tensors.items() if n not in trial.problem.specs}
    held = {n: tensors[n].view for n in trial.prop.operands}
    whole = without_zeros(held | extra, Epilogue.parse(trial.epilogue).zeros)
    a, b = (whole[n] for n in trial.prop.operands)
    found = judge(trial.problem, trial.prop, a, b, result.view, data, trial.epilogue, extra,
                  longest_chain(compiled))
    reasons = [found.reason] if found.reason else []
    if any(step.zero is not None for step in compiled.steps):  # what lies between elements is 0 too
        bits, pattern = poison(result.memory.dtype)
        _arguments({"it": result})["it"].view(bits).fill_(pattern)
    reasons += [f"wrote outside of {name}" if tensor is result else f"changed {name}"
                for name, tensor in tensors.items() if not tensor.intact()]
    return {"status": "failed" if reasons else "passed", "reason": "; ".join(reasons),
            "nonzero": round(found.nonzero, 3), "elements": prod(result.shape)}


def _arguments(tensors: Tensors) -> dict[str, Any]:
    """What kernels are given: memory from a tensor's first place to its last."""
    return {name: t.memory[t.start:t.start + max(1, t.layout.span)] for name, t in tensors.items()}


def _launch(compiled: CompiledDirection, tensors: Tensors) -> None:
    compiled.launch(**_arguments(tensors))


def _on_device(trial: ConvTrial, compiled: CompiledDirection, tensors: Tensors, row: Row, data: str,
               launches: Sequence[str]) -> Row:
    """On the GPU: the first time through Triton's dispatcher, which compiles, then as a kept kernel."""
    import torch

    row["device"] = torch.cuda.get_device_name()
    result = tensors[trial.prop.result]
    home = {name: t.memory for name, t in tensors.items()}
    there = {name: memory.cuda() for name, memory in home.items()}
    found: Row = {}
    for launch in launches:
        for name, t in tensors.items():
            t.memory = there[name]
        if launch != launches[0]:
            result.poison()
        started = time.perf_counter()
        _launch(compiled, tensors)
        torch.cuda.synchronize()
        if launch == "first" and data == "exact":
            row["compile_s"] = round(time.perf_counter() - started, 4)
        for t in tensors.values():
            t.memory = t.memory.cpu()
        found = _judged(trial, compiled, tensors, data)
        if found["status"] != "passed":
            return found | {"reason": f"{launch} launch: {found['reason']}"}
    return found


def _interpreted(trial: ConvTrial, compiled: CompiledDirection, tensors: Tensors, data: str) -> Row:
    """The final kernels, one after another, with NumPy; the rules of the IR are checked first."""
    from transconv.ir import InterpError
    from transconv.verify.interpret import interpret

    try:
        interpret(compiled, tensors)
    except InterpError as fault:
        return {"status": "failed", "reason": " ".join(str(fault).split())[:600]}
    return _judged(trial, compiled, tensors, data)
