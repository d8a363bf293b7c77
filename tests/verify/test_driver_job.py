"""What benchdnn's words mean here, and what is refused with which status and reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from transconv.compute import Alone, parse
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.runtime import build
from transconv.verify import benchdnn_run
from transconv.verify.benchdnn_job import BenchdnnJob, RefusedRequest, apart, job_of, spaced
from transconv.verify.benchdnn_requests import Driver
from transconv.verify.benchdnn_run import work

P = "mb1ic8ih6oc16oh6kh3ph1"


def job(*words: str) -> BenchdnnJob:
    (request,) = Driver().requests([*words, P] if not words or words[-1].startswith("--") else words)
    return job_of(request)


def test_the_default_is_a_forward_with_bias_in_f32() -> None:
    assert job() == BenchdnnJob(f"{P} math=ieee", "fwd", "bias", "f32")


@pytest.mark.parametrize(
    ("words", "problem", "prop", "epilogue", "bia"),
    [
        (["--dir=BWD_D", "--dt=f16", "--tag=axb"], f"{P} dt=f16 tag=nhwc", "bwd_d", "", ""),
        (["--dir=FWD_I", "--dt=tf32"], P, "fwd", "", ""),
        (["--dir=FWD_D", "--attr-fpmath=any"], P, "fwd", "", ""),
        (["--dir=FWD_D", "--attr-fpmath=bf16:true"], P, "fwd", "", ""),
        (["--dir=BWD_W", "--dt=bf16:bf16:f32"], f"{P} dt=bf16:bf16:f32 math=ieee", "bwd_w", "", ""),
        (["--dir=BWD_W", "--cfg=bf16bf16f32"], f"{P} dt=bf16:bf16:f32 math=ieee", "bwd_w", "", ""),
        (["--dt=f64"], f"{P} dt=f64", "fwd", "bias", "f64"),
        (["--dt=f16", "--bia-dt=f16"], f"{P} dt=f16", "fwd", "bias", "f16"),
        (["--mb=5", "--dir=FWD_D"], "mb5ic8ih6oc16oh6kh3ph1 math=ieee", "fwd", "", ""),
        (["--dir=FWD_D", "--attr-post-ops=sum+relu"], f"{P} math=ieee", "fwd", "res+relu", ""),
        (["--attr-post-ops=swish:1+sum"], f"{P} math=ieee", "fwd", "bias+silu+res", "f32"),
        (["--attr-post-ops=clip:0:6+linear:1"], f"{P} math=ieee", "fwd", "bias+relu6", "f32"),
        (
            ["--dir=FWD_D", "--dt=f16", "--attr-post-ops=gelu_erf+add:f32:per_oc"],
            f"{P} dt=f16",
            "fwd",
            "gelu+add:f32:per_oc",
            "",
        ),
        (
            ["--dir=FWD_D", "--dt=f16", "--attr-post-ops=add:f16:15:any"],
            f"{P} dt=f16",
            "fwd",
            "add:f16:15:any",
            "",
        ),
        (
            ["--attr-scales=src:common:0.25+wei:per_oc+dst:common:2", "--attr-post-ops=sum:1.5+relu:0.5"],
            f"{P} math=ieee",
            "fwd",
            "mul:0.25+mul:f32:per_oc+bias+sum:1.5+relu:0.5+div:2",
            "f32",
        ),
        (
            [
                "--dt=u8:s8:s8",
                "--attr-zero-points=src:common:5+wei:common:3:s8+dst:common:2",
                "--attr-scales=dst:common:4",
            ],
            f"{P} dt=u8:i8:i8",
            "fwd",
            "zero:src+zero:wei+bias+div:4+add:2",
            "f32",
        ),
        (
            ["--dir=FWD_D", "--attr-post-ops=linear:1+tanh:0:0:2.5+relu_dst:0", "--attr-acc-mode=f16"],
            f"{P} math=ieee",
            "fwd",
            "tanh+mul:2.5+relu",
            "",
        ),
        (
            ["--dir=BWD_D", "--dt=u8:s8:s8", "--attr-zero-points=src:common:2+dst:per_dim_1"],
            f"{P} dt=u8:i8:i8",
            "bwd_d",
            "zero:dst:per_oc+add:2",
            "",
        ),
        (
            ["--dir=bwd_d", "--attr-post-ops=eltwise_relu:0.5+binary_add:f32"],
            f"{P} math=ieee",
            "bwd_d",
            "relu:0.5+add:f32",
            "",
        ),
        (
            ["--dir=BWD_D", "--epilogue=bias+silu", "--bia-dt=bf16"],
            f"{P} math=ieee",
            "bwd_d",
            "bias+silu",
            "bf16",
        ),
    ],
)
def test_meaning(words: list[str], problem: str, prop: str, epilogue: str, bia: str) -> None:
    made = job(*words)
    assert (made.problem, made.prop, made.epilogue, made.bia) == (problem, prop, epilogue, bia)
    assert str(ConvProblem.parse(made.problem)) == made.problem


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--dt=s4:s8:s32"], "dtype s4: kernels compute with i8 u8 i32 f8e4m3"),
        (["--bia-dt=s64"], "--bia-dt=s64"),
        (["--alg=WINO"], "Winograd"),
        (["--attr-scales=src:per_oc"], "no scales of src with the mask per_oc"),
        (["--attr-scales=wei:common:1:f32:32x1"], "groups of scales"),
        (["--dir=BWD_D", "--attr-scales=wei:per_oc"], "are summed"),
        (["--attr-zero-points=wei:per_oc"], "no zero points of wei with the mask per_oc"),
        (["--attr-zero-points=src:common:1:s32:1x4"], "groups of zero points"),
        (["--attr-dropout=0.5"], "its mask is a second result"),
        (["--attr-post-ops=add:f4_e2m1:per_oc"], "no tensor has the type f4_e2m1"),
        (["--dir=BWD_W", "--attr-post-ops=relu"], "oneDNN has none either"),
        (["--mode=P"], "times are measured by 'python -m bench'"),
        (["--wtag=decab", "g2ic4ih6oc8oh4kh3"], ""),
        (["--wtag=Abcde16a", "g2ic4ih6oc8oh4kh3"], "groups are not outermost"),
    ],
)
def test_unimplemented(words: list[str], reason: str) -> None:
    if not reason:
        assert job(*words).problem == "g2ic4ih6oc8oh4kh3 tag=nchw:hwio:nchw math=ieee"
        return
    with pytest.raises(RefusedRequest) as refused:
        job(*words)
    assert refused.value.status == "UNIMPLEMENTED"
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--attr-post-ops=dw:k3"], "post-op dw:k3: expected one dw:k3s1p1"),
        (["--attr-post-ops=dw_k3s1p1+dw_k3s1p1"], "post-op dw_k3s1p1: expected one"),
        (["--dt=f17"], "dtype 'f17' is unknown"),
        (["--dt=f16:f16"], "has 2 types; expected 1 or 3"),
        (["--cfg=f16bar"], "--cfg=f16bar is unknown"),
        (["--stag=Goih"], "unknown dim 'g'"),
        (["--tag=axb", "--stag=abx"], "expected it alone"),
        (["--strides=1x2:"], "has 2 parts; expected SRC:WEI:DST"),
        (["--strides=1x2::"], "has 2 numbers; expected 4"),
        (["--strides=axb::"], "has no numbers"),
        (["--attr-post-ops=foo"], "post-op 'foo' is unknown"),
        (["--attr-post-ops=relu:x"], "no number"),
        (["--attr-post-ops=add"], "expected add:TYPE"),
        (["--attr-post-ops=add:f32:per_x"], "mask 'per_x'"),
        (["--attr-post-ops=prelu:foo"], "mask 'foo'"),
        (["--attr-post-ops=sum:1:0:s8+sum"], "reads the old result as two types"),
        (["--attr-post-ops=add:f32:16"], "'add:f32:16' has a mask for more than the 4 dimensions"),
        (["--attr-post-ops=add:f32:14:aB32"], "arg0"),
        (["--attr-post-ops=" + "+".join(["relu"] * 33)], "33 post-ops"),
        (["--attr-post-ops=elu_dst:-1"], "'elu_dst:-1' has a negative alpha"),
        (["--attr-post-ops=clip:3:2"], "'clip:3:2' clips from 3 to 2"),
        (["--attr-post-ops=soft_relu"], "'soft_relu' divides by alpha"),
        (["--attr-scales=src:common:-1"], "greater than 0"),
        (["--attr-scales=bia:common:1"], "scales are of src, wei and dst"),
        (["--attr-zero-points=bia:common:1"], "zero points are of src, wei and dst"),
        (["--attr-fpmath=fp4"], "--attr-fpmath=fp4 is unknown"),
        (["--epilogue=bias", "--attr-post-ops=relu"], "expected one"),
        (["--epilogue=rely"], "has 'rely', expected one of"),
        (["--bia-dt=x"], "--bia-dt=x"),
        (["--schedule=nonsense"], "'nonsense' is neither a block"),
        (["g3ic4ih6oc8oh4kh3"], "argument 1: ic = 4 does not divide into 3 groups"),
        (["ic4ih16oc8oh4kh1sh4"], "leaves input unused on both sides"),
        (["ic3"], "argument 1: problem 'ic3': 'oc' is missing or 0"),
        (["--stag=aBx16b", "--strided=rows"], "a blocked layout has no strides"),
    ],
)
def test_invalid_arguments(words: list[str], reason: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        job(*words)
    assert refused.value.status == "INVALID_ARGUMENTS"
    assert reason in refused.value.reason


def test_modes() -> None:
    assert [job(f"--mode={m}").mode for m in ("C", "R", "I", "B", "RC", "L")] == [
        "C",
        "R",
        "I",
        "B",
        "C",
        "I",
    ]


def test_strides_of_each_tensor() -> None:
    made = ConvProblem.parse(job("--strides=640x40x6x1::1000x36x6x1").problem)
    assert made.src.layout.strides() == (640, 40, 6, 1)
    assert made.wei.layout.strides() == (72, 9, 3, 1)
    assert made.dst.layout.strides() == (1000, 36, 6, 1)
    grouped = job("--strides=:40x20x10x3x1:", "g2ic4ih6oc4oh4kh3")
    assert ConvProblem.parse(grouped.problem).wei.layout.strides() == (20, 10, 3, 1)
    with pytest.raises(RefusedRequest, match="groups are not one after another"):
        job("--strides=:41x20x10x3x1:", "g2ic4ih6oc4oh4kh3")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_spaced_tensors_are_views_of_others(layout: str) -> None:
    import torch

    p = ConvProblem.make(2, 4, 6, (5, 7), (3, 3), layout=layout)
    whole = torch.empty(3, 5, 6, 8)
    if layout == "nhwc":
        whole = whole.to(memory_format=torch.channels_last)
    assert spaced(p, Prop.FWD, "rows").src.layout.strides() == whole[:2, :4, :5, :7].stride()
    doubled = spaced(p, Prop.FWD, "steps").wei.layout.strides()
    assert doubled == tuple(2 * s for s in p.wei.layout.strides() or ())
    for prop, zero in ((Prop.FWD, ["src"]), (Prop.BWD_D, ["dst"]), (Prop.BWD_W, ["src", "dst"])):
        made = spaced(p, prop, "expanded")
        assert [n for n, s in made.specs.items() if 0 in (s.layout.strides() or ())] == zero
        assert str(ConvProblem.parse(str(made))) == str(made)


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            [
                "--dt=u8:s8:s8",
                "--dtag=axb",
                "--attr-scales=src:common:0.5",
                "--attr-post-ops=relu+dw:k3s2p1:u8+linear:0.5:1",
            ],
            [
                ("mb2ic4ih6oc8oh4kh3 dt=u8:i8:i8 tag=nchw:oihw:nhwc", "mul:0.5+bias+relu"),
                ("g8ic8ih4oc8oh2kh3sh2ph1 dt=i8:i8:u8 tag=nhwc:oihw:nhwc", "bias+linear:0.5:1"),
            ],
        ),
        (
            ["--dir=FWD_D", "--attr-post-ops=dw_k3s1p0"],
            [("mb2ic4ih6oc8oh4kh3 math=ieee", ""), ("g8ic8ih4oc8oh2kh3 math=ieee", "")],
        ),
        (["--dir=FWD_D", "--attr-post-ops=dw_k5s1p0"], []),
        (["--dir=BWD_D", "--attr-post-ops=dw_k3s1p0"], []),
    ],
)
def test_a_depthwise_convolution_behind_is_a_problem_of_its_own(
    words: list[str], problems: list[tuple[str, str]]
) -> None:
    request = next(Driver().requests([*words, "ic4ih6oc8oh4kh3"]))
    made = [*apart(request)]
    if not problems:
        with pytest.raises(RefusedRequest, match="expected one dw"):
            job_of(made[0])
        return
    assert [(str(ConvProblem.parse(j.problem)), j.epilogue) for j in map(job_of, made)] == [
        (str(ConvProblem.parse(p)), e) for p, e in problems
    ]


def test_the_gradients_of_weights_and_bias_are_two_problems() -> None:
    request = next(Driver().requests(["--dir=bwd_wb", "--dt=bf16", "ic4ih6oc8oh4kh3"]))
    made = [job_of(one) for one in apart(request)]
    assert [(j.prop, j.bia, j.problem) for j in made] == [
        ("bwd_w", "", made[0].problem),
        ("bwd_w", "f32", made[0].problem),
    ]


def test_scales_of_a_depthwise_convolution_behind_are_its_own() -> None:
    """What the first one's result is divided by is a factor of what the second one reads."""
    scales = "src:common:0.25+dst:common:0.5+attr_post_op_dw_wei:common:2+attr_post_op_dw_dst:common:4"
    words = ["--dir=FWD_I", "--dt=s8", f"--attr-scales={scales}", "--attr-post-ops=relu+dw:k3s1p1"]
    request = next(Driver().requests([*words, "ic4ih6oc8oh4kh3"]))
    assert [job_of(one).epilogue for one in apart(request)] == [
        "mul:0.25+relu+div:0.5",
        "mul:2+mul:0.5+div:4",
    ]


def test_src0_is_src() -> None:
    """oneDNN has two names for the first operand."""
    words = ["--dir=FWD_D", "--dt=u8:s8:u8", "ic4ih6oc8oh4kh3"]
    for option in ("--attr-zero-points", "--attr-scales"):
        one, other = (job(f"{option}={name}:common:2", *words) for name in ("src", "src0"))
        assert one == other


@pytest.mark.parametrize("engine", ["cpu", "numpy"])
def test_the_gradient_of_a_bias_is_checked(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside NumPy's sums, in blocked layouts too; a kernel that adds up something else is found."""
    tags = "--dtag=any,aBx16b" if engine == "cpu" else "--dtag=axb"
    words = [f"--engine={engine}", "--dir=BWD_WB", "--dt=bf16", tags, "mb2ic3ih5oc16oh5kh3ph1"]
    jobs = [job_of(one) for request in Driver().requests(words) for one in apart(request)]
    jobs = [job for job in jobs if job.bia]
    assert {work(**asdict(job))["status"] for job in jobs} == {"PASSED"}

    def planted(workload: Alone, *rest: Any) -> Any:
        text = str(workload.compute).replace("sum(g;", "sum(g*1.5;")
        return build(Alone(parse(text)), *rest)

    monkeypatch.setattr(benchdnn_run, "build", planted)
    row = work(**asdict(jobs[0]))
    assert row["status"] == "FAILED" and "B[0] is" in row["reason"]
