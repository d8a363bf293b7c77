"""TMA boxes of tensors whose sizes are arguments: one kernel, the descriptors of each size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import transconv
from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.backend_triton import Miscompiled, Resources, compile_offline
from transconv.backend_triton.launch import bound_start
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, LayerRegistry, Prop, any_size, marked
from transconv.cost import AtSizes, estimate
from transconv.errors import Unsupported
from transconv.ir import BoxLoad, BoxStore, InterpError, Kernel, find, substitute, value_at
from transconv.runtime import Plan, build_compute, job_of, plan_cache
from transconv.schedule import Schedule, why_not
from transconv.schedule import legality as boxes
from transconv.selection.proposals import heuristics
from transconv.support import is_direct
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase
from transconv.verify.machine import executable

SM90 = Target.parse("sm_90")
POINTWISE = "mb2?ic16ih6?oc32oh6kh1 dt=f16 tag=nhwc"
DEPTHWISE = "g16mb2?ic16ih6?oc16oh6kh3ph1 dt=f16 tag=nhwc"
LAYERS = (  # a fused block, a window, a stride, a sum that ends at a size
    (POINTWISE, Prop.FWD, "mb.oh.ow:32 oc:16 ic:16 | mma | a=box b=box | c=box stages=2 warps=4"),
    (
        "mb2?ic16ih6?oc16oh6kh3ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:4 ow:8 oc:16 ic:16 | mma | a=box b=box | c=box swap=1 stages=2 warps=4",
    ),
    (
        "mb2?ic16ih6?oc16oh6kh3ph1 dt=bf16 tag=nhwc",
        Prop.BWD_D,
        "ih:4 iw:8 ic:16 oc:16 | mma | a=box b=box | swap=1 stages=2 warps=4",
    ),
    (
        "mb2?ic16ih7?oc16oh4kh3sh2ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:4 ow:8 oc:16 ic:16 | mma | a=gather b=box | c=box stages=2 warps=4",
    ),
    (POINTWISE, Prop.BWD_W, "ic:16 oc:16 mb.oh.ow:16 | mma | a=box b=box | c=box stages=2 warps=4"),
    (
        POINTWISE,
        Prop.FWD,
        "mb.oh.ow:32 oc:16 ic:16 | mma | a=box b=box | c=box programs=3 stages=2 warps=4",
    ),
    (
        DEPTHWISE,
        Prop.FWD,
        "mb.oh:8 ow:4 kw:3 g:16 | fma | a=gather b=gather | regs=ow.kw stages=1 warps=4",
    ),
    (
        DEPTHWISE,
        Prop.BWD_W,
        "mb.oh:8 ow:4 kh:3 kw:3 g:16 | fma | a=gather b=gather | regs=ow.kh.kw late=1 stages=1 warps=4",
    ),
    (
        "mb2?ic16ih8?%2oc16oh4kh3sh2ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:4 ow:8 oc:16 ic:16 | mma | a=box b=box | c=box swap=1 stages=2 warps=4",
    ),
)
NAMES = (
    "pointwise",
    "window",
    "gradient",
    "strided",
    "weight",
    "persistent",
    "registers",
    "kept sums",
    "planes",
)


def layer(text: str, prop: Prop) -> Compute:
    plain, names = marked(text)
    (compute,) = any_size(ConvProblem.parse(plain), prop, names)
    return compute


@cache
def built(at: int, target: Target = SM90) -> tuple[Compute, Plan]:
    text, prop, schedule = LAYERS[at]
    compute = layer(text, prop)
    return compute, build_compute(compute, target, Schedule.parse(schedule))


def read_back(compute: Compute, step: Any) -> Any:
    """A step, as a record of its plan has it."""
    return plan_cache._read(
        plan_cache._step(step),
        SM90,
        lambda: pytest.fail("lowered"),
        0,
        {t.name: t for t in compute.tensors},
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("at", range(len(LAYERS)), ids=NAMES)
def test_drawn_sizes_edges_first(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the IR's interpreter, which reads beyond no tensor, and in Triton's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compute, plan = built(at)
    kernel = plan.steps[0].kernel
    assert bool(find(kernel, BoxLoad)) == ("box" in LAYERS[at][2])
    assert bool(find(kernel, BoxStore)) == ("c=box" in LAYERS[at][2])
    _, run = built(at, executable(SM90, "cpu"))
    for n, drawn in enumerate(sizes.drawn(compute, 5)):
        case = ComputationCase(compute.at(**drawn))
        judged = case.interpreted(kernel.at(drawn)) if n < 3 else case.launched(run, "cpu")
        assert not judged.problem, (drawn, judged.problem)


@pytest.mark.slow
def test_weights_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes are numbers; copies of images are in test_sized_copies.py."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text, prop, schedule = LAYERS[NAMES.index("registers")]
    compute, packed = layer(text, prop), schedule.replace("regs=", "pack=b regs=")
    plan = build_compute(compute, executable(SM90, "cpu"), Schedule.parse(packed))
    assert [s.does for s in plan.steps] == ["pack", "compute"]
    for drawn in ({"MB": 1, "IH": 1, "IW": 1}, {"MB": 3, "IH": 4, "IW": 9}):
        assert not ComputationCase(compute.at(**drawn)).launched(plan, "cpu").problem, drawn


@pytest.mark.every(2)
@pytest.mark.parametrize("at", [1, NAMES.index("planes")])
def test_kernels_are_read_back(at: int) -> None:
    compute = built(at)[0]
    for stage, kernel in transconv.lower(compute, LAYERS[at][2], "sm_90"):
        assert Kernel.parse(str(kernel)) is kernel, stage


@pytest.mark.slow
def test_phases_store_planes_of_any_size() -> None:
    """Some of which have a row less; a size that would leave a phase without rows is refused."""
    plain, names = marked("mb2?ic16ih8?oc16oh4kh3sh2ph1 dt=f16 tag=nhwc")
    words = "mma | a=box b=gather | c=box swap=1 stages=2 warps=4"
    schedule = Schedule.parse(f"qh:4 qw:8 ic:16 oc:16 | {words}")
    for compute in any_size(ConvProblem.parse(plain), Prop.BWD_D, names):
        kernel = build_compute(compute, SM90, schedule).steps[0].kernel
        assert find(kernel, BoxStore) and compute.named is not None
        for images, h, w in ((1, 2, 2), (2, 9, 5), (1, 4, 19)):
            drawn = {"MB": images, "IH": h, "IW": w}
            assert not ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn)).problem, drawn
        assert compute.named.why_not({"MB": 1, "IH": 1, "IW": 2}) == "IH=1 is not in 2..16384"


def test_planes_of_an_odd_size_are_refused() -> None:
    """Planted: a kernel for multiples of 2 gets another size, whose result it does not fill."""
    _compute, plan = built(NAMES.index("planes"))
    drawn = {"MB": 1, "IH": 6, "IW": 7}
    assert plan.required is not None
    assert plan.required.sizes.why_not(drawn) == "(IW % 2) == 0 does not hold for IW=7"
    free = layer(LAYERS[NAMES.index("strided")][0], Prop.FWD)
    with pytest.raises(InterpError, match="buffer of dst"):
        ComputationCase(free.at(**drawn)).interpreted(plan.steps[0].kernel.at(drawn))


STRIDED = "mb2?ic16ih7?oc16oh4kh3sh2ph1 dt=f16 tag=nhwc"
STEPPED = (  # a step of 2, of 3 with a dilation, along one of two dimensions, in three dimensions, a sum
    (STRIDED, Prop.FWD, "oh:4 ow:8 oc:16 ic:16 | mma | a=box b=box | c=box swap=1 stages=2 warps=4"),
    (
        "mb2?ic16ih19?oc16oh5kh3sh3ph1dh1 dt=f16 tag=nhwc",
        Prop.FWD,
        "mb:2 oh:2 ow:4 oc:16 ic:16 | mma | a=box b=box | swap=1 stages=2 warps=4",
    ),
    (
        "mb2?ic16ih7?iw7?oc16oh7ow4kh3kw3sw2ph1pw1 dt=bf16 tag=nhwc",
        Prop.FWD,
        "oh:4 ow:4 oc:16 ic:16 | mma | a=box b=box | swap=1 stages=2 warps=4",
    ),
    (
        "mb2?ic16id5?ih5?iw5?oc16od3oh3ow3kd3kh3kw3sd2sh2sw2pd1ph1pw1 dt=bf16 tag=axb",
        Prop.FWD,
        "od:2 oh:2 ow:4 oc:16 ic:16 | mma | a=box b=box | swap=1 stages=2 warps=4",
    ),
    (
        "mb2?ic64ih9?oc64oh5kh3sh2ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:4 ow:16 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 programs=3 stages=2 warps=4 via=gluon",
    ),
)


@pytest.mark.every(2)
@pytest.mark.skipif(not is_direct(), reason="this release of Triton has no such descriptors")
@pytest.mark.parametrize(("text", "prop", "schedule"), STEPPED)
def test_boxes_take_every_second_position(text: str, prop: Prop, schedule: str) -> None:
    """Of even and odd sizes, the least first, with one kernel."""
    compute = layer(text, prop)
    assert why_not(Schedule.parse(schedule), compute, SM90) is None
    kernel = build_compute(compute, SM90, Schedule.parse(schedule)).steps[0].kernel
    (src,) = (t for t in kernel.params if t.every)
    assert src.name == "src" and max(src.every) > 1 and not src.planes
    for drawn in sizes.drawn(compute, 6):
        judged = ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn))
        assert not judged.problem, (drawn, judged.problem)


def stepped() -> tuple[Compute, Plan]:
    compute = layer(*STEPPED[0][:2])
    return compute, build_compute(compute, SM90, Schedule.parse(STEPPED[0][2]))


@pytest.mark.skipif(not is_direct(), reason="as above")
def test_a_box_that_forgets_its_step_is_found_out() -> None:
    """Planted: the kernel of a descriptor in steps of 1."""
    compute, plan = stepped()
    kernel, drawn = plan.steps[0].kernel, {"MB": 1, "IH": 7, "IW": 8}
    near = {t: replace(t, every=()) for t in kernel.params}
    boxes = {x: replace(x, tensor=near[x.tensor]) for x in find(kernel, BoxLoad)}
    wrong = replace(kernel, params=tuple(near.values()), body=substitute(kernel.body, boxes))
    assert ComputationCase(compute.at(**drawn)).interpreted(wrong.at(drawn)).problem


@pytest.mark.slow
@pytest.mark.skipif(not is_direct(), reason="as above")
def test_stepped_boxes_are_read_back_and_lie_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    compute, plan = stepped()
    for stage, kernel in transconv.lower(compute, STEPPED[0][2], "sm_90"):
        assert Kernel.parse(str(kernel)) is kernel, stage
    step = plan.steps[0]
    again = read_back(compute, step)
    assert again.triton.boxes == step.triton.boxes
    assert [b[0].every for b in step.triton.boxes if b and b[0].every] == [(1, 2, 2, 1)]
    assert "in boxes of [1, 4, 8, 16] of every [1, 2, 2, 1]" in step.source


@pytest.mark.skipif(not is_direct(), reason="as above")
def test_what_cannot_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter and its own launch, which would fetch neighbours, and other releases."""
    compute, plan = stepped()
    run = plan.steps[0].triton
    assert run.sizes is not None
    with pytest.raises(Unsupported, match=r"every \[1, 2, 2, 1\] position of src, which Triton's interp"):
        ComputationCase(compute.at(MB=1, IH=5, IW=5)).launched(plan, "cpu")
    monkeypatch.setattr(bound_start, "entry", lambda *_: None)
    with pytest.raises(Unsupported, match="Triton's own launch cannot"):
        run.starting(SimpleNamespace(function="f", packed_metadata="p"))
    monkeypatch.setattr(boxes, "is_direct", lambda: False)
    reason = boxes.why_not_a(Schedule.parse(STEPPED[0][2]), compute, SM90)
    assert reason is not None and "has no such descriptors" in reason


class Map:
    """As large as what Triton makes for a descriptor: 128 bytes with a header, and the driver's 128."""

    __slots__ = tuple(f"word{n}" for n in range(30))


def test_the_driver_gets_steps_and_what_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Innermost first; a box reaches over the positions between those that it takes."""
    asked: list[Any] = []

    def encode(*given: Any) -> int:
        asked.extend([*x] if hasattr(x, "_length_") else getattr(x, "value", x) for x in given)
        return int(len(asked) > 12)

    monkeypatch.setattr(bound_start, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    made = Map()
    lying = (3, 7, 9, 64), (7 * 9 * 64, 9 * 64, 64, 1)
    bound_start._step(made, 4096, (3, 2, 10, [1, 4, 8, 64]), lying, (1, 2, 2, 1))
    assert asked == [
        id(made) + 128,
        10,
        4,
        4096,
        [64, 9, 7, 3],
        [128, 1152, 8064],
        [64, 16, 8, 1],
        [1, 2, 2, 1],
        0,
        3,
        2,
        0,
    ]
    with pytest.raises(bound_start.NotEncoded, match="returned 1 for a tensor of"):
        bound_start._step(made, 4096, (3, 2, 10, [1, 4, 8, 64]), lying, (1, 2, 2, 1))


def test_a_kernel_whose_descriptor_is_refused_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is known to be wrong: what runs first results takes the next best schedule."""
    run = built(1)[1].steps[0].triton

    def encoding(meta: Any, box: Any) -> Any:
        def encode(address: int, lying: Any) -> list[Any]:
            raise bound_start.NotEncoded("the driver said 1")

        return encode

    monkeypatch.setattr(bound_start, "encoding", encoding)
    monkeypatch.setattr(bound_start, "entry", lambda *_: (lambda *args: None, "xyz"))
    start = run.starting(SimpleNamespace(name=run.function, function="f", packed_metadata="p"))
    tensors = [SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48)]
    with pytest.raises(Miscompiled, match="the driver said 1") as told:
        start((2, 5, 6), run.numbers(2, 5, 6)[0], tensors, "stream")
    assert told.value.function == run.function


MERGED = "g8mb2?ic32ih6?oc32oh6kh3ph1 dt=f16 tag=nhwc"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("prop", "schedule"),
    [
        (Prop.FWD, "oh:4 ow:8 oc:32 ic:32 | mma | a=box b=gather | c=box merge=8 swap=1 stages=2 warps=4"),
        (Prop.BWD_D, "mb.ih.iw:32 ic:16 oc:16 | mma | a=gather b=gather | merge=4 stages=2 warps=4"),
        (Prop.BWD_W, "ic:16 oc:16 mb.oh.ow:32 | mma | a=gather b=gather | merge=4 stages=2 warps=4"),
    ],
)
def test_groups_are_merged(prop: Prop, schedule: str) -> None:
    compute = layer(MERGED, prop)
    kernel = build_compute(compute, SM90, Schedule.parse(schedule)).steps[0].kernel
    for drawn in sizes.drawn(compute, 4):
        judged = ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn))
        assert not judged.problem, (drawn, judged.problem)


def test_estimates_count_the_tiles_of_merged_groups() -> None:
    """They are the model's own for the size."""
    words = "oh:4 ow:8 oc:32 ic:32 | mma | a=gather b=gather | merge=8 stages=2 warps=4"
    compute, schedule = layer(MERGED, Prop.FWD), Schedule.parse(words)
    found = AtSizes(schedule, compute, SM90)
    for drawn in ({"MB": 8, "IH": 56, "IW": 56}, {"MB": 3, "IH": 99, "IW": 17}):
        counts = [value_at(c, drawn) for c in found.counts]
        at = estimate(schedule, replace(compute.at(**drawn)), SM90)
        assert found.us(*counts) == pytest.approx(at, rel=0.02), drawn


def test_estimates_count_what_is_added_behind_a_sum() -> None:
    """A residual has as many bytes as the result."""
    text, names = marked("mb8?ic64ih56?oc256oh56kh1 dt=bf16 tag=nhwc")
    (compute,) = any_size(ConvProblem.parse(text), Prop.FWD, names, Epilogue.parse("add:bf16:per_tensor"))
    schedule = Schedule.parse(
        "mb.oh.ow:128 oc:128 ic:64 | mma | a=box b=box | c=box behind=box swap=1 "
        "programs=132 stages=6 warps=4 via=gluon"
    )
    found = AtSizes(schedule, compute, SM90)
    for drawn in ({"MB": 8, "IH": 56, "IW": 56}, {"MB": 3, "IH": 99, "IW": 170}):
        counts = [value_at(c, drawn) for c in found.counts]
        at = estimate(schedule, compute.at(**drawn), SM90)
        assert found.us(*counts) == pytest.approx(at, rel=0.02), drawn


def test_a_mask_that_ends_at_the_example_is_found_out() -> None:
    """Planted: descriptors of the example for all sizes."""
    compute, plan = built(0)
    kernel = plan.steps[0].kernel
    fixed = {t: replace(t, extents=()) for t in kernel.params}
    body = kernel.body
    wrong = replace(kernel, params=tuple(fixed.values()), body=substitute(body, fixed))
    drawn = {"MB": 3, "IH": 9, "IW": 11}
    with pytest.raises(Exception, match="memory|elements|shape"):
        judged = ComputationCase(compute.at(**drawn)).interpreted(wrong.at(drawn))
        assert not judged.problem, f"elements differ: {judged.problem}"


@pytest.mark.parametrize(
    ("text", "prop", "schedule", "reason"),
    [
        (
            "mb2?ic16ih7?oc16oh4kh3sh2ph1 dt=f16 tag=nhwc",
            Prop.FWD,
            "mb:1 oh:256 ow:1 oc:16 ic:16 | mma | a=box b=box | swap=1 stages=2 warps=4",
            "the box reaches 512 along src_2, at most 256",
        ),
        (
            "mb2?ic16ih19?oc16oh2kh3sh9ph1 dt=f16 tag=nhwc",
            Prop.FWD,
            LAYERS[1][2],
            "src_2 as oh*9 + kh - 1, a box steps by 1 and IH is no multiple of 9",
        ),
        (
            "mb2?ic20ih6?oc16oh6kh1 dt=f16 tag=nhwc",
            Prop.FWD,
            LAYERS[0][2],
            "which is not a multiple of 16 bytes",
        ),
        ("mb2?ic16ih6?oc16oh6kh1 dt=f16 tag=nchw", Prop.FWD, LAYERS[1][2], "not a multiple of 16 bytes"),
        (POINTWISE, Prop.BWD_W, LAYERS[4][2].replace("c=box", "split_k=4"), "boxes have no mask"),
        (
            "mb2?ic64ih6?oc64oh6kh3ph1 dt=f16 tag=nhwc",
            Prop.BWD_W,
            "ic:64 oc:64 oh:2 ow:8 | mma | a=box b=box | split_k=2 programs=9 stages=2 warps=4 via=gluon",
            "parts that may be empty",
        ),
    ],
)
def test_what_has_no_descriptor_is_refused(text: str, prop: Prop, schedule: str, reason: str) -> None:
    assert reason in (why_not(Schedule.parse(schedule), layer(text, prop), SM90) or "legal")


def test_a_condition_makes_strides_multiples_of_16_bytes() -> None:
    text = """compute product
        sizes M=32 in 1..4096, K=64 in 8..4096, K % 8 == 0
        tensor X f16 [M, K]
        tensor W f16 [64, K]
        tensor Y f16 [M, 64]
        axes m=M n=64 | k=K
        read x = X[m, k]
        read w = W[n, k]
        store Y[m, n] = sum(x*w; k)"""
    schedule = Schedule.parse("m:32 n:16 k:16 | mma | a=box b=box | c=box stages=2 warps=4")
    assert why_not(schedule, parse(text), SM90) is None
    reason = why_not(schedule, parse(text.replace(", K % 8 == 0", "")), SM90)
    assert reason is not None and "has stride K, which is not a multiple of 16 bytes" in reason
    compute = parse(text)
    kernel = build_compute(compute, SM90, schedule).steps[0].kernel
    for drawn in ({"M": 1, "K": 8}, {"M": 33, "K": 40}):
        assert not ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn)).problem


def test_the_longest_stride_is_a_requirement() -> None:
    """A descriptor has 40 bits for it."""
    long = layer("mb2?ic16384ih6?oc16oh6kh3ph1 dt=f32 tag=nhwc", Prop.FWD)
    plan = build_compute(long, SM90, Schedule.parse(LAYERS[1][2]))
    assert plan.required is not None and "1099511627775" in str(plan.required.sizes)
    assert "1099511627775" not in str(built(1)[1].required)
    assert plan.required.sizes.why_not({"MB": 1, "IH": 16384, "IW": 16384}).endswith("IH=16384 IW=16384")


def test_descriptors_are_made_once_for_a_size_and_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = built(1)
    run = plan.steps[0].triton
    assert run.sizes is not None and sum(b is not None for b in run.boxes) == 3
    described: list[tuple[int, ...]] = []
    started: list[tuple[Any, ...]] = []

    def encoding(meta: Any, box: Any) -> Any:
        def encode(address: int, lying: Any) -> list[Any]:
            described.append(lying[0])
            return [lying[0], meta]

        return encode

    monkeypatch.setattr(bound_start, "encoding", encoding)
    monkeypatch.setattr(bound_start, "entry", lambda *_: (lambda *args: started.append(args), "xyz"))
    start = run.starting(SimpleNamespace(function="f", packed_metadata="p"))
    tensors = [SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48)]
    for images in (2, 3, 2, 2):
        start((images, 5, 6), run.numbers(images, 5, 6)[0], tensors, "stream")
    assert len(described) == 5, "two for each of two sizes, and the weight's"
    assert {s for s in described if len(s) == 4} == {(2, 5, 6, 16), (3, 5, 6, 16)}
    assert started[0][-9:] == ((2, 5, 6, 16), "x", (16, 144), "y", (2, 5, 6, 16), "z", 2, 5, 6)
    assert started[0] == started[2] == started[3] != started[1]
    monkeypatch.setattr(start.encoder, "most", 8)
    for images in range(1, 20):
        start((images, 5, 6), run.numbers(images, 5, 6)[0], tensors, "stream")
    assert start.encoder is not None and len(start.encoder.calls) <= 8
    assert all(len(known) <= 8 for known in start.encoder.maps)


def test_plans_lie_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    compute, plan = built(1)
    step = plan.steps[0]
    again = read_back(compute, step)
    assert again.triton.boxes == step.triton.boxes
    assert any(b and b[0].extents for b in step.triton.boxes)
    compute, plan = built(NAMES.index("planes"))
    step = plan.steps[0]
    again = read_back(compute, step)
    assert again.triton.boxes == step.triton.boxes
    assert any(b and b[0].pitches for b in step.triton.boxes)


def test_tensors_between_multiples_of_16_bytes_have_kernels_without_boxes() -> None:
    problem = ConvProblem.parse("mb2ic64ih8oc64oh8kh1 dt=bf16 tag=nhwc")
    for aligned in (True, False):
        registry = LayerRegistry(problem, Prop.FWD, SM90, Epilogue(), aligned, False)
        registry.choose((8, 56, 56), "now")
        boxes = [bool(s.triton.boxes) for k in registry.there.values() for s in k.plan.steps]
        assert any(boxes) == aligned, [str(k.plan.schedule) for k in registry.there.values()]


def test_proposals_have_boxes() -> None:
    problem = ConvProblem.parse("mb8ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc")
    work = ConvWorkload(problem, Prop.FWD, Epilogue(), frozenset({"mb", "ih", "iw"}))
    (compute,) = work.computations
    found = heuristics.candidates(compute, SM90)
    assert any(s.a == "box" and s.c == "box" for s in found) and any(s.a == "gather" for s in found)
    assert all(why_not(s, compute, SM90) is None for s in found)


@pytest.mark.slow
def test_the_machine_code_moves_boxes() -> None:
    (found,) = compile_offline([job_of(built(1)[1].steps[0], SM90)])
    assert isinstance(found, Resources), found
    assert {"UTMALDG", "UTMASTG"} <= found.words.keys() and not found.spill_bytes
