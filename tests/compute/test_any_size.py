"""Kernels whose sizes are arguments: one kernel is right for all sizes that it accepts, and is not
launched for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import transconv
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import Compute, parse, why_not_stored
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop, any_size, marked
from transconv.cost import AtSizes, estimate
from transconv.errors import ComputeError, ProblemError, ScheduleError, TensorError
from transconv.ir import For, InterpError, Kernel, find, value_at, verify
from transconv.passes import levels
from transconv.runtime import Plan, build, build_compute, job_of
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase, after_every_pass

SM90 = Target.parse("sm_90")
MAP = """compute scale
    sizes  M=8 in 1..4096, K=12 in 4..8192, K % 4 == 0, M*K < 1048576
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = 2*x + 1"""
ROWS = """compute mean
    sizes  N=3 in 1..64, K=40 in 1..8192
    axes   n=N | k=K
    read   x = X[n, k]
    let    m = sum(x; k) / K
    store  Y[n, k] = x - m"""
LAYER = "mb2?ic16ih9?oc16oh5kh3sh2ph1 dt=f16 tag=nhwc"


def layer(prop: Prop) -> tuple[Compute, ...]:
    text, names = marked(LAYER)
    return any_size(ConvProblem.parse(text), prop, names)


def built(compute: Compute, schedule: str = "", target: Target = SM90) -> Plan:
    return build_compute(compute, target, Schedule.parse(schedule) if schedule else None)


def test_the_text_is_read_back() -> None:
    for made in (parse(MAP), parse(ROWS), *layer(Prop.BWD_D)):
        assert parse(str(made)) == replace(made, part=None)
    assert "axes   m=5 k=8" in str(parse(MAP).at(M=5, K=8))


@pytest.mark.parametrize(("text", "schedule"), [(MAP, "m.k:64 | fma"), (ROWS, "k:16 | fma")])
def test_right_after_every_pass(text: str, schedule: str) -> None:
    compute = parse(text)
    plan = built(compute, schedule)
    for drawn in sizes.drawn(compute, 3):
        for stage, judged in after_every_pass(compute, plan, drawn):
            assert not judged.problem, (stage, drawn, judged.problem)


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", Prop)
def test_a_layer(prop: Prop) -> None:
    schedule = {
        Prop.FWD: "mb.oh.ow:32 oc:16 ic:16 | mma",
        Prop.BWD_D: "mb.qh.qw:16 ic:16 oc:16 | mma",
        Prop.BWD_W: "ic:16 oc:16 mb.oh.ow:32 | mma",
    }[prop]
    for compute in layer(prop)[-1:]:
        plan = built(compute, schedule)
        kernel = plan.steps[0].kernel
        for drawn in sizes.drawn(compute, 4):
            judged = ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn))
            assert not judged.problem, (drawn, judged.problem)


def test_kernels_are_read_back_and_well_formed() -> None:
    level = levels()
    for compute, schedule in (
        (parse(MAP), "m.k:64 | fma"),
        (layer(Prop.FWD)[0], "mb.oh.ow:32 oc:16 ic:16 | mma"),
    ):
        for stage, kernel in transconv.lower(compute, schedule, "sm_90"):
            verify(kernel, level[stage], stage)
            assert Kernel.parse(str(kernel)) is kernel, stage


def test_a_gapless_map_is_one_run_of_memory() -> None:
    """Divisions by sizes cancel, and requirements keep addresses in 32 bits."""
    kernel = built(parse(MAP), "m.k:64 | fma").steps[0].kernel
    assert "load(X, m_k, mask=m_k < (K * M))" in str(kernel) and "index64" not in str(kernel)
    wide = built(parse(MAP.replace(", M*K < 1048576", "").replace("4096", "4000000")), "m.k:64 | fma")
    assert "index64" in str(wide.steps[0].kernel)


def test_a_kernel_for_one_size_is_found_out() -> None:
    """Planted: a grid, and a mask, that are right for the example alone."""
    compute = parse(MAP)
    kernel = built(compute, "m.k:64 | fma").steps[0].kernel
    (grid,) = [x for x in find(kernel, For) if x.kind == "grid"]
    other = {"M": 9, "K": 20}
    short = replace(kernel, body=replace(grid, stop=2, until=None))
    assert ComputationCase(compute.at(**other)).interpreted(short.at(other)).problem
    text = str(kernel).replace("mask=m_k < (K * M)", "mask=m_k < 96")
    with pytest.raises(InterpError, match=r"is not in 0\.\.4"):
        ComputationCase(compute.at(M=1, K=4)).interpreted(Kernel.parse(text).at({"M": 1, "K": 4}))


def test_one_kernel_for_fifty_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No size loads another module, nor asks for another kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compute = parse(MAP)
    plan = built(compute, "m.k:512 | fma", Target.parse("interpreter"))
    (step,) = plan.steps
    functions = set()
    for drawn in sizes.drawn(compute, 50):
        x = torch.randn(drawn["M"], drawn["K"])
        y = torch.full_like(x, torch.nan)
        plan.launch(X=x, Y=y)
        assert torch.equal(y, 2 * x + 1), drawn
        assert step.triton.sizes is not None
        functions.add(id(step.triton.jit))
    assert len(functions) == 1


def test_sizes_outside_are_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = built(parse(MAP), "m.k:512 | fma", Target.parse("interpreter"))
    (step,) = plan.steps
    monkeypatch.setattr(step.triton, "run", lambda *_: pytest.fail("it was launched"))
    for shape, reason in (
        ((4097, 4), "M=4097 is not in 1..4096"),
        ((4, 6), "(K % 4) == 0 does not hold for K=6"),
        ((4096, 256), "does not hold for M=4096 K=256"),
        ((0, 4), "M=0 is not in"),
    ):
        x = torch.zeros(shape)
        with pytest.raises(TensorError) as told:
            plan.launch(X=x, Y=x.clone())
        assert reason in str(told.value) and "\n" not in str(told.value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TensorError, match="Y: expected shape"):
        plan.launch(X=torch.zeros(4, 8), Y=torch.zeros(4, 12))
    with pytest.raises(TensorError, match="X: expected shape"):
        plan.launch(X=torch.zeros(8, 4).T, Y=torch.zeros(4, 8))


def test_sizes_are_told_by_what_is_computed_from_them() -> None:
    """M follows from a dimension of M*2 + 1; a dimension that no M gives is refused."""
    lines = "    tensor X f32 [M*2 + 1, K]\n    tensor Y f32 [M + 3, K]\n    axes"
    text = MAP.replace("    axes", lines).replace("X[m, k]", "X[m*2, k]")
    plan = built(parse(text), "m.k:64 | fma")
    assert plan.required is not None
    assert plan.required.of_call({"X": torch.zeros(11, 8), "Y": torch.zeros(8, 8)}) == {"M": 5, "K": 8}
    with pytest.raises(TensorError, match="Y: expected shape"):
        plan.check({"X": torch.zeros(11, 8), "Y": torch.zeros(9, 8)})


def test_every_requirement_can_be_broken() -> None:
    for compute in (parse(MAP), layer(Prop.FWD)[0]):
        assert compute.named is not None
        broken = list(sizes.outside(compute.named))
        assert broken and all(compute.named.why_not(s) for s in broken)
        for s in broken:
            with pytest.raises(ComputeError, match="it requires"):
                compute.at(**s)


@pytest.mark.parametrize("word", ["reduce=stream programs=4 via=gluon", "split_k=2"])
def test_what_is_made_for_given_sizes_is_refused(word: str) -> None:
    with pytest.raises(ScheduleError, match="sizes that are arguments|box"):
        built(layer(Prop.FWD)[0], f"mb.oh.ow:32 oc:16 ic:16 | mma | {word}")
    with pytest.raises(ScheduleError, match="at most 4 warps"):
        built(layer(Prop.BWD_W)[0], "ic:16 oc:16 mb.oh.ow:32 | mma | warps=8")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sizes M=8 in 9..10", "the example does not meet"),
        ("sizes M, M", "twice"),
        ("sizes", "no size; expected names"),
        ("sizes M in 0..4", "expected a range"),
        ("sizes M, M + 1", "a condition of sizes"),
        ("sizes pid in 1..4", "word of generated kernels"),
    ],
)
def test_lines_that_are_refused(line: str, reason: str) -> None:
    with pytest.raises(ComputeError, match=reason):
        parse(f"compute c\n {line}\n axes m=M\n read x = X[m]\n store Y[m] = x")


def test_texts_that_are_refused() -> None:
    head = "compute c\n sizes M=8, N=8\n "
    for rest, reason in (
        ("axes m=M n=N\n read x = X[m, n]\n store Y[m + n] = x", "expected a line such as"),
        ("tensor Y f32 [M*8]\n axes m=M n=8\n read x = X[m, n]\n store Y[m*8 + n] = x", "the axis alone"),
        (
            "axes m=M | n=N\n read x = X[m, n]\n let s = sum(x; n)\n let t = sum(x*s; m n)\n"
            " store Y[0] = t",
            "takes 2 kernels",
        ),
    ):
        with pytest.raises((ComputeError, ScheduleError), match=reason):
            built(parse(head + rest))
    with pytest.raises(ComputeError, match="transconv.compile makes"):
        transconv.computation(MAP)
    with pytest.raises(ProblemError, match="question mark"):
        marked("mb2ic16?ih9oc16oh9kh3ph1")


@pytest.mark.parametrize(
    ("extent", "stores", "known"),
    [
        ("[N + N]", ["j", "j + 64"], False),
        ("[N + N]", ["j", "j + N"], True),
        ("[N + N]", ["j*2", "j*2 + 1"], True),
        ("[N + N]", ["j*2", "j + 1"], False),
        ("[2, N]", ["0, j", "1, j"], True),
        ("[2, N]", ["0, j", "0, N - 1 - j"], False),
        ("[N]", ["j"], True),
        ("[N]", ["N - 1 - j"], True),
        ("[N]", ["j % 64"], False),
        ("[N, 64]", ["j // 64, j % 64"], True),
        ("[N, 64]", ["j // 64, j % 8"], False),
    ],
)
def test_stores_have_places_of_their_own_at_all_sizes(extent: str, stores: list[str], known: bool) -> None:
    """What is proved of all sizes holds at each; what holds at the example alone is refused."""
    compute = parse(
        "\n".join(
            [
                "compute c",
                "sizes N=64 in 1..1000",
                f"tensor Y f32 {extent}",
                "axes j=N",
                "read x = X[j]",
                *(f"store Y[{at}] = x" for at in stores),
            ]
        )
    )
    reason = why_not_stored(compute)
    assert (reason is None) == known and (known or "at all sizes" in str(reason))
    for n in (1, 2, 63, 64, 65, 200):
        if known:
            assert why_not_stored(compute.at(N=n)) is None
    if not known:
        with pytest.raises(ScheduleError, match="places of its own"):
            built(compute)


@pytest.mark.parametrize(
    ("coord", "known"),
    [
        ("i*8 + j", False),
        ("i*N + j", True),
        ("j*3 + i", True),
        ("j*M + i", True),
        ("i*M + j", False),
        ("i*1000 + j", True),
        ("i*999 + j", False),
    ],
)
def test_places_in_rows_of_any_length(coord: str, known: bool) -> None:
    """``i*8 + j`` is one place for two positions of j beyond the example of 8."""
    compute = parse(f"""compute c
        sizes N=8 in 1..1000, M=3 in 1..3
        tensor Y f32 [4000000]
        axes i=M j=N
        read x = X[i, j]
        store Y[{coord}] = x""")
    assert (why_not_stored(compute) is None) == known
    taken = [why_not_stored(compute.at(N=n, M=m)) for n in (1, 8, 9, 1000) for m in (1, 2, 3)]
    assert (taken == [None] * 12) == known


@pytest.mark.slow
def test_machine_code() -> None:
    """Addresses are as wide as those of numbers, and the matrix unit does not wait."""
    text, names = marked("mb8?ic64ih56?oc64oh56kh3ph1 dt=bf16 tag=nhwc")
    (compute,) = any_size(ConvProblem.parse(text), Prop.BWD_W, names)
    (step,) = built(compute, "ic:64 oc:64 mb.oh.ow:64 | mma | warps=4").steps
    (found,) = compile_offline([job_of(step, SM90)])
    assert isinstance(found, Resources), found
    assert "HGMMA" in found.words and not found.serialised and not found.spill_bytes
    assert found.words["LDGSTS.128"] == found.words["LDGSTS"]


@pytest.mark.slow
def test_parts_of_a_sum_that_ends_at_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is fixed, their bounds are computed: fewer steps than parts, as many, more."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text, names = marked("mb2?ic16ih9?oc16oh5kh1sh2ph0 dt=f32 tag=nhwc")
    workload = ConvWorkload(ConvProblem.parse(text), Prop.BWD_W, open=names)
    words = "ic:16 oc:16 mb.oh.ow:16 | mma | split_k=4 warps=4"
    plan = build(
        workload, Target.parse("interpreter"), Schedule.parse(words), None, False, CompiledDirection
    )
    assert [bool(s.triton.sizes) for s in plan.steps] == [True, False]
    for n, h, w in ((1, 1, 1), (1, 8, 32), (3, 7, 13)):  # 1, 4 and 6 steps
        x, grad, made = (
            torch.randint(-2, 3, shape).float().to(memory_format=torch.channels_last)
            for shape in ((n, 16, h, w), (n, 16, -(-h // 2), -(-w // 2)), (16, 16, 1, 1))
        )
        plan.launch(src=x, wei=made.fill_(torch.nan), dst=grad)
        want = torch.nn.grad.conv2d_weight(x, (16, 16, 1, 1), grad, 2)
        assert torch.equal(made, want), (n, h, w)
    (compute,) = workload.computations
    for stage, judged in after_every_pass(compute, plan, {"MB": 2, "IH": 3, "IW": 5}):
        assert not judged.problem, (stage, judged.problem)


MANY = """compute scale
    sizes  M=800 in 1..4096, K=1024 in 4..8192
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = 2*x + 1"""
LONG = """compute mean
    sizes  N=600 in 1..4096, K=8192 in 1..8192
    axes   n=N | k=K
    read   x = X[n, k]
    let    m = sum(x; k) / K
    store  Y[n, k] = x - m"""


@pytest.mark.parametrize(
    ("text", "schedule", "drawn"),
    [
        (MANY, "m.k:1024 | fma | stages=1 warps=2", {"M": 900, "K": 1001}),
        (LONG, "k:8192 | fma | stages=1 warps=8", {"N": 700, "K": 7000}),
        (LONG, "k:256 | fma | stages=1 warps=4", {"N": 300, "K": 6000}),
    ],
)
def test_estimates_of_maps_and_rows(text: str, schedule: str, drawn: dict[str, int]) -> None:
    """They are those of kernels without a product: for the example exactly, for other sizes nearly."""
    compute, words = parse(text), Schedule.parse(schedule)
    at = AtSizes(words, compute, SM90)

    def found(sizes: dict[str, int]) -> float:
        return at.us(*(value_at(n, sizes) for n in at.counts))

    assert compute.named is not None
    like = compute.named.like
    assert found(like) == pytest.approx(estimate(words, compute, SM90))
    assert found(drawn) == pytest.approx(estimate(words, compute.at(**drawn), SM90), rel=0.2)
    formula = at.formula()
    values: dict[str, object] = {f"here_c{n}": value_at(c, drawn) for n, c in enumerate(formula.counts)}
    for name, line in formula.lines:
        values[name] = eval(line, values)
    assert values[formula.us] == pytest.approx(found(drawn))


def test_a_position_that_a_tensor_holds_is_divided() -> None:
    """How far it reaches is not known, so nothing is required of sizes."""
    made = parse(
        "compute taken\n sizes N=9 in 1..4096\n tensor X f32 [64]\n tensor I i32 [N]\n axes n=N\n"
        "read i = I[n]\n read x = X[i // 2]\n read z = X[i // 3 % 64]\n store Y[n] = x + z"
    )
    plan = built(made)
    for n in (1, 9, 700):
        judged = ComputationCase(made.at(N=n)).interpreted(*(s.kernel.at({"N": n}) for s in plan.steps))
        assert not judged.problem, judged.problem
