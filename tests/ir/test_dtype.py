"""Element types: the rows of the table, their users, and a row from outside the package."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.outside import F8
from transconv import ir
from transconv.backend_triton.emitters import triton
from transconv.backend_triton.offline_compilation import CompileJob, Resources, compile_offline
from transconv.conv import ConvProblem, Prop, compiler
from transconv.conv.descriptor import results
from transconv.errors import ProblemError
from transconv.ir import DTYPES, DType, multiplied, type_named
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.quantized import qparams
from transconv.verify import benchdnn_job, data

FLOATS = multiplied("float")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_say_what_torch_says(dtype: DType) -> None:
    known = torch.finfo(data.torch_dtype(dtype))
    assert (known.bits, known.eps) == (dtype.bits, dtype.spacing)
    assert dtype.tiny == known.smallest_normal * known.eps / 2


@pytest.mark.parametrize("dtype", [t for t in DTYPES.values() if t.torch and t.kind == "int"], ids=str)
def test_integers_are_exact_up_to_their_digits(dtype: DType) -> None:
    assert torch.iinfo(data.torch_dtype(dtype)).max == 2**dtype.digits - 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_is_a_number_of_its_own(dtype: DType) -> None:
    bits, pattern = data.poison(data.torch_dtype(dtype))
    held = torch.tensor([pattern], dtype=bits).view(data.torch_dtype(dtype))
    assert held.isnan().all() and int(held.view(bits)) == pattern


def test_copies_are_the_type_itself() -> None:
    assert all(pickle.loads(pickle.dumps(t)) is t for t in DTYPES.values())
    assert type_named("s8") is ir.i8 and type_named("s32") is ir.i32


# -- addresses are no numbers of a tensor -----------------------------------------------------------

LANE = ir.Lane("i", 8, 1)
OUT = ir.Tensor("out", ("x",), (64,), ir.Layout.dense(ir.f32, (64,)))
TABLE = ir.Tensor("table", ("x",), (8,), ir.Layout.dense(ir.i32, (8,)))


def gathered(offset: ir.Expr) -> ir.Kernel:
    held, pid = ir.Var("held", ir.i32), ir.Var("pid")
    body = ir.seq(
        ir.Let(held, ir.Load(TABLE, LANE + pid, ir.TRUE)),
        ir.Store(OUT, offset, ir.Const(1.0, ir.f32), ir.TRUE),
    )
    return ir.Kernel("gathered", (TABLE, OUT), ir.For(pid, 1, body, kind="grid"))


def test_what_a_tensor_holds_is_no_address_until_it_is_cast() -> None:
    held = ir.Var("held", ir.i32)
    with pytest.raises(ir.VerifyError, match="type i32, which is no address"):
        ir.verify(gathered(held * 8))
    ir.verify(gathered(ir.Cast(held, ir.index) * 8))


def test_narrow_leaves_numbers_as_wide_as_they_are() -> None:
    from transconv.passes.scalar.index_width import narrow

    held = ir.Var("held", ir.i32)
    made = gathered(ir.Cast(held * 2, ir.index) * 8)  # nothing is known of it: 64 bits
    assert "index64(held*2)*8" in ir.readable(narrow(made))
    assert "(held * 2).to(tl.int64) * 8" in triton.emit(narrow(made))


def test_narrow_leaves_truths_as_they_are() -> None:
    from transconv.passes.scalar.index_width import narrow

    held, pid, known = ir.Var("held", ir.i32), ir.Var("pid"), ir.Var("known", ir.boolean)
    far = ir.Cast(held, ir.index) * 8  # nothing is known of it: 64 bits
    for truth in (ir.TRUE, known, LANE < 3):
        mask = ir.Select(far < 4, truth, far < 8) & (far >= 0)
        body = ir.seq(
            ir.Let(held, ir.Load(TABLE, LANE + pid, ir.TRUE)),
            ir.Let(known, LANE < 2),
            ir.Store(OUT, LANE, ir.Const(1.0, ir.f32), mask),
        )
        made = narrow(ir.Kernel("masked", (TABLE, OUT), ir.For(pid, 1, body, kind="grid")))
        ir.verify(made)
        assert "index64(held)*8 < 4" in ir.readable(made)


# -- a row from outside -----------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[DType]:
    yield DTYPES.add(F8)
    DTYPES.remove(F8.name)


def test_a_type_from_outside(short: DType) -> None:
    """Problems are read, kernels emitted, verified and interpreted with it."""
    assert short in results() and pickle.loads(pickle.dumps(short)) is short
    p = ConvProblem.parse("mb1ic2ih4oc2oh4kh3ph1 dt=f8e5m2z:f8e5m2z:f32 math=ieee")
    plan = compiler.build(p, Prop.FWD, TARGETS["sm_90"], Schedule.parse("mb.oh.ow:16 oc:4 ic:2 | fma"))
    assert "tl.float32" in plan.source and "tl.dot" not in plan.source
    (step,) = plan.steps
    kernel = compiler.lower(step.compute, step.schedule, TARGETS["sm_90"], "conv", "ieee")[-1][1]
    ir.verify(kernel)
    values = np.random.default_rng(0)
    given = {n: values.integers(-3, 4, s).astype(np.float16) for n, s in p.shapes.items() if n != "dst"}
    buffers = {n: x.ravel().copy() for n, x in given.items()} | {"dst": np.zeros(32, np.float32)}
    ir.run(kernel, ir.Memory(buffers))
    want = torch.conv2d(*(torch.from_numpy(x.astype(np.float64)) for x in given.values()), padding=1)
    assert np.array_equal(buffers["dst"], want.numpy().ravel())
    bits, pattern = data.poison(data.torch_dtype(short))
    assert torch.tensor([pattern], dtype=bits).view(data.torch_dtype(short)).float().isnan().all()


def test_a_type_from_outside_is_seen_by_what_was_imported_before(short: DType) -> None:
    """The new type is known to quantised calls and benchdnn's words, and compiles in a child process
    that has no such row. Torch's convolutions take no 8-bit floats, so the calls in their place refuse
    them."""
    element = data.torch_dtype(short)
    assert qparams.OPERANDS[element] is short and lower_call.RESULTS[element] is short
    assert short.name in benchdnn_job.DTYPES and element not in lower_call.DTYPES
    source = "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            "",
            "",
            "@triton.jit",
            "def moved(x, y):",
            "    at = tl.arange(0, 128)",
            "    tl.store(y + at, tl.load(x + at))",
            "",
        ]
    )
    chip = TARGETS["gfx942"]
    (found,) = compile_offline(
        [
            CompileJob(
                source,
                "moved",
                ((short.name, ()), (short.name, ())),
                chip.name,
                chip.backend,
                chip.arch,
                chip.warp_size,
            )
        ]
    )
    assert isinstance(found, Resources), found


def test_what_is_gone_is_seen_by_nobody() -> None:
    assert torch.float8_e5m2fnuz not in qparams.OPERANDS and F8.name not in benchdnn_job.DTYPES
    assert {t.name for t in lower_call.DTYPES.values()} < {*benchdnn_job.DTYPES}


def test_rounding_to_a_type_from_outside(short: DType) -> None:
    x = np.linspace(-60, 60, 999).astype(np.float16)
    want = torch.from_numpy(x).to(data.torch_dtype(short)).to(torch.float16).numpy()
    assert np.array_equal(ir.convert(x, short), want)


def test_a_type_that_is_gone_is_unknown() -> None:
    with pytest.raises(ProblemError, match="dt=f8e5m3 is unknown; expected one of .*f8e5m2.*, or"):
        ConvProblem.parse("mb1ic2ih4oc2oh4kh3ph1 dt=f8e5m3")
    with pytest.raises(ValueError, match="'f32' is taken"):
        DTYPES.add(ir.f32)
