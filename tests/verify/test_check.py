"""``check`` from end to end, in Triton's interpreter: status words, exit codes, reproducers, and
that wrong kernels, writes outside and results that tell nothing do not pass."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.verify import planted
from transconv import runtime
from transconv.__main__ import main
from transconv.cli import check as verb
from transconv.conv import CompiledDirection, ConvWorkload, compiler, relation
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.errors import Unsupported
from transconv.support import knobs
from transconv.target import TARGETS
from transconv.verify import any_size, benchdnn_run, judgement
from transconv.verify.benchdnn_run import COUNTED, work
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz import main_loop
from transconv.verify.machine import executable

pytestmark = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
Output = pytest.CaptureFixture[str]
SMALL = "mb1ic4ih5oc4oh5kh3ph1"
LAST = re.compile(r"tests:(\d+) " + " ".join(rf"{w.lower()}:(\d+)" for w in COUNTED))


def told(capsys: Output, *words: str, code: int = 0) -> tuple[list[str], dict[str, int]]:
    """The lines before the last, and the counts of the last."""
    assert main(["check", *words]) == code
    *lines, last = capsys.readouterr().out.splitlines()
    found = LAST.fullmatch(last)
    assert found, last
    return lines, dict(zip(("tests", *COUNTED), map(int, found.groups()), strict=True))


def test_atomic_sums_do_not_pass_for_deterministic_ones(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic = "ic:16 oc:16 oh.ow:32 split_k=2 reduce=atomic"
    words = ("--dir=BWD_W", "--attr-deterministic=true", "mb1ic4ih8oc4oh8kh3ph1")
    _, counts = told(capsys, *words)
    assert counts["PASSED"] == 1
    monkeypatch.setenv("TRANSCONV_CONFIG", atomic)
    compiler.forget()
    lines, counts = told(capsys, *words)
    assert counts["UNIMPLEMENTED"] == 1 and "atomic sums differ from run to run" in " ".join(lines)
    _, counts = told(capsys, words[0], words[2])
    assert counts["PASSED"] == 1
    compiler.forget()


def test_what_pads_a_result_is_checked(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--dir=FWD_D", "--dtag=nChw16c", "mb1ic4ih5oc17oh5kh3ph1")
    _, counts = told(capsys, *words)
    assert counts["PASSED"] == 1
    monkeypatch.setattr(CompiledDirection, "_clear_padding", lambda *_: None)
    lines, counts = told(capsys, *words, code=1)
    assert counts["FAILED"] == 1 and "what pads the result is not 0" in " ".join(lines)


def test_a_result_that_overlaps_is_an_invalid_argument(capsys: Output) -> None:
    lines, counts = told(
        capsys, "--dir=FWD_D", "--dtag=strides(0,25,5,1)", "mb2ic4ih5oc4oh5kh3ph1", code=1
    )
    assert counts["INVALID_ARGUMENTS"] == 1 and "share a place" in " ".join(lines)
    _, counts = told(capsys, "--dir=FWD_D", "--stag=strides(0,25,5,1)", "mb2ic4ih5oc4oh5kh3ph1")
    assert counts["PASSED"] == 1


def test_all_status_words_and_the_report(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "batch").write_text(
        f"--dir=FWD_B,BWD_D,BWD_W --dt=f16 --tag=axb {SMALL}  # pass\n"
        f"--reset --dt=s8:f16:s8,bf17 {SMALL}\n--reset --mode=R --skip-impl=ref {SMALL}\n"
        f"--mode=I {SMALL}\n--mode=L {SMALL}\n--mode=B {SMALL}\n"
        "--mode=C mb99ic512ih99oc512oh99kh3ph1\n"
    )
    report = tmp_path / "report.json"
    lines, counts = told(capsys, f"--batch={tmp_path / 'batch'}", f"--json={report}", code=1)
    assert counts == {
        "tests": 10,
        "PASSED": 6,
        "SKIPPED": 1,
        "MISTRUSTED": 0,
        "UNIMPLEMENTED": 1,
        "INVALID_ARGUMENTS": 1,
        "FAILED": 0,
        "LISTED": 1,
    }
    words = re.findall(r"^(\d+):([A-Z_]+) ", "\n".join(lines), re.MULTILINE)
    assert sorted(words, key=lambda w: int(w[0])) == list(
        zip(
            "0123456789",
            (
                *["PASSED"] * 3,
                "UNIMPLEMENTED",
                "INVALID_ARGUMENTS",
                "EXECUTED",
                "INITIALIZED",
                "LISTED",
                "PASSED",
                "SKIPPED",
            ),
            strict=True,
        )
    )
    assert any(line.startswith("UNIMPLEMENTED 1: dst: sums of floats by integers") for line in lines)
    assert "no effect: --skip-impl=ref: there is one implementation" in lines
    assert any(line.startswith("9:SKIPPED (too large for the interpreter") for line in lines)
    content = json.loads(report.read_text())
    assert content["summary"].startswith("tests:10 passed:6")
    assert content["machine"]["device"] == "cpu"
    assert [r["place"] for r in content["results"]] == list(range(10))
    first = content["results"][0]
    assert first["status"] == "PASSED" and first["exact_err"] == 0 and first["nonzero"] > 0.3
    assert first["read"] == f"{tmp_path / 'batch'}:1" and "warps=" in first["config"]


def test_exit_codes(capsys: Output) -> None:
    told(capsys, "--dir=FWD_D", SMALL)
    told(capsys, "--dt=s8:f16:s8", SMALL)
    told(capsys, "--strict", "--dt=s8:f16:s8", SMALL, code=1)
    told(capsys, "--tag=nothing", SMALL, code=1)
    for words in (
        [],
        ["--nonsense=1", SMALL],
        ["ic3kh"],
        ["--batch=no/such/file"],
        ["--engine=gpu", SMALL],
    ):
        assert main(["check", *words]) == 2, words
        assert capsys.readouterr().err.count("\n") == 1, words
    for words in (["--schedules=few", SMALL], ["--shard=2/2", SMALL]):
        with pytest.raises(SystemExit) as left:
            main(["check", *words])
        assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1, words


def test_layouts_alignment_and_data(capsys: Output) -> None:
    _, counts = told(
        capsys,
        "--quiet",
        "--dir=FWD_D,BWD_D,BWD_W",
        "--dt=f16",
        "--data=exact+float",
        "--misalign=1",
        "--strided=rows,expanded",
        "mb2ic4iw5oc4ow3kw3sw2pw1",
    )
    assert counts["PASSED"] == counts["tests"] == 6
    _, counts = told(
        capsys,
        "--quiet",
        "--dir=FWD_B,BWD_D,BWD_W",
        "--dt=bf16",
        "--stag=aBx16b",
        "--wtag=ABx16b16a",
        "--dtag=aBx16b",
        "mb1ic20ih5oc20oh5kh3ph1",
    )
    assert counts["PASSED"] == counts["tests"] == 3


def test_the_interpreter_of_the_ir(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit kernels, split sums into spaced results, and a fault as a failure."""
    words = ("--engine=numpy", "--dir=FWD_D", "--dt=bf16", "--tag=axb", "--target=sm_90")
    gluon = "mb:1 oh:8 ow:8 oc:16 ic:16 | a=box b=box via=gluon | c=box stages=3"
    told(capsys, *words, f"--schedule={gluon}", "mb1ic32ih8oc24oh8kh3ph1")
    told(
        capsys,
        *words,
        "--strided=steps",
        "--epilogue=bias+relu",
        "--schedule=mb.oh.ow:16 oc:16 ic:16 | mma | split_k=2",
        "mb1ic32ih4oc8oh4kh1",
    )
    told(
        capsys,
        *words,
        "--strided=steps",
        "--dt=bf16:bf16:f32",
        "--schedule=mb.oh.ow:16 oc:16 ic:16 | mma | split_k=2 reduce=atomic",
        "mb1ic32ih4oc8oh4kh1",
    )
    from transconv.ir.interp.evaluate import InterpError
    from transconv.verify import case

    def run(*_: Any) -> None:
        raise InterpError("dst[7] is outside")

    monkeypatch.setattr(case, "run", run)
    lines, _ = told(capsys, *words, SMALL, code=1)
    assert lines[0].startswith("0:FAILED (InterpError: dst[7] is outside) ")


def test_epilogues(capsys: Output) -> None:
    _, counts = told(
        capsys,
        "--quiet",
        "--dt=f16",
        "--attr-post-ops=,sum+relu,swish:1,gelu_tanh,clip:0:6,hardswish:0.1666667:0.5",
        SMALL,
    )
    assert counts["PASSED"] == counts["tests"] == 6
    assert told(capsys, "--data=float", "--attr-post-ops=sum+swish:1", SMALL)[1]["PASSED"] == 1


def test_shards_are_disjoint(capsys: Output) -> None:
    lines = []
    for shard in ("0/2", "1/2"):
        lines += told(capsys, "--mode=L", "--dt=f16,bf16,f32", f"--shard={shard}", SMALL)[0]
    assert sorted(line.partition("--mode=L ")[2] for line in lines) == [
        f"--dt=bf16 {SMALL}",
        f"--dt=f16 {SMALL}",
        SMALL,
    ]


def repeats(lines: list[str]) -> list[list[str]]:
    """The arguments of every command that was printed."""
    found = [line.partition("transconv check ")[2] for line in lines]
    return [shlex.split(text) for text in found if text]


# What the replay of every stage shows without a schedule needs one here. Left to the replay
# (test_planted.py): what only sizes show that no interpreter takes, and what only machine code has.
BUGS = [
    replace(bug, schedule="ow:16 | fma") if bug.stage == "cse" else bug
    for bug in planted.PASSES
    if ConvProblem.parse(bug.problem).mb < 1000 and bug.stage != "quads"
]


def test_all_bugs_but_two_are_planted_here() -> None:
    assert len(BUGS) >= len(planted.PASSES) - 2


def test_an_address_outside_of_a_tensor_is_a_failure(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that calls do without is no refusal for ``check``: with the best schedule, and with a given
    one, of which it is not an invalid argument."""
    bug = next(b for b in planted.PASSES if b.damage is planted.eight_bits)
    monkeypatch.setenv(knobs.verify.name, "0")
    with planted.planted_pass(bug):
        for words in ([], ["--schedule=mb.oh.ow:32 oc:16 ic:16 | mma"]):
            compiler.forget()
            lines, counts = told(capsys, *words, "--dt=f16", "--tag=axb", "ic16ih7oc16oh7kh3ph1", code=1)
            assert counts["FAILED"] == 1 and "expected one in the memory of" in lines[0]
    compiler.forget()


@pytest.mark.every(14)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.stage}: {bug.what}")
def test_a_planted_bug_fails_and_its_line_repeats_it(
    capsys: Output, bug: planted.Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = ConvProblem.parse(bug.problem)
    words = [
        f"--dir={'FWD_D' if bug.prop is Prop.FWD else str(bug.prop).upper()}",
        f"--dt={p.src.dtype}",
        f"--tag={bug.problem.partition('tag=')[2]}",
        "--target=sm_90",
        f"--schedule={bug.schedule}",
        "--attr-fpmath=any",
        p.shape_text,
    ]
    if "gluon" in bug.schedule:  # which Triton's interpreter does not read
        words.insert(0, "--engine=numpy")
    switches = ",".join("-+"[on] + name for name, on in bug.switches.items())
    monkeypatch.setenv(knobs.passes.name, switches)
    monkeypatch.setenv(knobs.verify.name, "0")  # by its result, not by the rules of the IR
    with planted.planted_pass(bug):
        compiler.forget()
        lines, counts = told(capsys, *words, code=1)
        assert counts["FAILED"] == 1
        assert lines[0].startswith("0:FAILED (")
        (command,) = repeats(lines)
        assert not bug.schedule or f"--schedule={bug.schedule}" in command
        compiler.forget()
        assert told(capsys, *command, code=1)[1]["FAILED"] == 1
    compiler.forget()
    assert told(capsys, *command)[1]["PASSED"] == 1


@pytest.mark.slow
def test_every_schedule_is_checked_and_the_failing_ones_are_named(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of five schedules stores nothing: its line has its schedule, and the others pass."""
    honest = ProblemCase.launch
    words = ("--dir=FWD_D", "--dt=f16", "--tag=axb", "--target=sm_90", "--data=exact", SMALL)
    proposed = list(ProblemCase(ConvProblem.parse(f"{SMALL} dt=f16 tag=axb"), Prop.FWD).choices(5))
    assert len({texts[0] for texts in proposed}) == 5
    seen: list[str] = []

    def launch(case: ProblemCase, compiled: CompiledDirection) -> None:
        seen.append(str(compiled.schedule))
        if len(seen) != 4:
            honest(case, compiled)

    monkeypatch.setattr(ProblemCase, "launch", launch)
    lines, _ = told(capsys, "--schedules=5", *words, code=1)
    assert len(seen) == 6 and len(set(seen)) == 5  # the user's plan is the first candidate
    assert "1 of 6 schedules fail, the first: exact: 100 of 100 elements are wrong" in lines[0]
    assert "6 plans were checked" in lines
    (command,) = repeats(lines)
    assert f"--schedule={seen[3]}" in command


def damaged(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Do something to a case after every launch."""
    honest = ProblemCase.launch

    def launch(case: ProblemCase, compiled: CompiledDirection) -> None:
        honest(case, compiled)
        damage(case)

    monkeypatch.setattr(ProblemCase, "launch", launch)


def _before(case: ProblemCase) -> None:
    case.tensors["dst"].memory[case.tensors["dst"].start - 1] = 0.0


def _behind(case: ProblemCase) -> None:
    tensor = case.tensors["dst"]
    tensor.memory[tensor.start + tensor.layout.span] = float("nan")


def _between(case: ProblemCase) -> None:
    case.tensors["dst"].memory[case.tensors["dst"].start + 1] = 1.0


def _operand(case: ProblemCase) -> None:
    case.tensors["wei"].view[1, 1, 1, 1] += 1


def _bias(case: ProblemCase) -> None:
    case.beside["bia"].memory[0] = 0.0


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("words", "damage"),
    [
        ([], _before),
        ([], _behind),
        (["--strided=steps"], _between),
        ([], _operand),
        ([], _bias),
        (["--misalign=3", "--tag=axb"], _behind),
        (["--dt=bf16"], _before),
        (["--dt=f64"], _behind),
        (["--mode=B"], _behind),
    ],
    ids=lambda x: x.__name__ if callable(x) else "".join(x),
)
def test_a_write_outside_fails(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, words: list[str], damage: Any
) -> None:
    damaged(monkeypatch, damage)
    lines, _ = told(capsys, *words, SMALL, code=1)
    assert "wrote outside of dst" in lines[0] or "changed " in lines[0]


def test_what_is_not_written_shows(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProblemCase, "launch", lambda *_: None)
    for words in (["--data=exact"], ["--data=float"], ["--mode=B"]):
        lines, _ = told(capsys, *words, SMALL, code=1)
        assert "100 of 100 elements are wrong" in lines[0] or "100 elements are NaN" in lines[0]


def test_runs_that_differ_fail(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def drift(case: ProblemCase) -> None:
        times.append(0)
        case.tensors["dst"].view[0, 0, 0, 0] = len(times)

    damaged(monkeypatch, drift)
    lines, _ = told(capsys, "--mode=B", SMALL, code=1)
    assert "1 elements differ between two runs" in lines[0]


def test_an_answer_of_zeros_is_mistrusted(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero operands a kernel that stores zeros would pass."""
    from transconv.verify import data as module

    honest = module.fill

    def fill(tensors: Any, *others: Any) -> None:
        honest(tensors, *others)
        tensors["src"].put(tensors["src"].view * 0)
        tensors["src"].seal()

    monkeypatch.setattr(module, "fill", fill)
    lines, counts = told(capsys, "--dir=FWD_D", SMALL)
    assert counts["MISTRUSTED"] == 1 and "only 0% of the answer is not 0" in lines[0]
    assert told(capsys, "--dir=FWD_D", "--strict", SMALL, code=1)[1]["MISTRUSTED"] == 1


def test_zeros_that_strides_leave_are_trusted() -> None:
    """A stride of 4 under a filter of 1: one of 4 elements of the data gradient is reached."""
    row = work("mb1ic8iw16oc8ow4kw1sw4pw0 dt=f16", "bwd_d")
    assert row["status"] == "PASSED" and row["nonzero"] > 0.9


def test_kernels_known_to_be_wrong_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel that the check of first results would replace is still a failure here."""

    def proven(case: ProblemCase) -> None:
        raise Unsupported("miscompiled", "8 plans gave wrong results")

    monkeypatch.setattr(ProblemCase, "proven", proven)
    row = work(SMALL, "fwd")
    assert (row["status"], row["cause"]) == ("FAILED", "miscompiled")


def test_errors_of_one_problem_do_not_hide_others(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = runtime.plan

    def plan(workload: ConvWorkload, *others: Any, **more: Any) -> Any:
        if workload.problem.mb == 3:
            raise RuntimeError("the compiler\ntripped")
        return honest(workload, *others, **more)

    monkeypatch.setattr(runtime, "plan", plan)
    lines, counts = told(capsys, "--mb=3,1", SMALL, code=1)
    assert (counts["FAILED"], counts["PASSED"]) == (1, 1)
    assert lines[0].startswith("0:FAILED (RuntimeError: the compiler tripped) transconv")


@pytest.mark.slow
def test_workers_have_a_time_limit_and_a_budget(capsys: Output) -> None:
    words = ["--workers=1", "--dir=FWD_D,BWD_D", "--dt=f16", SMALL]
    assert told(capsys, *words)[1]["PASSED"] == 2
    lines, counts = told(capsys, "--limit=0.001", *words, code=1)
    assert counts["FAILED"] == 2 and "the time limit was reached (--limit)" in lines[0]
    lines, counts = told(capsys, "--time-budget=0", *words)
    assert counts["SKIPPED"] == 2 and "2: the time budget was spent" in "\n".join(lines)
    assert told(capsys, "--time-budget=0", *words[1:])[1]["SKIPPED"] == 2


def test_what_happens_to_a_worker_is_a_status() -> None:
    assert verb.answer({"error": "crash"})["status"] == "FAILED"
    assert (
        verb.answer({"error": "RuntimeError: CUDA error: an\nillegal memory access"})["reason"]
        == "RuntimeError: CUDA error: an illegal memory access"
    )
    assert verb.answer({"error": "out of budget"})["status"] == "SKIPPED"


def test_memory_and_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is too small for a problem skips it; a candidate that takes too much of it is
    one that users get the next of."""
    import torch

    class OutOfResources(Exception):
        pass

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setitem(benchdnn_run._STEPS, "R", out_of_memory)
    row = work(SMALL, "fwd", mode="R")
    assert (row["status"], row["fatal"]) == ("SKIPPED", True)

    def out_of_resources(*_: Any) -> None:
        raise OutOfResources("shared memory")

    monkeypatch.setitem(benchdnn_run._STEPS, "R", out_of_resources)
    assert work(SMALL, "fwd", mode="R")["status"] == "FAILED"
    row = work(SMALL, "fwd", mode="R", schedules="3")
    assert (row["status"], row["too_large"], row["plans"]) == ("EXECUTED", 4, 4)


BESIDE = "beside sums over slices in f64 and torch.nn.functional in f64"
DILATED = "mb1ic2iw6oc2ow6kw3pw2dw1"


def forget_dilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that relates positions and taps as if taps were side by side."""
    for name in ("_solve_i", "_solve_o"):
        real = getattr(relation, name)
        monkeypatch.setattr(
            relation, name, lambda p, *said, real=real: real(replace(p, dilation=(1,) * p.ndims), *said)
        )


@pytest.mark.slow
def test_a_dilation_that_the_text_of_any_size_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels do what it says; the answers of slices and of torch are of no text."""

    def wrong() -> list[str]:
        compiler.forget()
        found = any_size.beside_torch(
            ConvProblem.parse(DILATED),
            frozenset({"mb", "iw"}),
            executable(TARGETS["sm_90"], "cpu"),
            "MB=2",
            [Prop.FWD],
        )
        first, *rest = [line for line, _ in found]
        assert first == BESIDE
        return rest

    assert wrong() == ["  right  fwd  MB=2 IW=6"]
    forget_dilation(monkeypatch)
    assert re.match("  WRONG  fwd  MB=2 IW=6  .* elements are wrong", wrong()[0])


@pytest.mark.slow
def test_a_check_of_any_size_says_what_answers(capsys: Output) -> None:
    assert main(["check", "--sizes=MB=2", "mb1?ic2iw6?oc2kw3pw2dw1"]) == 0
    _, beside = capsys.readouterr().out.split(BESIDE)
    assert [line.split() for line in beside.split("\n") if line] == [
        ["right", prop.value, "MB=2", "IW=6"] for prop in Prop
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize("direction", ["FWD_D", "BWD_D", "BWD_W"])
def test_a_dilation_that_the_front_end_forgets(
    direction: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"--dir={direction}", "--data=exact")
    lines, counts = told(capsys, *words, DILATED)
    assert counts["PASSED"] == 1
    assert f"1 problems {BESIDE}" in lines
    forget_dilation(monkeypatch)
    compiler.forget()
    line = f"{direction} --dt=f32:f32:f32 {DILATED.replace('ic2', 'ic3')}"  # of which nothing is kept
    lines, counts = told(capsys, *words, DILATED.replace("ic2", "ic3"), code=1)
    assert counts["FAILED"] == 1 and "elements are wrong" in lines[0]
    row = main_loop.work(line=f"--dir={line}", way="numpy")
    assert row["status"] == "failed" and BESIDE == f"beside {row['answers']}"


def test_an_answer_that_forgets_a_dilation(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two answers are not of one mind then."""
    real = judgement.tap_slices
    monkeypatch.setattr(judgement, "tap_slices", lambda p: real(replace(p, dilation=(1,) * p.ndims)))
    lines, counts = told(capsys, "--data=exact", DILATED, code=1)
    assert counts["FAILED"] == 1 and "are not those of torch.nn.functional.conv1d in f64" in lines[0]
