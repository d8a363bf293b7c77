"""Sharded convolutions equal those of one process, result and gradients; what cannot be served says so.

`make test` runs a sample in one pair of processes; `make check-all` the whole probe and 400 drawn cases.
"""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import transconv
from tests import programs
from tests.distributed import cases, processes
from tests.shown import ROOT, blocks
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.distributed import agreement, sharded_modules
from transconv.selection import choice, tuning_db
from transconv.target.records import TARGETS

SM90 = TARGETS["sm_90"]
PAGE = blocks((ROOT / "docs" / "distributed.md").read_text("utf-8"))  # a program, and what it prints


def differences(todo: list[cases.Case], shape: tuple[int, ...]) -> list[str]:
    """What is wrong in which case, on this rank."""
    transconv.config.fallback = "silent"
    mesh = init_device_mesh("cpu", shape)
    return [f"{case}: {told}" for case in todo if (told := cases.wrong(case, mesh, transconv))]


def check(shape: tuple[int, ...], todo: list[cases.Case]) -> None:
    found = processes.run(torch.Size(shape).numel(), differences, todo, shape)
    assert found == [[] for _ in found], found


# -- one pair of processes for all that `make test` asks -------------------------------------------


def refusal(call: Any) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sample() -> dict[str, Any]:
    transconv.config.fallback = "silent"
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    uneven = cases.Case((9,), (4,), (1,), "same", (1,), ((2, None, None),))  # one row less at the start
    todo = [
        uneven,
        *(c for c in cases.probed()[::7] if len(c.sizes) < 3),
        *(cases.drawn(s, 1) for s in range(12)),
    ]
    found: dict[str, Any] = {"calls": [told for c in todo if (told := cases.wrong(c, mesh, transconv))]}
    with transconv.use("cpu"):
        found["aten"] = [told for c in todo[::4] if (told := cases.wrong(c, mesh, torch.nn.functional))]
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Shard(2)])
    w = distribute_tensor(torch.randn(4, 4, 3, 3), mesh, [Replicate()])
    other = distribute_tensor(torch.randn(4, 4, 3, 3), init_device_mesh("cpu", (1, 2)), [Replicate()] * 2)
    found["disagree"] = refusal(lambda: transconv.conv2d(x, w, stride=1 + rank))
    found["agree again"] = refusal(lambda: transconv.conv2d(x, w, stride=1))
    found["plain"] = refusal(lambda: transconv.conv2d(x, w.to_local()))
    found["meshes"] = refusal(lambda: transconv.conv2d(x, other))
    found["fused"] = refusal(lambda: _fused(x, w))
    found["inference"] = refusal(lambda: _inference(x, w))
    found["autocast"] = refusal(lambda: _autocast(x, w))
    found["twice differentiated"] = refusal(lambda: _second(x, w))
    if rank == 0:  # refused before anything is exchanged; the compiler's import takes longest of all here
        found["compiled"] = refusal(lambda: torch.compile(transconv.conv2d, backend="aot_eager")(x, w))
    dealt = transconv.distributed.parallelize(nn.Conv2d(4, 4, 3), mesh, {"h": 0})
    found["within"] = refusal(lambda: transconv.within(dealt, "1 GB")(x.to_local()))
    found["shapes"] = refusal(lambda: transconv.conv2d(x, w, groups=3))
    for name, plan in {
        "axis": {"x": 0},
        "mesh dim": {"h": 1},
        "name": {"h": "rows"},
        "twice": {"h": 0, "w": 0},
    }.items():
        found[name] = refusal(
            lambda plan=plan: transconv.distributed.parallelize(  # type: ignore[misc]
                torch.nn.Conv2d(1, 1, 1), mesh, plan
            )
        )
    found["rounded once"] = refusal(lambda: _rounded_once(mesh, rank))
    found["invariant"] = _invariant(mesh)
    found["unbatched"] = refusal(lambda: _unbatched(mesh))
    found["norms and pools"] = [told for axis in "nhw" for told in _normed(mesh, axis)]
    found["schedules"] = chosen(mesh, rank)
    os.environ["TRANSCONV_SCHEDULE"] = found["schedules"][rank]
    found["other schedules"] = refusal(lambda: agreement.agree_on_schedules(mesh))
    del os.environ["TRANSCONV_SCHEDULE"]
    found["page"] = printed(PAGE[0].body)  # the last one: it seeds, and sets torch's default device
    return found


def chosen(mesh: Any, rank: int) -> list[str]:
    """The two best schedules of a problem, of which the database of each rank has another one; and the one
    that is chosen on this rank."""
    work = ConvWorkload(ConvProblem.parse("mb2ic32ih8oc32oh8kh3ph1 dt=bf16 tag=nhwc"), Prop.FWD)
    (compute,) = work.computations
    best = [str(c.schedule) for c in choice.ranked(compute, SM90)[:2]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.csv"
        tuning_db.save(file, [tuning_db.make(work, SM90, best[rank], 1.0, 2)])
        os.environ["TRANSCONV_TUNED"] = str(file)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            agreement.agree_on_schedules(mesh)
        own, *_rest = choice.ranked(compute, SM90, work)
        told = [str(w.message) for w in said if "tuned schedules of" in str(w.message)]
        del os.environ["TRANSCONV_TUNED"]
        tuning_db.adopt(None)
    return [*best, f"{own.source} {own.schedule}", *told]


def printed(program: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        exec(program, {"__name__": "__main__"})
    return out.getvalue()


def _fused(x: DTensor, w: DTensor) -> None:
    made = transconv.fused_conv2d(x, w, activation="relu", residual=x, padding=1)
    want = transconv.fused_conv2d(
        x.full_tensor(), w.full_tensor(), None, 1, 1, residual=x.full_tensor(), activation="relu"
    )
    torch.testing.assert_close(made.full_tensor(), want)  # type: ignore[attr-defined]


def _inference(x: DTensor, w: DTensor) -> None:
    with torch.inference_mode():
        made: Any = transconv.conv2d(x, w, padding=1)
        want = torch.conv2d(x.full_tensor(), w.full_tensor(), padding=1)
        torch.testing.assert_close(made.full_tensor(), want)


def _autocast(x: DTensor, w: DTensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        made: Any = transconv.conv2d(x, w)
        want = torch.conv2d(x.full_tensor(), w.full_tensor())
    torch.testing.assert_close(made.full_tensor(), want)


def _second(x: DTensor, w: DTensor) -> None:
    """A gradient of a gradient."""
    found = []
    for function, call in ((transconv.conv2d, (x, w)), (torch.conv2d, (x.full_tensor(), w.full_tensor()))):
        a, b = (t.detach().double().requires_grad_() for t in call)
        (first,) = torch.autograd.grad(function(a, b, padding=1).square().sum(), a, create_graph=True)
        first.square().sum().backward()
        found.append([a.grad, b.grad])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.full_tensor(), want)  # type: ignore[union-attr]


def _invariant(mesh: Any) -> list[str]:
    """What has other bits on two ranks than on one in invariant mode, whatever is dealt: a result, and
    gradients of the input, the weight and the bias. Norms of rows on several ranks are refused."""
    torch.manual_seed(5)
    whole = [torch.randn(s) for s in ((4, 4, 9, 6), (6, 4, 3, 3), (6,), (4, 6, 5, 3))]

    def step(given: list[Any]) -> list[Any]:
        own = [t.detach().requires_grad_() for t in given[:3]]
        y = transconv.conv2d(*own, stride=2, padding=1)
        y.backward(given[3])
        made = [y.detach(), *(t.grad for t in own)]
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in made]

    wrong = []
    with transconv.config.changed(invariant=True, cpu="interpret"):
        want = step(whole)
        for dim in range(3):
            places = Shard(dim), Replicate(), Replicate(), Shard(dim)
            made = step([distribute_tensor(t, mesh, [p]) for t, p in zip(whole, places, strict=True)])
            wrong += [f"dim {dim}: tensor {n}" for n in range(4) if not torch.equal(made[n], want[n])]
        norm = transconv.distributed.parallelize(nn.GroupNorm(2, 4), mesh, {"h": 0})
        return [*wrong, refusal(lambda: norm(whole[0]))]


def _rounded_once(mesh: Any, rank: int) -> None:
    """A rank's term of a weight's gradient of 16 bits, whose parts come before and behind the exchange."""
    torch.manual_seed(3)
    x, w, grad = (torch.randint(-9, 10, s).double() for s in ((1, 4, 64, 8), (4, 4, 3, 3), (1, 4, 64, 8)))
    own = x.clone()
    own[:, :, 32 * (1 - rank) : 32 * (2 - rank)] = 0
    want = torch.nn.grad.conv2d_weight(own, w.shape, grad, padding=1).bfloat16()
    a, b, g = (
        distribute_tensor(t.bfloat16(), mesh, [place])
        for t, place in ((x, Shard(2)), (w, Replicate()), (grad, Shard(2)))
    )
    made: Any = transconv.conv2d(a, b.requires_grad_(), padding=1)
    made.backward(g)
    assert torch.equal(b.grad.to_local(), want)  # type: ignore[union-attr, attr-defined]


def _normed(mesh: Any, axis: str) -> list[str]:
    """What differs from one process of a step through batch norms and max pools over rows of several
    ranks, of which one has more; of the gradients, the running statistics, and what follows in eval mode.
    Most values are below 0, so that a border that counts is seen."""

    def made() -> nn.Sequential:
        torch.manual_seed(7)
        model = nn.Sequential(
            nn.BatchNorm2d(4),
            nn.MaxPool2d(3, 2, 1),
            nn.BatchNorm2d(4, momentum=None),
            nn.MaxPool2d((2, 3), 1, (1, 0), (1, 2)),
        ).double()
        for norm in (model[0], model[2]):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias, -4.0)
        return model

    whole, model = made(), transconv.distributed.parallelize(made(), mesh, {axis: 0})
    x = torch.randn(3, 4, 9, 11, generator=torch.Generator().manual_seed(3)).double()
    place = [Shard("nchw".index(axis))]
    a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, place).requires_grad_()
    ours = sharded_modules.batch_norm, sharded_modules.pool
    assert all(sharded_modules.forward_of(m) in ours for m in model)
    want, got = whole(a), model(b)
    found = [] if got.placements[0].is_shard() else [f"{axis}: {got.placements}"]
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(5)).to(want)
    want.backward(grad)
    got.backward(distribute_tensor(grad, mesh, got.placements))
    pairs = {"result": (got, want), "gradient": (b.grad, a.grad)}
    pairs |= {
        f"gradient of {n}": (p.grad, q.grad)
        for (n, p), q in zip(model.named_parameters(), whole.parameters(), strict=True)
    }
    pairs |= {n: (p, q) for (n, p), q in zip(model.named_buffers(), whole.buffers(), strict=True)}
    with torch.no_grad():
        pairs["inference"] = model.eval()(b), whole.eval()(a)
    return found + [
        f"{axis}: {name}"
        for name, (p, q) in pairs.items()
        if not torch.allclose(p.full_tensor() if isinstance(p, DTensor) else p, q)
    ]


def _unbatched(mesh: Any) -> None:
    x, w = torch.randn(4, 8, 8), torch.randn(4, 4, 3, 3)
    made = transconv.conv2d(
        distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Replicate()])
    )
    assert made.placements == (Shard(1),)  # type: ignore[attr-defined]
    torch.testing.assert_close(made.full_tensor(), torch.conv2d(x, w))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_pair() -> None:
    for rank, found in enumerate(processes.run(2, sample)):
        assert isinstance(found, dict), found
        assert found.pop("page").splitlines() == [PAGE[1].body.splitlines()[1 + rank]]
        first, second, own, *told = found.pop("schedules")
        assert first != second and own == f"tuned {first}"
        assert (
            told
            == ["the tuned schedules of rank 0 differ from those of 1; all ranks use those of rank 0"][
                rank:
            ]
        )
        said = found.pop("other schedules")
        assert all(
            f"rank {at} has " in said and f"TRANSCONV_SCHEDULE='{text}'" in said
            for at, text in enumerate((first, second))
        ), said
        assert found.pop("calls") == [] and found.pop("aten") == []
        assert found.pop("norms and pools") == []
        assert len(found["invariant"]) == 1 and "rows on several ranks" in found.pop("invariant")[0]
        for name, words in {
            "disagree": "disagree about a sharded computation",
            "agree again": "no error",
            "plain": "plain tensor of size [4, 4, 3, 3]",
            "meshes": "DTensors of 2 meshes",
            "fused": "no error",
            "compiled": "torch.compiler.disable",
            "within": "dealt over ranks",
            "unbatched": "no error",
            "rounded once": "no error",
            "inference": "no error",
            "autocast": "no error",
            "twice differentiated": "no error",
            "axis": "expected one of n, d, h, w",
            "mesh dim": "the mesh has 1 dims",
            "name": "mesh dim 'rows'",
            "twice": "two axes along mesh dim 0",
            "shapes": "expected weight to be divisible by 3",
        }.items():
            assert (rank, name) == (1, "compiled") or words in found[name], (name, found[name])


@pytest.mark.slow
def test_dtensors_imported_behind_enable() -> None:
    """torch's own rule is wrong: it must not be there once a DTensor can exist."""
    script = (
        "import sys, transconv; transconv.enable('cpu'); "
        "assert 'torch.distributed.tensor' not in sys.modules; "
        "import torch.distributed.tensor; rules = sys.modules['transconv.distributed.rules']; "
        "on = lambda: int(rules._libraries.replacing is not None); "
        "print(on()); transconv.disable(); print(on())"
    )
    ran = programs.run(["-c", script], check=True)
    assert ran.stdout.split() == ["1", "0"]


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_probe() -> None:
    check((2,), cases.probed())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_drawn(shape: tuple[int, ...]) -> None:
    first = 1000 * shape[0] + 100 * len(shape)
    check(shape, [cases.drawn(seed, len(shape)) for seed in range(first, first + 100)])


def dies() -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(1, 4, 64), mesh, [Shard(2)])
    w = distribute_tensor(torch.randn(4, 4, 3), mesh, [Replicate()])
    transconv.conv1d(x, w)
    if mesh.get_local_rank() == 1:
        os._exit(1)
    return refusal(lambda: transconv.conv1d(x, w))


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named() -> None:
    told, gone = processes.run(2, dies, timeout=15)
    assert gone is None and "rank 0 could not" in told and "rank 1 in a sharded computation" in told
