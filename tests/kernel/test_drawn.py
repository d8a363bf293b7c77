"""Drawn kernels: engines agree, planted bugs are found, failures become short programs."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests import programs
from tests.kernel.planted import BUGS, Bug
from transconv.__main__ import main
from transconv.backend_triton import CompileJob, Resources, compile_offline
from transconv.errors import ProblemError
from transconv.kernel.functions import FUNCTIONS
from transconv.kernel.trials.draw import draw_trial, work
from transconv.kernel.trials.trial import KernelTrial, loaded
from transconv.target import Target
from transconv.verify.fuzz.main_loop import kind_of, repeated, without_kernels
from transconv.verify.fuzz.trial import shrink

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

# Shrunk trials of bugs that were found.
FAILED_ONCE = (
    "kernel work=17,1 group=16,1 seed=820 M=i8[17,1]~ P=i8[1,17,1]! ;; i, j = group.work_offset() ;; "
    "v1 = group.load(M[i:, j:], shape=group.shape) ;; v4 = np.clip(v1, -129, -5) ;; "
    "for k in range(1, 4): ;; > v4 = v4 // 3 + np.maximum(v1, v4) ;; group.store(P[0, i:, j:], v4)",
    "kernel work=1,6 group=1,5 seed=891 Z=f32[1,9] Y=f32[3,8,14]! ;; i, j = group.work_offset() ;; "
    "R, C = group.shape ;; v1 = group.load(Z[i:, j:], shape=(R, C)) ;; v9 = v1 ;; if j == 0: ;; > v9 = v1 "
    ";; else: ;; > v9 = v9 - group.load(Z[i:, j:], shape=(R, C)) ;; group.store(Y[1, i:, j:], v9)",
    "kernel work=2 group=1 seed=394 H=f16[2,2] Y=f32[1,2,2]! ;; j, = group.work_offset() ;; "
    "i, R, C = 0, 2, group.shape[0] ;; v8 = group.load(H[i:, j:], shape=(R, C)) ;; "
    "v9 = np.minimum(v8, group.full(shape=(R, C), dtype=np.float16, fill_value=1.0)) ;; "
    "v10 = (v8 @ v9.T).max(axis=1, keepdims=True) * 0.125 ;; group.store(Y[0, i:, j:], v10)",
    "kernel work=23 group=8 seed=37 sub=8 X=f32[21] Z=f32[23] Y=f32[2,23]! ;; i, = "
    "group.work_offset() ;; @group.subgroups ;; def inner(sg): ;; > me, n = sg.subgroup_id(), "
    "sg.size() ;; > at = i + me * n ;; > v0 = group.vload(X[at:], shape=(n,)) ;; > v1 = "
    "group.vload(Z[at:], shape=(n,)) ;; > v2 = v0 * 0.5 + v1 ;; > if me % 2 == 0: ;; >> v2 = "
    "np.minimum(v2, group.vload(Z[at + 1:], shape=(n,))) ;; > else: ;; >> v2 = v2 * 0.25 ;; > "
    "for k in range(3): ;; >> v2 = np.minimum(v2, group.vload(Z[at + k:], shape=(n,))) ;; > "
    "v3 = np.clip(v2, -4.0, 4.0) + group.vfull((n,), np.float32, 0.5) ;; > group.store(Y[0, "
    "at:], v2) ;; > group.store(Y[1, at:], v3) ;; inner()",
    "kernel work=7 group=8 seed=525 sub=8 X=f32[7] Z=f32[7] Y=f32[2,7]! ;; i, = "
    "group.work_offset() ;; @group.subgroups ;; def inner(sg): ;; > me, n = sg.subgroup_id(), "
    "sg.size() ;; > at = i + me * n ;; > v0 = group.vload(X[at:], shape=(n,)) ;; > v1 = "
    "group.vload(Z[at:], shape=(n,)) ;; > v2 = v0 * 0.5 + v1 ;; > v3 = np.where(v1.mask, 2.0, "
    "v2) ;; > if me % 2 == 0: ;; >> v2 = np.minimum(v2, group.vload(Z[at + 1:], shape=(n,))) "
    ";; > else: ;; >> v2 = v2 * 0.25 ;; > if at + 2 < X.shape[0]: ;; >> v2 = np.minimum(v2, "
    "group.vload(Z[at + 1:], shape=(n,))) ;; > else: ;; >> v2 = v2 * 0.25 ;; > for k in "
    "range(3): ;; >> v3 = np.minimum(v3, group.vload(Z[at + k:], shape=(n,))) ;; > "
    "group.store(Y[0, at:], v2) ;; > group.store(Y[1, at:], v3) ;; inner()",
    "kernel work=3 group=2 seed=318 sub=2 X=f32[1] Z=f32[3] Y=f32[2,3]! ;; i, = "
    "group.work_offset() ;; @group.subgroups ;; def inner(sg): ;; > me, n = sg.subgroup_id(), "
    "sg.size() ;; > at = i + me * n ;; > v0 = group.vload(X[at:], shape=(n,)) ;; > v1 = "
    "group.vload(Z[at:], shape=(n,)) ;; > v2 = v0 * 0.5 + v1 ;; > v3 = np.where(v1 > 0.25, "
    "v2, v1) ;; > if me % 2 == 0: ;; >> v3 = v3 * 0.5 + group.vload(Z[at + 1:], shape=(n,)) "
    ";; > v4 = v2 + v0 * 0.5 ;; > v5 = np.clip(v4, -4.0, 4.0) + group.vfull((n,), np.float32, "
    "0.5) ;; > if me % 2 == 0: ;; >> v4 = v4 + 1.0 ;; > else: ;; >> v4 = v4 * 0.25 ;; > "
    "group.store(Y[0, at:], v4) ;; > group.store(Y[1, at:], v5) ;; inner()",
    "kernel work=11,32 group=12,33 seed=32 X=f32[11,1] Z=f32[12,1] K=i8[11,32] "
    "Y=f32[3,11,32]! W=f32[13]! T=f32[30,9]! ;; i, j = group.work_offset() ;; R, C = "
    "group.shape ;; v0 = group.load(X[i:, j:], shape=(R, C)) ;; v1 = group.vload(Z[i:, j:], "
    "shape=(R, C)) ;; v2 = group.load(K[i:, j:], shape=(R, C)).astype(np.int32) ;; v3 = v0 * "
    "0.5 + v1 ;; atomic_ref(W)[0] -= group.load(X[i:, j:], shape=(R, C)).sum() ;; v4 = v3 + "
    "v3 ;; v5 = group.load(X, shape=(R, C), mapping=create_mapping(lambda a, b: (i + a // 2, "
    "j + b - 1))) ;; group.store(Y[0, i:, j:], v3) ;; group.store(Y[1, i:, j:], v4) ;; "
    "group.store(Y[2, i:, j:], v5) ;; group.store(T[j:, i:], v1.T)",
)


def right(numbers: Sequence[int], way: str) -> None:
    bad = [row for n in numbers if (row := work("tests", n, way=way))["status"] != "passed"]
    assert not bad, "\n".join(f"{r['reason']}\n{repeated(r)}" for r in bad)


@pytest.mark.every(2)
@pytest.mark.parametrize("line", FAILED_ONCE)
def test_what_failed_once(line: str) -> None:
    for way in ("numpy", "triton") if INTERPRETED else ("numpy",):
        assert work(line=line, way=way)["status"] == "passed"


@pytest.mark.slow
def test_a_branch_around_an_addition_of_one_thread_is_right(tmp_path: Path) -> None:
    """A warp takes `BRA.U` where all of its threads do, and the others wait at a second branch."""
    trial, target = KernelTrial.parse(FAILED_ONCE[-1]), Target.parse("sm_90")
    low = loaded(trial.kernel(), tmp_path).lower(trial.launch, *trial.made().values(), target=target)
    assert low.kernel.sizes is not None
    job = CompileJob(
        low.source,
        low.kernel.name,
        tuple((t.dtype.name, ()) for t in low.kernel.params),
        target.name,
        target.backend,
        target.arch,
        target.warp_size,
        1,
        low.num_stages,
        ("sass",),
        sizes=len(low.kernel.sizes.names),
        fuse=False,
    )
    (found,) = compile_offline([job])
    assert isinstance(found, Resources) and "BRA.U" in found.texts["sass"] and not found.flaw


@pytest.mark.slow
def test_in_the_interpreter_of_the_ir() -> None:
    """`transconv fuzz --kernels` runs more."""
    right(range(5), "numpy")


@pytest.mark.slow
@interpreted
def test_in_tritons_interpreter() -> None:
    right(range(8, 11), "triton")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many(part: int) -> None:
    right(range(20 + 40 * part, 40 + 40 * part), "numpy")
    if INTERPRETED:
        right(range(40 + 40 * part, 60 + 40 * part), "triton")


@pytest.mark.slow
def test_everything_is_drawn() -> None:
    seen: dict[str, set[str]] = {}
    trials = [draw_trial("u", n) for n in range(400)]
    for name, word in ((n, w) for t in trials for n, w in t.facts.items()):
        seen.setdefault(name, set()).add(word)
    assert all(len(words) > 1 for words in seen.values()), seen
    whole = "\n".join(str(t) for t in trials)
    for said in (
        "vload",
        "argmax",
        "argmin",
        ".mask",
        "group.empty",
        "out=",
        "mixed(",
        " @ ",
        "f16",
        "bool",
        "i8",
        "u8",
        "i64",
        "~ ",
        "fill=",
        "else:",
        "[None]",
        "[:, None]",
        "global_id",
        ">>>> ",
        "axis=(0, 2)",
        ".T",
        "subgroups",
        "scoped(",
        "own(",
        "atomic_ref(W)",
        "mapping=create_mapping",
    ):
        assert said in whole, said


def test_numpy_knows_no_rows_of_kernels() -> None:
    """What the simulator and compiled kernels both do wrong is found."""
    line = (
        "kernel work=5 group=4 seed=1 N=i8[5]~ P=i8[5]! ;; i, = group.work_offset() ;; "
        "x = group.load(N[i:], shape=group.shape) ;; group.store(P[i:], np.maximum(x, -x))"
    )
    row, least = FUNCTIONS["maximum"], FUNCTIONS["minimum"]
    held = row.numpy, row.expression
    assert work(line=line)["status"] == "passed"
    try:
        object.__setattr__(row, "numpy", least.numpy)
        object.__setattr__(row, "expression", least.expression)
        assert "in NumPy" in work(line=line)["reason"]
    finally:
        object.__setattr__(row, "numpy", held[0])
        object.__setattr__(row, "expression", held[1])


def test_groups_of_any_shape_say_the_same() -> None:
    """What does not depend on the group is one answer, that of NumPy on whole arrays."""
    trials = [t for t in (draw_trial("groups", n) for n in range(40)) if t.whole]
    for trial, group in zip(trials[:2], ((3, 5), (32, 32)), strict=True):
        row = work(line=str(replace(trial, group=group)))
        assert row["status"] == "passed" and row["nonzero"] > 0, row["reason"]


def test_lines_read_back() -> None:
    for trial in (draw_trial("u", n) for n in range(40)):
        assert KernelTrial.parse(str(trial)) == trial
    for line, said in (
        ("kernel work=3 ;; x", "expected kernel work= group= seed="),
        ("kernel work=3 X=f99[3] ;; x", "X=f99"),
    ):
        with pytest.raises(ProblemError, match=said):
            KernelTrial.parse(line)


@pytest.mark.slow
def test_a_trial_is_the_same_in_another_process() -> None:
    code = (
        "from transconv.kernel.trials.draw import draw_trial;"
        "print([str(draw_trial('tests', n)) for n in range(6)])"
    )
    told = programs.run(["-c", code], cwd=ROOT, check=True).stdout
    assert told.strip() == str([str(draw_trial("tests", n)) for n in range(6)])


def plant(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    folder, module, *names = bug.where.split(".")
    owner = importlib.import_module(f"transconv.kernel.{folder}.{module}")
    for name in names[:-1]:
        owner = getattr(owner, name)
    patch.setattr(owner, names[-1], bug.made(getattr(owner, names[-1])))


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.what)
def test_what_a_bug_replaces_is_there(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "bug", [b if b.quick else pytest.param(b, marks=pytest.mark.slow) for b in BUGS], ids=lambda b: b.what
)
def test_planted_bugs_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    assert any(work("plant", n)["status"] == "failed" for n in range(bug.first, bug.first + 200))


@pytest.mark.slow
def test_a_failure_becomes_a_short_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program shows the difference, and its line repeats it."""
    plant(next(b for b in BUGS if b.what.startswith("what is assigned")), monkeypatch)
    begin = KernelTrial.parse(
        "kernel work=5,3 group=4,2 seed=1 X=f32[6,2] K=i8[3,3] Y=f32[2,5,3]! ;; "
        "i, j = group.work_offset() ;; R, C = group.shape ;; v0 = group.load(X[i:, j:], shape=(R, C)) ;; "
        "v1 = group.load(K[i:, j:], shape=(R, C)).astype(np.float32) ;; v2 = v0 * 0.5 + v1 ;; "
        "for k in range(3): ;; > v2 = v2 + v0 ;; v3 = v0.copy() ;; v3[:, 0] = -2.0 ;; if i > 0: ;; "
        "> v2 = v2 * 2.0 ;; group.store(Y[0, i:, j:], v2) ;; group.store(Y[1, i:, j:], v3)"
    )
    kind = kind_of(work(line=str(begin)))
    assert kind == "failed"

    def fails(tried: Sequence[KernelTrial]) -> int | None:
        return next((n for n, t in enumerate(tried) if kind_of(work(line=str(t))) == kind), None)

    simple, _ = shrink(begin, fails)
    assert len(simple.lines) <= 6 and "for k" not in str(simple) and sum(simple.work) <= 3
    assert work(line=str(simple))["status"] == "failed"
    compile(simple.program(), "program", "exec")
    assert "drawn.simulate(group, " in simple.program()


def test_simpler_trials_are_trials() -> None:
    for number in range(4):
        trial = draw_trial("u", number)
        found = list(itertools.islice(trial.simpler(), 20))
        assert found and all(KernelTrial.parse(str(t)) == t != trial for t in found)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--kernels", "3", "--n", "3", "--interpreter"]) == 2
    assert "--n and --kernels say how many" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "transconv", "fuzz", "--kernels", "6", "--interpreter", "--jobs", "1"]
    told = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "6 trials" in told.stdout and "6 passed" in told.stdout


def test_launchers_stay_in_the_cache(tmp_path: Path) -> None:
    """Compiled kernels leave it, but for those that may still be written."""
    for name, file, old in (
        ("a", "drawn.cubin", True),
        ("b", "launcher.so", True),
        ("c", "new.cubin", False),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
        if old:
            os.utime(tmp_path / name, (1, 1))
    without_kernels(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]


def test_a_file_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs in two interpreters."""
    path = tmp_path / "some.txt"
    path.write_text(
        "# why\nkernel work=5 group=4 seed=1 X=f32[5] Y=f32[5]! ;; "
        "i, = group.work_offset() ;; "
        "group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2.0)\n"
    )
    assert main(["fuzz", "--file", str(path), "--interpreter", "--share", "0", "--jobs", "1"]) == 0
    assert "2 passed" in capsys.readouterr().out
