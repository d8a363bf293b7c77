"""Plans of several kernels: what they launch, and on which memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from tests.stages import shapes
from transconv import runtime
from transconv.backend_triton import KernelStart
from transconv.compute import Alone, parse
from transconv.conv import CompiledDirection, ConvWorkload, Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost import estimate
from transconv.errors import TensorError
from transconv.ir import bf16, convert, f32, tf32
from transconv.runtime import check_records, first_run_check, steps, torch_internals
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.support import knobs
from transconv.target.records import TARGETS

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
# What a kernel for the chip is in Triton's interpreter: its 16-bit operands need casts.
CHIP = replace(
    TARGETS["sm_90"],
    name="sm_90-interpreted",
    upcast16=True,
    features=TARGETS["sm_90"].features - {"wgmma"},
    precisions=TARGETS["interpreter"].precisions,
)
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")

Tensors = dict[str, torch.Tensor]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "obeyed"),
    [
        ("mb2ic32ih8oc32oh8kh3ph1 dt=f32", FWD, None, {"precision"}),
        ("mb2ic32ih8oc32oh8kh3ph1 dt=f32 math=ieee", BWD_W, None, {"precision"}),
        ("mb2ic32ih8oc32oh8kh3ph1 dt=bf16", FWD, None, set()),
        ("g32mb2ic32ih8oc32oh8kh3ph1 dt=f32", FWD, None, set()),
        ("g32mb8ic64ih28oc64oh28kh3ph1 dt=f32", BWD_D, "fma", {"precision"}),
        ("g32mb2ic32ih8oc32oh8kh3ph1 dt=f32", BWD_W, None, set()),
        (
            "mb4ic16ih16oc16oh16kh3ph1 dt=bf16:f32:bf16",
            BWD_W,
            "ic:16 oc:16 oh.ow:32 split_k=4 reduce=atomic",
            {"deterministic"},
        ),
        (
            "mb4ic16ih16oc16oh16kh3ph1 dt=f32",
            BWD_W,
            "ic:16 oc:16 oh.ow:32 split_k=4 reduce=atomic",
            {"deterministic", "precision"},
        ),
    ],
)
def test_which_of_torchs_switches_matter(
    text: str, prop: Prop, schedule: str | None, obeyed: set[str]
) -> None:
    made = compiler.plan(ConvProblem.parse(text), prop, TARGETS["sm_90"], schedule)
    assert made.obeys == obeyed
    if "precision" not in obeyed and "f32" in text:  # the other switch has no other kernel to offer
        other = replace(made.problem, math="ieee")
        again = compiler.plan(other, prop, TARGETS["sm_90"], schedule)
        assert [s.schedule for s in again.steps] == [s.schedule for s in made.steps]


def tensors_of(p: ConvProblem, prop: Prop, seed: int = 0) -> Tensors:
    """Contiguous operands of small whole numbers, and a result of NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if p.src.dtype.name == "bf16" else torch.float16
    made = {n: torch.randint(-2, 3, s, generator=generator).to(dtype) for n, s in shapes(p).items()}
    made[prop.result].fill_(float("nan"))
    return made


def answer(p: ConvProblem, prop: Prop, t: Tensors) -> torch.Tensor:
    return exact(p, prop, t).to(torch.bfloat16 if p.src.dtype.name == "bf16" else torch.float16)


def exact(p: ConvProblem, prop: Prop, t: Tensors) -> torch.Tensor:
    t = {n: torch.zeros_like(x).double() if n == prop.result else x.double() for n, x in t.items()}
    if prop is not FWD:
        t[prop.result].requires_grad_()
    y = CONVOLVE[p.ndims - 1](t["src"], t["wei"], None, p.stride, p.pad_lo, p.dilation, p.g)
    return y if prop is FWD else torch.autograd.grad(y, t[prop.result], t["dst"])[0]


def plan(text: str, prop: Prop, schedule: str, epilogue: str = "") -> CompiledDirection:
    problem = ConvProblem.parse(f"{text}{'' if 'dt=' in text else ' dt=f16'} tag=abx")
    return compiler.build(problem, prop, CHIP, Schedule.parse(schedule), Epilogue.parse(epilogue))


BOXED = "mma | a=box b=box | swap=1"
PACKED = [
    ("mb2ic32ih8oc32oh8kh3ph1", FWD, f"mb:2 oh:4 ow:8 oc:64 ic:32 | {BOXED} c=box pack=a.b.c programs=2"),
    ("mb2ic19ih9iw5oc21oh9ow5kh3kw3ph1pw1", FWD, f"oh:4 ow:8 oc:64 ic:32 | {BOXED} pack=a.b"),
    ("g2mb2ic32ih8oc64oh8kh3ph1", FWD, "mb.oh.ow:32 oc:32 ic:16 | mma | pack=a.b.c"),
    ("mb2ic32ih9oc32oh5kh3sh2ph1", BWD_D, f"mb:2 qh:4 qw:8 ic:64 oc:32 | {BOXED} pack=a.b.c"),
    ("mb2ic32ih9oc32oh5kh3sh2ph1", BWD_D, f"mb:2 qh:4 qw:8 ic:64 oc:32 | {BOXED} pack=a.b"),
    ("g8mb2ic32ih8oc32oh8kh3ph1", FWD, f"oh:4 ow:8 oc:64 ic:32 | {BOXED} merge=8 pack=a.b"),
    ("g4mb2ic32ih8oc64oh8kh3ph1", BWD_D, "ih.iw:32 ic:32 oc:16 | mma | merge=4 pack=b"),
    ("g8mb2ic24ih6oc48oh6kh3ph1", BWD_W, "ic:16 oc:16 mb.oh.ow:32 | mma | merge=4 pack=a split_k=2"),
    ("mb2ic20ih9oc24oh5kh3sh2ph1", BWD_W, "ic:16 oc:16 mb.oh.ow:32 | mma | pack=a.b.c split_k=2"),
    ("mb2ic32iw40oc32ow40kw3pw2dw1", FWD, f"ow:32 oc:64 ic:32 | {BOXED} pack=a.b"),
    ("mb1ic16id4oc32od4kd3pd1", FWD, f"od:2 oh:4 ow:4 oc:64 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb1ic32ih4oc32oh4kh1 dt=bf16", FWD, "mb.oh.ow:16 oc:32 ic:32 | mma | pack=a.c"),
    ("mb2ic32ih8oc32oh8kh1", FWD, f"oh.ow:64 oc:64 ic:32 | {BOXED} c=box"),  # as it lies
]


@pytest.mark.every(16)
@interpreted
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), PACKED, ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(PACKED)]
)
def test_emitted_kernels_over_copies(text: str, prop: Prop, schedule: str) -> None:
    compiled = plan(text, prop, schedule)
    t = tensors_of(compiled.problem, prop)
    compiled.launch(**t)
    assert torch.equal(t[prop.result], answer(compiled.problem, prop, t))


@interpreted
def test_what_is_multiplied_as_tf32_is_rounded_on_the_way() -> None:
    compiled = plan(
        "mb2ic32ih8oc64oh8kh3ph1 dt=f32", FWD, f"mb:2 oh:4 ow:8 oc:64 ic:16 | {BOXED} c=box pack=a.b.c"
    )
    named = {s.compute.name: s for s in compiled.steps}
    src = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    src[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), 3.4028235e38, 1 + 2**-11])
    src.view(torch.int32)[0, 0, 0, 0] = 0x7FFFFFFF
    made = torch.full((2, 8, 8, 32), -1.0)
    named["pack_src"].triton.run([src, made])
    wanted = convert(src.permute(0, 2, 3, 1).numpy(), tf32)
    assert np.array_equal(made.numpy(), wanted, equal_nan=True)
    assert made[0, 0, 0, 0].isnan() and (made != src.permute(0, 2, 3, 1)).sum() > 4000
    y = torch.randn(2, 8, 8, 64)
    back = torch.full((2, 64, 8, 8), -1.0)
    named["unpack_dst"].triton.run([y, back])
    assert torch.equal(back, y.permute(0, 3, 1, 2))  # a result keeps its bits


GATHERED = [
    ("mb2ic3ih9oc16oh5kh3sh2ph1", FWD, "mb.oh.ow:16 oc:16 kw.ic:16 | mma"),
    ("mb2ic3ih9oc16oh5kh3sh2ph1", FWD, "mb.oh.ow:16 oc:16 kw.ic:16 | mma | pack=a.b"),
    ("mb2ic16ih9oc16oh5kh3sh2ph1", BWD_D, "mb.qh.qw:16 ic:16 oc:16 | mma | swap=1"),
    ("mb2ic16ih9oc16oh5kh3sh2ph1", BWD_D, "mb.qh.qw:16 ic:16 oc:16 | mma | pack=b"),
    ("mb2ic3ih9oc16oh5kh3sh2ph1", BWD_W, "ic:16 oc:16 mb.oh.ow:16 | mma | split_k=2"),
    ("g2mb2ic32ih6oc32oh6kh3ph1", FWD, "mb.oh.ow:16 oc:16 ic:16 | mma | pack=a"),
]


@pytest.mark.every(18)
@interpreted
@pytest.mark.parametrize("math", ["tf32", "ieee"])
@pytest.mark.parametrize("fine", [0, 1])
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), GATHERED, ids=[f"{i}-{c[1]}" for i, c in enumerate(GATHERED)]
)
def test_gathered_operands_are_rounded_to_what_is_multiplied(
    text: str, prop: Prop, schedule: str, fine: int, math: str
) -> None:
    """1 + 3*2^-12 is not a tf32 number; 1 + 2^-10 is the nearest, cut off it would be 1."""
    p = ConvProblem.parse(f"{text} tag=axb math={math}")
    if math == "ieee":
        schedule = schedule.partition(" | pack")[0]
    chip = replace(CHIP, upcast16=False, precisions=TARGETS["sm_90"].precisions)
    made = compiler.build(p, prop, chip, Schedule.parse(schedule), Epilogue())
    t = {
        n: x.float().to(memory_format=torch.channels_last)
        for n, x in tensors_of(made.problem, prop).items()
    }
    name = prop.operands[fine]
    whole = t[name]
    t[name] = whole * (1 + 3 * 2.0**-12)
    made.launch(**t)
    near = {n: x.double() for n, x in t.items()}
    near[name] = whole.double() * (1 + 2.0**-10 if math == "tf32" else 1 + 3 * 2.0**-12)
    assert torch.equal(t[prop.result].double(), exact(p, prop, near))


@pytest.mark.slow
def test_a_bias_of_another_type_gets_another_plan() -> None:
    p = ConvProblem.parse("mb2ic32ih8oc32oh8kh3ph1 dt=bf16")
    biases = {None: "bf16", f32: "f32", bf16: "bf16"}
    made = {
        bia: compiler.plan(p, FWD, TARGETS["sm_90"], epilogue=Epilogue.parse("bias", bia))
        for bia in (*biases, *biases)
    }
    for bia, name in biases.items():
        seen = next(t for s in made[bia].steps for t in s.kernel.params if t.name == "bia")
        assert seen.dtype.name == name


@pytest.mark.slow
def test_where_operands_are_rounded() -> None:
    """In registers, or over copies: where the unit would else get them past the registers, and a copy is
    cheap for what it is read."""
    first = "mb32ic3ih224oc64oh112kh7sh2ph3 tag=axb"

    def chosen(text: str, chip: str = "sm_90", prop: Prop = FWD) -> CompiledDirection:
        return compiler.plan(ConvProblem.parse(text), prop, TARGETS[chip])

    over = chosen(first, prop=BWD_D)
    assert over.schedule.pack == "a.b" and "nearest_tf32" not in over.steps[-1].source
    assert [len(s.compute.axes) for s in over.steps[:2]] == [1, 3]  # a run of memory, transposed weights
    beside = chosen("mb64ic672ih1oc168oh1kh1 tag=axb")
    assert beside.schedule.a == "gather" and not beside.schedule.pack
    assert "a_near = nearest_tf32(a)" in beside.steps[0].source
    for text, chip in ((f"{first} math=ieee", "sm_90"), (f"{first} dt=bf16", "sm_90"), (first, "gfx90a")):
        made = chosen(text, chip)
        assert not made.schedule.pack and "nearest_tf32" not in made.source, (text, chip)
    assert not chosen(first, "sm_80").schedule.pack  # its unit reads registers anyway
    assert "nearest_tf32" in chosen(first, "sm_80").source


@pytest.mark.parametrize(
    ("words", "math", "said"),
    [
        ("mma | pack=a.b", "tf32", ""),
        ("mma | pack=a.b", "ieee", "already has ic innermost"),
        ("fma | pack=a.b", "tf32", "already has ic innermost"),
        (f"{BOXED} pack=b", "tf32", "already has ic innermost"),
        ("mma | pack=c", "tf32", "already has oc innermost"),
    ],
)
def test_a_copy_that_lies_as_the_original_is_for_rounding(words: str, math: str, said: str) -> None:
    p = ConvProblem.parse(f"mb2ic32ih8oc64oh8kh3ph1 tag=axb math={math}")
    schedule = Schedule.parse(f"mb:2 oh:4 ow:8 oc:64 ic:16 | {words}")
    reason = why_not(schedule, computes(p, FWD)[0], TARGETS["sm_90"])
    assert (said in str(reason)) if said else reason is None


@pytest.mark.parametrize(("unit", "rounded"), [("mma", True), ("fma", False)])
def test_copies_round_for_the_matrix_unit_alone(unit: str, rounded: bool) -> None:
    """A product element by element takes all of a number, so torch's switch changes nothing for it."""
    p = ConvProblem.parse("g16mb8ic32ih8oc32oh8kh3ph1 dt=f32")
    made = compiler.plan(p, FWD, TARGETS["sm_90"], f"mb:2 oh:8 oc:16 ic:16 | {unit} | pack=a.b.c")
    pack = "pack" if rounded else "pack_exact"
    assert [s.compute.name for s in made.steps] == [f"{pack}_src", f"{pack}_wei", "fwd", "unpack_dst"]
    assert [" = nearest_tf32(" in s.source for s in made.steps] == [rounded, rounded, False, False]
    other = compiler.plan(
        replace(p, math="ieee"), FWD, TARGETS["sm_90"], f"mb:2 oh:8 oc:16 ic:16 | {unit} | pack=a.b.c"
    )
    same = [a.triton.function == b.triton.function for a, b in zip(made.steps, other.steps, strict=True)]
    assert same[0] == same[1] == (not rounded)  # two kernels have two names


@interpreted
def test_the_epilogue_stays_with_the_sum() -> None:
    compiled = plan(
        "mb2ic32ih8oc32oh8kh3ph1",
        FWD,
        f"mb:2 oh:4 ow:8 oc:64 ic:32 | {BOXED} c=box pack=a.b.c",
        "bias+relu",
    )
    t = tensors_of(compiled.problem, FWD)
    bias = torch.arange(-16.0, 16.0).half()
    compiled.launch(**t, bia=bias)
    bare = answer(compiled.problem, FWD, t).double()
    assert torch.equal(t["dst"], (bare + bias.double().view(-1, 1, 1)).relu().half())


# -- tensors that do not fit -----------------------------------------------------------------------


@pytest.mark.every(5)
@interpreted
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("src", lambda t: t.to(memory_format=torch.channels_last), "strides (2048, 64, 8, 1), got"),
        ("src", lambda t: t.bfloat16(), "torch.float16, got torch.bfloat16"),
        ("wei", lambda t: t[:, :, :2], "shape (32, 32, 3, 3) and strides (288, 9, 3, 1), got"),
        ("wei", lambda t: t.flatten()[:-1], "got shape (9215,)"),
        ("dst", lambda t: t[:1].expand(t.shape), "strides (2048, 64, 8, 1), got"),
        ("dst", lambda t: t.to("meta"), "cpu, where src is, got meta"),
        ("bia", lambda t: t.float(), "torch.float16, got torch.float32"),
        ("bia", lambda t: t.repeat(2)[::2], "shape (32,) and strides (1,), got"),
        ("bia", lambda t: None, "expected a tensor, got NoneType"),
        ("res", lambda t: t.to(memory_format=torch.channels_last), "strides (2048, 64, 8, 1), got"),
        ("src", lambda t: torch._neg_view(t), "negated view"),
        ("src", lambda t: t.numpy(), "expected a tensor, got ndarray"),
    ],
)
@pytest.mark.parametrize(
    "config", ["mb.oh.ow:16 oc:32 ic:32 | mma", "mb.oh.ow:16 oc:32 ic:32 | mma | pack=a"]
)
def test_a_launch_refuses_tensors_that_do_not_fit(name: str, change: Any, said: str, config: str) -> None:
    compiled = plan("mb2ic32ih8oc32oh8kh3ph1", FWD, config, "bias+res")
    t = tensors_of(compiled.problem, FWD)
    t |= {"bia": torch.zeros(32).half(), "res": torch.zeros(2, 32, 8, 8).half()}
    with pytest.raises(TensorError) as error:
        compiled.launch(**{**t, name: change(t[name])})
    assert str(error.value).startswith(f"{name}: expected ") and said in str(error.value)
    assert "\n" not in str(error.value) and t["dst"].isnan().all()


@interpreted
def test_what_fits_a_plan_in_other_words() -> None:
    """Memory as long as the layout, and any stride of a single place."""
    compiled = plan("mb1ic32ih8oc32oh8kh3ph1", FWD, "mb.oh.ow:16 oc:32 ic:32 | mma")
    t = tensors_of(compiled.problem, FWD)
    wanted = answer(compiled.problem, FWD, t)
    compiled.launch(t["src"].as_strided((1, 32, 8, 8), (7, 64, 8, 1)), t["wei"].flatten(), t["dst"])
    assert torch.equal(t["dst"], wanted)


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize(
    ("tags", "prop", "pack"),
    [
        ("axb:axb:nChw16c", FWD, ""),
        ("axb:axb:nChw16c", FWD, " | pack=c"),
        ("nChw16c:axb:axb", BWD_D, ""),
        ("axb:OIhw8i16o2i:axb", BWD_W, ""),
        ("axb:axb:5n@5000,2c@1600,3h@400,3w@100,16c@2+7", FWD, ""),
    ],
)
def test_padding_of_a_blocked_result_is_zero(tags: str, prop: Prop, pack: str) -> None:
    p = ConvProblem.parse(f"mb5ic19ih3oc17oh3kh3ph1 dt=f16 tag={tags}")
    made = compiler.build(
        p, prop, CHIP, None if not pack else Schedule.parse(f"mb.oh.ow:16 oc:16 ic:16 | mma{pack}")
    )
    result = getattr(p, prop.result).layout
    memory = {n: torch.ones(spec.layout.span).half() for n, spec in p.specs.items()}
    memory[prop.result].fill_(float("nan"))
    made.launch(**memory)
    blocks = memory[prop.result].as_strided(
        [b.size for b in result.blocks], [b.stride for b in result.blocks], result.offset
    )
    assert not blocks.isnan().any()
    cleared = torch.zeros(blocks.shape, dtype=torch.bool)
    for box in result.padding(p.shapes[prop.result]):
        cleared[box] = True
    assert cleared.any() and (blocks == 0).equal(cleared)
    assert int(memory[prop.result].isnan().sum()) == result.span - blocks.numel()


def test_a_launch_says_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = plan("mb1ic32ih8oc32oh8kh3ph1", FWD, "mb.oh.ow:16 oc:32 ic:32 | mma")
    t = tensors_of(compiled.problem, FWD)
    with pytest.raises(TensorError, match="on a GPU, got one on meta"):
        compiled.launch(**{n: x.to("meta") for n, x in t.items()})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(TensorError, match="on a GPU, got one on cpu.*TRITON_INTERPRET=1"):
        compiled.launch(**t)


# -- starting without asking ----------------------------------------------------------------------


def test_starter_of_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel gets the tensors that it names, workspaces included, on the current stream."""
    compiled = plan("mb2ic16ih4oc16oh4kh3ph1", FWD, "mb.oh.ow:32 oc:16 ic:16 | mma | pack=a.b.c")
    assert compiled.starter(0, True) is None  # nothing was launched yet
    calls: list[tuple[str, list[int]]] = []
    for step in compiled.steps:

        def start(*given: Any, name: str = step.compute.name) -> None:
            assert given[3] == 7
            calls.append((name, [*given[13:]]))

        kernel = SimpleNamespace(function="f", packed_metadata="p")
        step.triton.kept[0, True] = KernelStart(start, kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(
        torch_internals,
        "quickest",
        lambda: lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )
    t = tensors_of(compiled.problem, FWD)
    assert compiled.starter(0, False) is None and compiled.starter(0, True, ("src", "dst")) is None
    begin = compiled.starter(0, True, ("dst", "src", "wei"))
    assert begin is not None
    begin(t["dst"], t["src"], t["wei"])
    assert [name for name, _ in calls] == ["pack_src", "pack_wei", "fwd", "unpack_dst"]
    (x, x_copy), (w, w_copy), (a, b, c), (y_copy, y) = (pointers for _, pointers in calls)
    assert (x, w, y) == tuple(t[n].data_ptr() for n in ("src", "wei", "dst"))
    assert (a, b, c) == (x_copy, w_copy, y_copy) and len({a, b, c, x, w, y}) == 6

    begin = compiled.starter(0, True, ("dst", "src", "wei"), spaces=True)
    handed = [torch.empty(shape, dtype=dtype) for shape, dtype in compiled.spaces()]
    assert begin is not None and [h.numel() for h in handed] == [
        s.layout.span for s in compiled.workspaces.values()
    ]
    calls.clear()
    begin(t["dst"], t["src"], t["wei"], *handed)
    used = {p for _, pointers in calls for p in pointers}
    assert used == {x.data_ptr() for x in (*t.values(), *handed)}, "it allocates none of its own"


# -- who is to blame ------------------------------------------------------------------------------


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("planted", ["pack_src", "unpack_dst", "conv_fwd"])
def test_a_wrong_kernel_among_copies_is_the_one_that_is_rejected(
    planted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    check_records.forget()
    honest = steps.emit

    def emit(*args: Any) -> str:
        source: str = honest(*args)
        return source.replace("tl.load(", "1.0 + tl.load(") if f"def {planted}" in source else source

    monkeypatch.setattr(steps, "emit", emit)
    compiled = replace_fixed(
        plan("mb2ic16ih4oc16oh4kh3ph1", FWD, "mb.oh.ow:32 oc:16 ic:16 | mma | pack=a.b.c")
    )
    asked = []
    monkeypatch.setattr(runtime.compiler, "replan", lambda wrong: asked.append(wrong) or _raise())
    with pytest.raises(LookupError):
        first_run_check.run(compiled, tensors_of(compiled.problem, FWD))
    wrong = [s.triton.function for s in compiled.steps if check_records.is_wrong(s.digest)]
    assert len(wrong) == 1 and wrong[0].startswith(planted)
    check_records.forget()


def replace_fixed(compiled: CompiledDirection) -> CompiledDirection:
    """As if the heuristics had chosen it."""
    compiled.fixed = False
    return compiled


def _raise() -> CompiledDirection:
    raise LookupError("another plan is asked for")


ROWS = """
compute rows
    tensor x f32 [m=64, k=65536]
    tensor s f32 [m=64]
    axes   m=64 | k=65536
    read   e = x[m, k]
    let    t = sum(e; k)
    store  s[m] = t
"""
MOMENTS = """
compute moments
    tensor x bf16 [m=4096, k=256]
    tensor w bf16 [n=128, k=256]
    tensor y bf16 [m=4096, n=128]
    tensor s f32 [n=128]
    axes   m=4096 n=128 | k=256
    read   a = x[m, k]
    read   b = w[n, k]
    let    t = sum(a*b; k)
    let    z = f32(t)
    store  y[m, n] = t
    store  s[n] sum= z
"""
MOVED = """
compute moved
    tensor x bf16 [m=4096, n=128]
    tensor y bf16 [m=4096, n=128]
    tensor s f32 [n=128]
    axes   m=4096 n=128
    read   a = x[m, n]
    let    z = f32(a)
    store  y[m, n] = a
    store  s[n] sum= z
"""


@pytest.mark.parametrize(
    ("subject", "schedule", "launches", "counted"),
    [
        ("mb8ic64ih28oc64oh28kh3ph1 dt=bf16", "ic:64 oc:64 oh.ow:32 split_k=8", ["compute", "add"], 1),
        ("mb8ic64ih28oc64oh28kh3ph1 dt=bf16", "ic:64 oc:64 oh.ow:32 pack=a", ["pack", "compute"], 1),
        (ROWS, "m:4 k:1024 | fma | split_k=16", ["compute", "add"], 1),
        (MOMENTS, "m:64 n:64 k:64 | mma", ["compute", "compute"], 2),
        (MOVED, "m:32 n:128 | fma", ["compute", "compute"], 1),
    ],
)
def test_each_launch_is_estimated_once(
    subject: str, schedule: str, launches: list[str], counted: int
) -> None:
    """The estimate of a schedule has its copies, and the kernel that adds up its parts: the plan takes no
    longer. What combines statistics is estimated by itself behind a product, with the map behind a map."""
    workload = (
        Alone(parse(subject)) if "compute" in subject else ConvWorkload(ConvProblem.parse(subject), BWD_W)
    )
    made = steps.plan_steps(workload, TARGETS["sm_90"], Schedule.parse(schedule))
    assert [c.does for c, _ in made] == launches
    each = [estimate(s, c, TARGETS["sm_90"]) for c, s in made]
    main = launches.index("compute")
    found = steps.microseconds(made, TARGETS["sm_90"])
    assert found == pytest.approx(sum(each[main : main + counted])) and found > 0
    assert counted == len(launches) or found < 0.999 * sum(each)
