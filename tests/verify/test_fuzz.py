"""The fuzzer: trials are the same in every process, lines parse back, failures are found and shrunk, and
workers may hang or die. A few trials are run, and a part of the corpus."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.verify import planted
from transconv.conv import CompiledDirection
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.errors import ProblemError, ScheduleError
from transconv.schedule.schedule import Schedule, register_word, unregister_word
from transconv.schedule.words import TABLE, Word, words
from transconv.selection.proposals import heuristics
from transconv.support import knobs
from transconv.target.records import TARGETS
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz import conv_problems, conv_trial, legal_schedules, main_loop
from transconv.verify.fuzz.conv_trial import ConvTrial, draw_trial
from transconv.verify.fuzz.main_loop import SMALL_TYPES, Entry, Tally, corpus, read, work
from transconv.verify.fuzz.trial import GOOD, shrink

ROOT = Path(__file__).parents[2]
RIGHT = "--dir=FWD_D --schedule=oh.ow:16+oc:16+ic:16+mma mb1ic8ih5oc8oh5kh3ph1"


COUNTS = [10, pytest.param(110, marks=pytest.mark.slow)]


@cache
def drawn_trial(number: int) -> ConvTrial:
    return draw_trial("tests", number)


def drawn_trials(count: int) -> list[ConvTrial]:
    return [drawn_trial(n) for n in range(count)]


@pytest.mark.every(24)
@pytest.mark.parametrize("entry", corpus(), ids=lambda e: e.place)
def test_what_failed_once(entry: Entry) -> None:
    row = work(line=str(entry.trial))
    assert row["status"] in GOOD, row["reason"]


@pytest.mark.parametrize("numbers", [range(6), pytest.param(range(6, 25), marks=pytest.mark.slow)])
def test_trials(numbers: range) -> None:
    """Through the interpreter of the IR; `make check-all` runs two thousand."""
    bad = [row for n in numbers if (row := work("ci", n))["status"] not in GOOD]
    assert not bad, "\n".join(f"{r['status']}: {r['reason']}\n{main_loop.repeated(r)}" for r in bad)


@pytest.mark.slow
def test_trials_in_tritons_interpreter() -> None:
    """By the command, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "transconv",
            "fuzz",
            "--n",
            "8",
            "--seed",
            "2",
            "--jobs",
            "1",
            "--share",
            "1",
            "--no-corpus",
            "--interpreter",
            "--shrink",
            "0",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 trials" in done.stdout


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_trials_of_emitted_text() -> None:
    """The same trials in this process."""
    rows = [work("3", n, way="triton") for n in range(5)]
    assert all(r["status"] in GOOD for r in rows), [(r["line"], r["reason"]) for r in rows]
    assert sum(r["way"] == "triton" for r in rows) > 2


@pytest.mark.slow
def test_a_trial_is_the_same_in_another_process() -> None:
    code = (
        "from transconv.verify.fuzz.conv_trial import draw_trial;"
        "print('\\n'.join(str(draw_trial('tests', n)) for n in range(5)))"
    )
    told = programs.run(["-c", code], cwd=ROOT, check=True).stdout
    assert told.split("\n")[:-1] == [str(t) for t in drawn_trials(5)]


def test_only_optional_passes_are_read_in_lines() -> None:
    line = "--dir=FWD_D --dt=f16:f16:f16 --target=sm_90 --passes={} mb1ic3ih5oc4oh5kh3ph1"
    assert ConvTrial.parse(line.format("-cse")).passes == (("cse", False),)
    for word in ("+bogus", "-cse,-narrow", "cse"):
        with pytest.raises(ProblemError, match="--passes=.*; expected"):
            ConvTrial.parse(line.format(word))


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["-simplify,-lets", ""])
def test_a_kernel_is_the_same_in_another_process(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are stored under the kernel's text: with a name that depends on the order of a set they
    would be lost."""
    monkeypatch.setenv("TRANSCONV_PASSES", passes)
    code = (
        "from transconv.conv import Epilogue, build\n"
        "from transconv.verify.fuzz.conv_trial import draw_trial\n"
        "from transconv.target import Target\n"
        "for t in (draw_trial('names', n) for n in range(152, 155)):\n"
        "    made = build(t.problem, t.prop, Target.parse('sm_90'), t.schedule,"
        " Epilogue.parse(t.epilogue))\n"
        "    print(*(s.source + s.digest for s in made.steps))"
    )
    told = programs.run(["-c", code], cwd=ROOT, check=True).stdout
    with redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert told == here.getvalue() and told.count("def ") >= 3


@pytest.mark.parametrize("count", COUNTS)
def test_lines_read_back(count: int) -> None:
    for trial in drawn_trials(count):
        line = str(trial)
        assert ConvTrial.parse(line) == trial and str(ConvTrial.parse(line)) == line
        assert all(c.isalnum() or c in "-_=+:.,@() " for c in line)


def test_what_lines_must_say() -> None:
    with pytest.raises(ProblemError, match="--speed=3"):
        ConvTrial.parse("--speed=3 ic8ih5oc8oh5kh3ph1")
    with pytest.raises(ProblemError, match="BWD_WB"):
        ConvTrial.parse("--dir=BWD_WB ic8ih5oc8oh5kh3ph1")
    with pytest.raises(ProblemError, match="2 shapes"):
        ConvTrial.parse("ic8ih5oc8oh5kh3ph1 ic8ih5oc8oh5kh3ph1")
    with pytest.raises(ScheduleError):
        ConvTrial.parse("--schedule=oh.ow:16+fast=1 ic8ih5oc8oh5kh3ph1")


@pytest.mark.slow
def test_everything_is_drawn() -> None:
    """Every value of every word, every direction, kind of layout, padding, type. Explicit kernels are
    few among so many: what they keep is drawn below, what they fetch behind a sum in
    test_fuzz_compute.py."""
    seen: dict[str, Counter[str]] = {}
    for trial in drawn_trials(110):
        for name, word in trial.facts.items():
            seen.setdefault(name, Counter())[word] += 1
    for word in words():
        if isinstance(word.values, tuple) and isinstance(word.default, str):
            assert set(word.values) - {"gluon", "stream"} <= set(seen[word.name]) or (
                word.name in ("keep", "behind", "red", "row")
            ), word.name  # the last two are of rows
    assert {w.name for w in words()} <= set(seen)
    assert set(seen["direction"]) == {p.value for p in Prop}
    assert set(seen["axes"]) == {"1D", "2D", "3D"}
    assert {"f16", "bf16", "f32", "f64"} <= set(seen["dtype"])
    assert set(seen["groups"]) == {"one", "grouped", "depthwise"}
    assert set(seen["padding"]) == {"negative", "none", "even", "uneven"}
    assert set(seen["alignment"]) == {"aligned", "shifted"} and seen["passes"]["switched"] > 20
    assert set(seen["math"]) == {"ieee", "tf32", "tf32x3"}
    layouts = {kind for words in seen["layout"] for kind in words.split("+")}
    assert layouts == {"nchw", "nhwc", "blocked", "gaps", "repeated", "order"}
    assert any(k > i for t in drawn_trials(110) for k, i in zip(t.problem.k, t.problem.i, strict=True))
    assert any(len(t.computes) > 1 for t in drawn_trials(110))


def test_what_is_kept_is_drawn_where_channels_are_few() -> None:
    problem = ConvProblem.parse("mb4ic16ih8oc32oh8kh3ph1 dt=f16 tag=axb")
    legal = computes(problem, Prop.FWD)
    drawn = (legal_schedules.schedule(random.Random(seed), legal, TARGETS["sm_90"]) for seed in range(300))
    assert any(c is not None and c.keep == "b" for c in drawn)
    legal = computes(ConvProblem.parse("mb4ic64ih16oc64oh16kh1 dt=f16 tag=nhwc"), Prop.FWD)
    drawn = (legal_schedules.schedule(random.Random(seed), legal, TARGETS["sm_90"]) for seed in range(60))
    assert any(c is not None and c.reduce == "stream" for c in drawn)


@pytest.mark.parametrize("count", COUNTS)
def test_drawn_schedules_are_legal(count: int) -> None:
    for trial in drawn_trials(count):
        if trial.schedule is not None:
            legal = [a for a in trial.computes if all(x.size for x in a.axes)]
            assert legal_schedules.is_legal(trial.schedule, legal, trial.chip), str(trial)


def test_a_new_word_is_drawn_by_itself() -> None:
    """A word that is added to the table is drawn: one of its values, of the smallest of its range, of
    what its row says, or of those seen among proposals."""

    def drawn(word: Word, seen: tuple[Schedule, ...] = ()) -> set[object]:
        rng, compute = random.Random(1), drawn_trial(0).computes[0]
        return {legal_schedules._value(rng, word, Schedule(), compute, seen) for _ in range(80)}

    assert drawn(TABLE["reduce"]) == {"partials", "atomic", "stream"}
    assert drawn(TABLE["stages"]) == {1, 2, 3, 4}
    named = (dataclasses.replace(Schedule(), pack="a.b"), dataclasses.replace(Schedule(), order="x"))
    assert drawn(TABLE["pack"], named) == {"", "a.b"}
    depth = Word("depth", 2, "A number.", range(2, 100))
    assert drawn(depth) == {2, 3, 4, 5}
    assert drawn(dataclasses.replace(depth, draw=(7, 9))) == {7, 9}
    assert drawn(dataclasses.replace(depth, draw=lambda rng, schedule, compute: 8)) == {8}
    problem = ConvProblem.parse("mb2ic16ih8oc16oh8kh3ph1")
    asked = computes(problem, Prop.FWD)
    register_word(depth)
    try:
        made = [legal_schedules.schedule(random.Random(n), asked, TARGETS["sm_90"]) for n in range(40)]
        assert {2, 5} <= {c.word("depth") for c in made if c is not None}
    finally:
        unregister_word("depth")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("value", "1 of 200 elements are wrong"),
        ("nothing", "elements are wrong"),
        ("guard", "wrote outside of dst"),
        ("gap", "wrote outside of dst"),
        ("operand", "changed src"),
    ],
)
def test_what_is_wrong_is_seen(what: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong element, one that is not written, a write before, after, between, or to an operand."""
    honest = ProblemCase.judged

    def tampered(case: ProblemCase, compiled: CompiledDirection, data: str) -> object:
        dst, src = case.tensors["dst"], case.tensors["src"]
        if what == "value":
            dst.view[0, 1, 2, 3] += 1
        elif what == "nothing":
            dst.poison()
        elif what == "operand":
            src.memory[src.start + 1] += 1
        else:
            dst.memory[dst.start - 1 if what == "guard" else dst.start + 5] = 1.0
        return honest(case, compiled, data)

    line = f"{RIGHT} --stag=nchw --wtag=oihw --dtag=" + (
        "strides(400_48_8_1)" if what == "gap" else "nchw"
    )
    assert work(line=line)["status"] == "passed"
    monkeypatch.setattr(ProblemCase, "judged", tampered)
    row = work(line=line)
    assert row["status"] == "failed" and reason in row["reason"]


def test_refusals_are_no_failures() -> None:
    row = work(line="--dir=FWD_D --schedule=oh.ow:16+oc:8+ic:16+mma mb1ic8ih5oc8oh5kh3ph1")
    assert row["status"] == "refused" and "matrix unit takes 16" in row["reason"]


def test_an_address_outside_of_a_tensor_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where kernels are not verified after each pass."""
    monkeypatch.setenv(knobs.verify.name, "0")
    with planted.planted_pass(next(b for b in planted.PASSES if b.damage is planted.part_is_late)):
        row = work(
            line=f"{RIGHT.split()[0]} --schedule=oh.ow:16+oc:16+ic:16+mma+split_k=3 ic16ih5oc16oh5kh3ph1"
        )
    assert row["status"] == "failed" and "expected one in the memory of" in row["reason"]


@pytest.mark.slow
def test_shrinking_keeps_what_fails() -> None:
    """Shrinking leaves the one condition that fails, three columns of taps, and removes the rest."""
    trial = next(t for t in map(drawn_trial, range(110)) if t.problem.ndims == 3 and t.problem.k[2] >= 3)

    def fails(trials: object) -> int | None:
        return next((n for n, t in enumerate(trials) if t.problem.k[-1] >= 3), None)  # type: ignore

    simple, asked = shrink(trial, fails, most=1500)
    p = simple.problem
    assert p.k == (3,) and (p.mb, p.ic, p.oc, p.g) == (1, 1, 1, 1) and p.o == (1,)
    assert not simple.epilogue and not simple.passes and not simple.shift and asked <= 1500 + 16
    assert ConvTrial.parse(str(simple)) == simple


@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_simpler_trials_are_trials(count: int) -> None:
    for trial in drawn_trials(count):
        for simple in trial.simpler():
            assert ConvTrial.parse(str(simple)) == simple != trial


@pytest.mark.slow
def test_a_pass_that_is_wrong_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Forked workers inherit a planted bug: every weight gradient is wrong."""
    monkeypatch.setattr(main_loop, "work", _planted)
    plan = main_loop.FuzzPlan(8, seed="planted", jobs=2, interpreted=True, known=False, shrunk=1, share=0)
    monkeypatch.setattr(main_loop.knobs, "use_interpreter", lambda: None)
    assert main_loop.fuzz(plan, tmp_path / "out.json") == 1
    told = json.loads((tmp_path / "out.json").read_text())
    assert set(told["versions"]) == {"transconv", "torch", "triton"}
    assert set(told["counts"]["device"]) == {"none"}  # nothing was launched
    bad = told["not good"]
    assert told["asked"] == 8 and bad and all("--dir=BWD_W" in r["line"] for r in bad)
    simple = ConvTrial.parse(bad[0]["shrunk"])
    assert simple.prop is Prop.BWD_W and simple.problem.ndims == 1 and simple.problem.macs_padded <= 4
    assert f"--line='{bad[0]['line']}'" in capsys.readouterr().out
    assert sum(sum(c.values()) for c in told["counts"]["dtype"].values()) == 8


def _planted(**asked: object) -> dict[str, object]:
    """Every weight gradient is wrong."""
    line = str(asked.get("line") or draw_trial(asked["seed"], asked["number"]))  # type: ignore
    trial = ConvTrial.parse(line)
    wrong = trial.prop is Prop.BWD_W
    return {
        "line": line,
        "facts": trial.facts,
        "way": "numpy",
        "seconds": 0.0,
        "status": "failed" if wrong else "passed",
        "reason": "wrong" if wrong else "",
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["crash", "timeout"])
def test_a_lost_worker_costs_its_trial_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(**asked: object) -> dict[str, object]:
        if asked["number"] == 2:
            if how == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return _planted(**asked) | {"status": "passed"}

    monkeypatch.setattr(main_loop, "work", lost)
    plan = main_loop.FuzzPlan(6, seed="lost", jobs=2, interpreted=True, known=False, shrunk=0, limit_s=3.0)
    tally = main_loop.Campaign(plan).run()
    assert tally.statuses == {"passed": 5, how: 1}
    assert tally.bad[0]["line"] == str(draw_trial("lost", 2))


@pytest.mark.slow
def test_no_trial_starts_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(**asked: object) -> dict[str, object]:
        time.sleep(0.5)
        return _planted(**asked) | {"status": "passed"}

    monkeypatch.setattr(main_loop, "work", slow)
    tally = main_loop.Campaign(main_loop.FuzzPlan(1000, jobs=1, known=False, budget_s=3.0)).run()
    assert 1 <= tally.asked < 20 and tally.next(0) == tally.asked


def test_a_run_goes_on_where_another_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is stopped by a signal, which its workers ignore, and one that continues it: together
    they report every trial of a seed."""

    def stopping(**asked: object) -> dict[str, object]:
        if asked["number"] == 5 and asked["seed"] == "first":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(60)
        return _planted(**asked) | {"status": "passed"}

    monkeypatch.setattr(main_loop, "work", stopping)
    monkeypatch.setattr(main_loop.knobs, "use_interpreter", lambda: None)
    asked = {"jobs": 2, "interpreted": True, "known": False, "share": 0}
    path = tmp_path / "out.json"
    before = signal.getsignal(signal.SIGTERM)
    assert main_loop.fuzz(main_loop.FuzzPlan(9, seed="first", **asked), path) == 143  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before
    told = json.loads(path.read_text())
    assert told["next"] == 5 and told["asked"] >= 5 and told["statuses"] == {"passed": told["asked"]}
    assert "go on with --seed first --first 5" in capsys.readouterr().out
    rest = main_loop.FuzzPlan(4, seed="second", first=told["next"], **asked)  # type: ignore[arg-type]
    assert main_loop.fuzz(rest, path) == 0
    told = json.loads(path.read_text())
    assert (told["first"], told["next"], told["asked"]) == (5, 9, 4)
    assert "go on" not in capsys.readouterr().out


def test_the_next_trial_is_the_first_that_has_not_ended() -> None:
    tally = Tally()
    assert tally.next(7) == 7
    for n in (7, 8, 10):
        tally.add(_planted(seed="next", number=n) | {"status": "passed", "number": n})
    assert tally.next(7) == 9


def test_lines_that_end_early_are_named() -> None:
    """A trial that is too slow has failed; one that is too large for the chip is only reported."""
    tally = Tally()
    for status in ("resources", "timeout", "refused"):
        tally.add(_planted(seed="large", number=1) | {"status": status, "reason": f"{status}: why"})
    told = tally.to_json()
    line = str(draw_trial("large", 1))
    assert told["out of resources"] == [{"line": line, "reason": "resources: why"}]
    assert [(r["line"], r["status"]) for r in told["not good"]] == [(line, "timeout")]  # type: ignore
    assert told["refusals"] == {"resources: why": 1, "refused: why": 1}


def test_files_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text(f"# why\n\n{RIGHT}  # and more\n{RIGHT} --fast=1\n")
    entries = read(path)
    assert next(entries) == Entry("some.txt:3", ConvTrial.parse(RIGHT))
    with pytest.raises(ProblemError, match=r"some\.txt:4.*--fast=1"):
        next(entries)


def test_strange_strides_are_said() -> None:
    """Repeats, gaps, an offset, and blocks survive the text."""
    rng = random.Random(5)
    p = ConvProblem.parse("mb2ic8ih7oc8oh7kh3ph1")
    kinds = set()
    for _ in range(60):
        layouts = [conv_problems.layout(rng, s.dtype, p.shapes[n], n != "dst") for n, s in p.specs.items()]
        trial = ConvTrial(p.with_layout(layouts), Prop.FWD)
        assert ConvTrial.parse(str(trial)) == trial
        kinds |= {word for word in trial.facts["layout"].split("+")}
    assert kinds == {"nchw", "nhwc", "blocked", "gaps", "repeated", "order"}


@pytest.mark.slow
def test_the_heuristic_is_drawn_from() -> None:
    """Some schedules are the heuristic's own, others are none of its candidates."""
    own = Counter(
        t.schedule in heuristics.candidates(t.computes[0], t.chip)
        for t in drawn_trials(60)
        if t.schedule is not None
    )
    assert own[True] > 5 and own[False] > 20


FAMILIES = Path(__file__).parent / "families.txt"


def test_every_family_of_kernels_is_named() -> None:
    """`make sanitize` runs them on a GPU."""
    lines = FAMILIES.read_text().partition("\n\n")[2].splitlines()
    families = [line[2:].split(", ") for line in lines if line.startswith("# ")]
    entries = list(read(FAMILIES))
    assert len(families) == len(entries)
    for names, entry in zip(families, entries, strict=True):
        schedule = entry.trial.schedule
        assert schedule is not None
        for name in names:
            for word in name.split():
                key, eq, value = word.partition("=")
                if eq:
                    assert str(getattr(schedule, key)) == value, f"{entry.place}: {word}"


@pytest.mark.every(24)
@pytest.mark.parametrize("entry", list(read(FAMILIES)), ids=lambda e: e.place)
def test_every_family_of_kernels_is_right(entry: Entry) -> None:
    row = main_loop.work(line=str(entry.trial), way="numpy")
    assert row["status"] == "passed", row


def test_schedules_of_products_with_bytes_are_those_of_the_product() -> None:
    """Not of the sums that are subtracted from it, which have other axes."""
    trial = ConvTrial.parse("--dt=u8:u8:i32 --epilogue=zero:src mb2ic16ih7oc16oh7kh3ph1")
    assert [c.name for c in trial.computes] == ["fwd"]
    for seed in range(20):
        drawn = legal_schedules.schedule(random.Random(seed), trial.computes, trial.chip)
        assert drawn is None or legal_schedules.is_legal(drawn, trial.computes, trial.chip)


@pytest.mark.slow
def test_trials_with_zero_points_are_drawn_and_right() -> None:
    found = [t.epilogue for t in drawn_trials(110) if "zero:" in t.epilogue]
    assert any("zero:src" in words or "zero:dst" in words for words in found)
    line = (
        "--dir=FWD_D --dt=u8:i8:i8 --stag=nhwc --wtag=ohwi --dtag=nhwc --schedule=oh.ow:32+fma "
        "--epilogue=zero:src:per_ic+zero:wei+bias mb1ic3ih7oc3oh5kh3sh2ph3"
    )
    assert work(line=line, way="numpy")["status"] == "passed"


QUANTISED = (
    "--dir=FWD_D --dt=s8:s8:s8 --epilogue=zero:src+mul:f32:per_oc+add:s32:common mb1ic8ih5oc8oh5kh3ph1"
)


@pytest.mark.slow
def test_sets_of_scales_and_zero_points_are_problems_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(line=QUANTISED, sets=3)["problems"] == 3
    assert work(line=RIGHT, sets=3)["problems"] == 1  # nothing but its operands could differ
    wide = QUANTISED.replace("s8:s8:s8", "s8:s8:f32").replace("zero:src+", "")
    assert work(line=wide, sets=3)["problems"] == 1  # a result that neither rounds nor saturates
    seen: list[dict[str, Any]] = []
    honest = conv_trial.judged

    def wrong(trial: ConvTrial, case: ProblemCase, *rest: Any) -> str:
        found = honest(trial, case, *rest)
        seen.append({n: t.view.clone() for n, t in case.held.items() if n != "dst"})
        return "planted" if trial.values == 2 else found

    monkeypatch.setattr(conv_trial, "judged", wrong)
    assert work(line=QUANTISED.replace("--dt", "--values=1 --dt"))["status"] == "passed"
    assert work(line=QUANTISED)["status"] == "passed"
    assert all(not torch.equal(seen[0][n], seen[2][n]) for n in seen[0])  # both of exact data
    row = work(line=QUANTISED, sets=4)
    assert row["status"] == "failed" and ConvTrial.parse(row["line"]).values == 2 and row["problems"] == 2
    assert work(line=row["line"])["status"] == "failed"


def test_workers_on_a_device_share_what_starts_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C compiler makes it; kernels of as many arguments have the same."""
    asked: list[str] = []
    monkeypatch.setattr(main_loop, "prepare", lambda scratch, launchers="": asked.append(launchers))
    monkeypatch.setattr(conv_trial, "judged", lambda *given: "")
    for way in ("device", "numpy"):
        assert work(line=RIGHT, way=way)["status"] == "passed"
    assert asked == ["triton", ""]


@pytest.mark.slow
def test_trials_of_small_types_alone() -> None:
    made = [SMALL_TYPES.drawn(3, n, "sm_90") for n in range(30)]
    assert all(any(t.bits == 8 for t in trial.problem.dtypes) for trial in made)
    known = {t.name for trial in made for t in trial.problem.dtypes}
    assert known >= {"i8", "u8", "i32", "f8e4m3", "f8e5m2"}
    assert all(SMALL_TYPES.read(str(trial)) == trial for trial in made)
    row = work(3, 0, kind="small-types")
    assert row["status"] in GOOD and row["line"] == str(made[0])
