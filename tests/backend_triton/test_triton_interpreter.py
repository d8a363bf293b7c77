"""Generated kernels, run by Triton's interpreter and compared with the reference bit for bit: the data
are small integers. The result, and memory that no element maps to, hold NaN before the run."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec, module_from_spec

import numpy as np
import pytest

from transconv.backend_triton.launch.interpreter import place_of, prepare_interpreter, product
from transconv.backend_triton.launch.jit_module import load
from transconv.cli.run import execute
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.support import knobs
from transconv.target.records import TARGETS
from transconv.verify.machine import executable

pytestmark = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
INTERPRETER = TARGETS["interpreter"]

PROBLEMS = (
    "mb2ic8ih7oc16oh7kh3ph1",
    "mb1ic17ih6iw5oc19oh6ow5kh3kw3ph1pw1 tag=nhwc",  # no block divides its axis
    "mb2ic16ih9oc8oh5kh3sh2ph1 tag=nhwc",  # stride phases
    "mb1ic4ih11oc6oh4kh2sh3ph0dh1",  # stride and dilation without a common divisor
    "mb1ic8ih8oc8oh2kh3sh4ph2dh3 tag=nhwc",  # with one: phases that no tap meets
    "mb1ic3ih9oc8oh5kh3sh2ph0",  # padding on the high side alone
    "g4mb2ic8ih6oc12oh6kh3ph1 tag=nhwc",  # groups
    "g6mb1ic6ih8oc6oh8kh3ph1 tag=nhwc",  # depthwise
    "mb3ic32ih4oc32oh4kh1 tag=nhwc",  # pointwise
    "mb2ic5iw20oc7ow11kw4sw2pw2",  # 1D
    "mb1ic4id4ih5iw6oc4od2oh5ow3kd3kh1kw3sd2sh1sw2pd1ph0pw1 tag=ndhwc",  # 3D
    "mb1ic20ih5oc20oh5kh3ph1 tag=nChw16c:OIhw16i16o:nChw16c",  # blocked, with padded channels
)


@pytest.mark.every(14)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_equals_torch(text: str, dtype: str) -> None:
    for prop in Prop:
        found = execute(ConvProblem.parse(text).with_dtype(dtype), prop, INTERPRETER)
        assert found.right, f"{prop} {text} {dtype} {found.compiled.schedule}: {found.problem}"


@pytest.mark.parametrize("prop", list(Prop))
def test_f64(prop: Prop) -> None:
    found = execute(ConvProblem.parse("mb2ic6ih7oc5oh4kh3sh2ph1 dt=f64"), prop, INTERPRETER)
    assert found.right, found.problem
    assert found.max_error == 0


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("prop", "schedule"),
    [
        (Prop.FWD, "mb.oh.ow:16 oc:16 ic:16 | mma | group_m=2"),
        (Prop.FWD, "mb.oh.ow:32 oc:16 kw.ic:16 | mma | swap=1"),
        (Prop.FWD, "mb.oh.ow:32 oc:16 ic:16 | mma | split_k=3"),
        (Prop.FWD, "mb.oh.ow:16 oc:32 ic:16 | mma | split_k=2 reduce=atomic"),
        (Prop.FWD, "mb.oh.ow:32 oc:32 ic:16 | mma | order=ic.kh.kw unroll=1"),
        (Prop.FWD, "mb.oh.ow:16 oc:4 ic:4 | fma"),
        (Prop.BWD_D, "mb.qh.qw:16 ic:16 oc:16 | mma | split_k=2"),
        (Prop.BWD_W, "kw.ic:32 oc:16 mb.oh.ow:32 | mma | split_k=2"),
    ],
)
def test_schedules_of_a_chip(prop: Prop, schedule: str) -> None:
    """Words of schedules for GPUs: small tiles, partial tiles and split sums."""
    images = 1 if prop is Prop.BWD_D else 2  # its stride phases are several kernels
    problem = ConvProblem.parse(f"mb{images}ic20ih9oc24oh5kh3sh2ph1 tag=nhwc")
    target = executable(TARGETS["sm_90"], "cpu")
    found = execute(problem, prop, target, Schedule.parse(schedule))
    assert found.right, found.problem


@pytest.mark.parametrize(
    ("text", "prop", "schedule"),
    [
        (
            "mb2ic32ih8oc32oh8kh3ph1",
            Prop.FWD,
            "mb:2 oh:4 ow:8 oc:64 ic:32 | mma | a=box b=box c=box swap=1 programs=2",
        ),
        (
            "mb2ic32ih9oc32oh5kh3sh2ph1",
            Prop.BWD_D,
            "mb:2 qh:4 qw:8 ic:64 oc:32 | mma | a=box b=box swap=1",
        ),
    ],
)
def test_boxes(text: str, prop: Prop, schedule: str) -> None:
    """Tiles that the copy engine moves: what lies outside of a tensor arrives as zeros."""
    problem = ConvProblem.parse(f"{text} dt=f16 tag=nhwc")
    target = executable(TARGETS["sm_90"], "cpu")
    found = execute(problem, prop, target, Schedule.parse(schedule))
    assert "_box.load" in found.compiled.source
    assert found.right, found.problem


@pytest.mark.parametrize("value", [99.0, float("nan")])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The check itself: a result that differs in one element, or misses one, is no success."""
    from transconv.verify.case import ProblemCase

    honest = ProblemCase.launch

    def launch(case: ProblemCase, compiled: object) -> None:
        honest(case, compiled)  # type: ignore[arg-type]
        case.tensors["dst"].view[0, 1, 2, 3] = value

    monkeypatch.setattr(ProblemCase, "launch", launch)
    problem = ConvProblem.parse("mb1ic4ih5oc4oh5kh3ph1")
    assert execute(problem, Prop.FWD, INTERPRETER).problem == "1 of 100 elements are wrong"


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("prop", "blocks"),
    [
        (Prop.FWD, "ow:8 oc:8 ic:8 | fma | split_k=2"),
        (Prop.BWD_D, "iw:8 ic:8 oc:8 | fma | split_k=2"),
        (Prop.BWD_W, "ic:8 oc:8 ow:8 | fma | split_k=2"),
    ],
)
def test_kernels_that_wait_for_those_before(prop: Prop, blocks: str) -> None:
    """A run leaves no dependency open; the first kernel writes partial sums and lets the next one
    launch early."""
    early = replace(INTERPRETER, features=INTERPRETER.features | {"early"})
    problem = ConvProblem.parse("mb2ic16ih5oc16oh5kh3ph1")
    found = execute(problem, prop, early, Schedule.parse(blocks))
    first, *_ = found.compiled.steps
    assert "gdc_wait()" in first.source and "gdc_launch_dependents()" in first.source
    assert found.right, found.problem


def test_the_line_of_a_function_is_triton_s() -> None:
    from triton.runtime import jit

    if not hasattr(jit, "get_jit_fn_file_line"):
        pytest.skip("this release of Triton has no such function")
    JITFunction, get_jit_fn_file_line = jit.JITFunction, jit.get_jit_fn_file_line
    text = "import triton\n\n\n@triton.jit\n\n@triton.jit\ndef f(x,\n      y):\n    pass\n"
    for function in (load(text, "f").fn.fn, load(text.replace("@triton.jit\n\n", ""), "f").fn):
        assert place_of(function) == get_jit_fn_file_line(JITFunction(function))
    assert place_of(place_of) == get_jit_fn_file_line(JITFunction(place_of))


def test_types_and_shapes_are_triton_s() -> None:
    """Beside a second copy of Triton's module, with its own constructors, each shape twice."""
    from triton.language import core

    prepare_interpreter()
    spec = find_spec("triton.language.core")
    assert spec is not None and spec.loader is not None
    own = module_from_spec(spec)
    spec.loader.exec_module(own)
    found = []
    for of in (own, core):
        found.append([])
        shapes = [4], [2, 8], of.tuple([1, 4]), [of.constexpr(4)], (4,), [], [3], [0], [4.0], [True]
        for shape in 2 * shapes:
            try:
                made = of.block_type(of.float32, shape)
            except Exception as refused:
                found[-1].append(f"{type(refused).__name__}: {refused}")
            else:
                tile = of.tensor(None, made.with_element_ty(of.int8))
                found[-1].append((str(made), made.shape.values, made.numel, str(tile), tile.numel.value))
                assert made == of.block_type(of.float32, made.shape) and tile.shape[0] == made.shape[0]
        number = of.tensor(None, of.float32)
        found[-1].append((str(number), len(number.shape), number.numel.value))
    assert found[0] == found[1] and len({*map(str, found[0])}) > 8


def test_products_add_up_all_rows_alike() -> None:
    """BLAS may add up a row in an order that its place decides, which kernels for any sizes do not."""
    rng = np.random.default_rng(0)
    for m, k, n in ((16, 16, 16), (64, 128, 32), (512, 32, 16)):
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
        made, order = product(a, b, np.float32), rng.permutation(m)
        assert (product(a[order], b, np.float32) == made[order]).all()
        assert (product(a, np.asfortranarray(b), np.float32) == made).all()
        np.testing.assert_allclose(made, a.astype(np.float64) @ b.astype(np.float64), rtol=0, atol=1e-4)
