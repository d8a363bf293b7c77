"""Certificates of problems, computations and models: that a sample's bits do not depend on its batch.

    transconv.certify("mb8ic64ih56oc64oh56kh3ph1 dt=f16 tag=nhwc", drawn=20)
    transconv.certify(model, x, drawn=20)              a model and its inputs, of several samples

A certificate has the proof from what is chosen and lowered (verify/invariance/proof.py), and what drawn
batches gave on a device: every sample alone against the same sample inside. A model is compiled in
invariant mode, which refuses what depends on the batch; then each of its kernels is proved."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from transconv.calls.settings import settings
from transconv.compute import Alone, Compute, Workload, in_bands, with_reference
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.functional.calls.compiled_launch import program
from transconv.graph import KernelRow, backend, report
from transconv.runtime import Plan, build, torch_internals
from transconv.schedule import Schedule
from transconv.support import TransconvError
from transconv.target import TARGETS, Target, detect
from transconv.torch_ops.calls.lower_call import target_of
from transconv.verify.invariance.drawn_batches import FEWEST, MOST, bits_off, differing
from transconv.verify.invariance.proof import BatchCertificate, ProofLine, of_plans, prove

Tensor = torch.Tensor


def certify(
    what: Any,
    *inputs: Tensor,
    prop: str = "all",
    target: str = "",
    schedule: str = "",
    drawn: int = 0,
    device: str = "",
    seed: int = 0,
) -> BatchCertificate:
    """The certificate of a problem of a convolution or the text of a computation, or of a model and its
    inputs. ``prop``: the direction of a problem, or all; ``target``: the chip that is chosen for; default:
    the one here, else sm_90; ``schedule``: one to look at in place of the choice; ``drawn``: how many
    batches to draw and run on ``device``; default: the GPU if there is one. Raises the errors of texts."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if callable(what):
        return of_model(what, inputs, drawn, seed)
    chip = Target.parse(target) if target else detect()
    chip = TARGETS["sm_90"] if chip.backend == "interpreter" and not target else chip
    given = Schedule.parse(schedule) if schedule else None
    found: list[ProofLine] = []
    for workload in workloads(str(what), prop):
        found += prove(workload, chip, given).findings
        if drawn:
            here = TARGETS["interpreter"] if where == "cpu" else chip
            found.append(drawn_finding(workload, here, where, drawn, seed, given))
    return BatchCertificate(str(what).partition("\n")[0], tuple(found))


def workloads(text: str, prop: str) -> list[Workload]:
    """What a text asks for. Raises the errors of texts."""
    if text.lstrip().startswith("compute"):
        return [Alone(Compute.parse(text))]
    problem = ConvProblem.parse(text)
    return [ConvWorkload(problem, p) for p in Prop if prop in ("all", p.value)]


def drawn_finding(
    workload: Workload, target: Target, device: str, batches: int, seed: int, schedule: Schedule | None
) -> ProofLine:
    """What drawn batches of a workload gave."""
    about = f"{workload.direction or workload.title} drawn"
    try:
        told = list(differing(workload, target, device, batches, seed, [schedule] if schedule else []))
    except TransconvError as error:
        return ProofLine(about, False, str(error))
    wrong = [line for line in told if line]
    said = f"{batches} batches of {FEWEST} to {MOST} samples on {device}"
    return ProofLine(about, not wrong, f"{said}: {'; '.join(wrong[:3]) or 'no bit differs'}")


# -- models --------------------------------------------------------------------------------------------


def of_model(model: Any, inputs: Sequence[Tensor], drawn: int, seed: int) -> BatchCertificate:
    """The certificate of a model in inference, which its inputs, of several samples each, show."""
    if not inputs:
        raise TypeError("certify: a model needs its inputs; write certify(model, x)")
    title = (
        type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model")
    )
    with settings.changed(invariant=True), torch.no_grad():
        reset: Any = torch.compiler.reset
        reset()
        run: Any = torch.compile(model, backend=backend, fullgraph=True)  # nothing is left to Python
        try:
            run(*map(_marked, inputs))
        except Exception as error:
            ours = (TransconvError, torch_internals.GraphBreak)
            refused = next((e for e in _causes(error) if isinstance(e, ours)), None)
            if refused is None:
                raise
            said = str(refused).partition("\n")[0]
            return BatchCertificate(title, (ProofLine("graph", False, said),))
        found = list(of_graphs(report(run).graphs, inputs[0].device))
        if drawn:
            wrong = list(model_differing(run, inputs, drawn, seed))
            said = f"{drawn} batches of {FEWEST} to {MOST} samples on {inputs[0].device}"
            found.append(
                ProofLine("drawn", not wrong, f"{said}: {'; '.join(wrong[:3]) or 'no bit differs'}")
            )
    return BatchCertificate(title, tuple(found))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _marked(x: Tensor) -> Tensor:
    """A tensor whose first dim is a name of graphs."""
    made = x.detach().clone()
    torch_internals.mark_dynamic(made, 0)
    return made


def of_graphs(graphs: Iterable[Any], device: torch.device) -> Iterator[ProofLine]:
    """What is found of the kernels of graphs."""
    for graph in graphs:
        by_torch = [row for row in graph.rows if not isinstance(row, KernelRow)]
        yield ProofLine(
            f"{graph.phase} graph",
            True,
            f"{len(graph.kernels)} kernels, {len(by_torch)} regions of torch, which add up nothing; "
            "planned for a fixed number of samples",
        )
        for row in graph.kernels:
            yield from of_kernel(program(row.text).compute, device)


def of_kernel(compute: Compute, device: torch.device) -> list[ProofLine]:
    """What is found of a kernel of a graph, whose sizes are names."""
    names = compute.named.names if compute.named is not None else ()
    if not names:
        return [ProofLine(compute.name, True, "its sizes are the same for every number of samples")]
    each = [compute]
    if len(names) == 1:
        each = [with_reference(compute, names[0], n) for n in in_bands(compute) or (1,)]
    try:
        plans = [build(Alone(c), target_of(device), None, None, True, Plan) for c in each]
    except TransconvError as error:
        return [ProofLine(compute.name, False, str(error))]
    return [found for name in names for found in of_plans(plans, name)]


def model_differing(run: Any, inputs: Sequence[Tensor], batches: int, seed: int) -> Iterator[str]:
    """In words, which samples of drawn batches of a model's inputs have other bits alone."""
    rng = random.Random(seed)
    for _ in range(batches):
        count = rng.randint(FEWEST, MOST)
        given = [_drawn(x, count, rng) for x in inputs]
        whole = _tensors(run(*map(_marked, given)))
        if odd := [k for k, t in enumerate(whole) if not t.dim() or len(t) != count]:
            yield f"result {odd[0]} has no part for each of {count} samples"
            continue
        for at in range(count):
            alone = _tensors(run(*[_marked(x[at : at + 1]) for x in given]))
            for place, (one, all_of) in enumerate(zip(alone, whole, strict=True)):
                if number := bits_off(one[0], all_of[at]):
                    yield f"result {place} of sample {at} of {count}: {number} elements differ"


def _drawn(x: Tensor, count: int, rng: random.Random) -> Tensor:
    """So many samples like those of a tensor: of floats with some noise, of integers as they are."""
    picked = x[[rng.randrange(len(x)) for _ in range(count)]]
    if not x.is_floating_point():
        return picked
    generator = torch.Generator(x.device).manual_seed(rng.randrange(1 << 30))
    noise = torch.randn(picked.shape, generator=generator, device=x.device)
    return (picked + noise.to(x.dtype)).to(x.dtype)


def _tensors(made: Any) -> list[Tensor]:
    """The tensors of a result."""
    each = made.values() if isinstance(made, dict) else made if isinstance(made, (tuple, list)) else [made]
    return [t for t in each if isinstance(t, Tensor)]
