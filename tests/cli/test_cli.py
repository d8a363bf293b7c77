"""The command line: what each verb prints, its exit codes, and errors of one line."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from transconv import runtime
from transconv.__main__ import main
from transconv.passes import passes, stages
from transconv.verify import judgement

STRIDED = "mb32ic64ih56oc128oh28kh3sh2ph1"
Output = pytest.CaptureFixture[str]


def printed(capsys: Output, *words: str, code: int = 0) -> str:
    assert main(words) == code
    return capsys.readouterr().out


@pytest.mark.slow
def test_show_reads_like_the_design(capsys: Output) -> None:
    """Stride masks are proven away by the phase split, other masks with the facts named."""
    page = printed(capsys, "show", STRIDED, "--prop", "bwd_d")
    assert [f"compute bwd_d_{r}_{s}\n" in page for r in "01" for s in "01"] == [True] * 4
    last = page[page.index("compute bwd_d_1_1") : page.index("\nschedule")]
    assert "M  rows     mb=32  qh=28  qw=28" in last
    assert "A = dst[mb, oc, oh = qh - th + 1, ow = qw - tw + 1]" in last
    assert re.search(r"always true: \(qh\*2 \+ 2 - th\*2\) % 2 == 0 +.*is a multiple of 2", last)
    assert re.search(r"always true: 0 <= oh +qh - th \+ 1 in 0..28 by qh in 0..27, th in 0..1", last)
    assert re.search(r"kept: +oh < 28", last)
    assert not re.search(r"kept: .*%", page), "a stride mask is left"
    assert "refused: " in page and "times as long" in page
    phases = [f"conv_bwd_d_{r}_{s}_mb32" for r in "01" for s in "01"]
    for name in ("pack_dst", "pack_wei", *phases, "conv_bwd_d_mb32", "unpack_src"):
        assert re.search(rf"^def {name}", page, re.MULTILINE), name
    assert max(map(len, last.splitlines())) <= 100


@pytest.mark.every(3)
@pytest.mark.parametrize("stage", [s.name for s in stages()])
def test_every_stage_prints(capsys: Output, stage: str) -> None:
    page = printed(capsys, "show", "mb2ic16ih9oc32oh9kh3ph1", "dt=f16", "--stage", stage)
    assert page.startswith("problem    ic16ih9oc32oh9kh3ph1 dt=f16")
    telling = {
        "problem": "GFLOP",
        "compute": "acc = sum of A * B over kh, kw, ic, in f32",
        "schedule": "| mma |",
        "merging": "(unchanged)",
        "packing": "(unchanged)",
        "naive": "for ow in 0..9 parallel:",
        "emit": "@triton.jit",
        "together": "nothing to put together: fwd",
    }
    assert telling.get(stage, "grid:\n") in page
    assert stage in ("problem", "compute", "schedule", "together") or f"---- {stage}: " in page


def test_the_forms_of_a_computation_are_stages(capsys: Output) -> None:
    page = printed(
        capsys,
        "show",
        "g8mb2ic32ih8oc32oh8kh3ph1",
        "dt=f16",
        "--schedule",
        "mb.oh.ow:32 oc:16 ic:16 | mma | merge=4 pack=a.b stages=2",
        "--stage",
        "all",
    )
    merging = page[page.index("---- merging: ") : page.index("---- packing: ")]
    packing = page[page.index("---- packing: ") : page.index("---- naive: ")]
    assert "g=2" in merging and "_packed" not in merging
    assert "wei_packed4" in packing and "src_packed" in packing


def test_diff_shows_what_each_pass_changed(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_PASSES", "-cse")
    page = printed(capsys, "show", STRIDED, "--diff")
    titles = [f"---- {p.name}: {p.phrase}" for p in passes()]
    assert [t for t in titles if t not in page] == []
    assert "(unchanged)" in page and "(switched off)" in page
    assert re.search(r"^-.*tile:$", page, re.MULTILINE)
    assert re.search(r"^\+.*dot", page, re.MULTILINE)
    assert re.search(r"\(\d+ ms\)", page)


def test_epilogue_schedule_and_target(capsys: Output) -> None:
    schedule = "mb.oh.ow:64 oc:32 ic:16 | mma | stages=2 warps=4"
    page = printed(
        capsys, "show", STRIDED, "--schedule", schedule, "--epilogue", "bias+relu", "--target", "gfx942"
    )
    assert "# target gfx942" in page and "# epilogue bias+relu" in page
    assert "bia_value = tl.load(bia" in page
    assert re.search(r"^schedule +mb\.oh\.ow:64 oc:32 ic:16 \| mma", page, re.MULTILINE)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "mb32ic6"], "ProblemError: problem 'mb32ic6': 'oc' is missing or 0; expected ocN"),
        (["show", STRIDED, "--schedule", "oc:48"], "an extent is a power of two"),
        (["show", STRIDED, "--schedule", "nonsense"], "'nonsense' is neither a block"),
        (["show", STRIDED, "--target", "sm_10"], "target 'sm_10' is unknown; expected one of sm_80"),
        (["show", STRIDED, "--epilogue", "rely"], "has 'rely', expected one of: bias"),
        (["run", STRIDED, "--layout", "nhcw8"], "ProblemError: "),
        (["compile", STRIDED, "dt=f17", "--target", "sm_90"], "dt=f17 is unknown; expected one of"),
        (
            ["show", STRIDED, "dt=s8:f8e4m3:f16"],
            "f8e4m3 has not all numbers of i8; expected two types of floats",
        ),
        (["show", STRIDED, "dt=s32"], "src of dtype i32; expected one of f8e4m3 f8e5m2 f16"),
        (["bisect", STRIDED, "dt=s32"], "src of dtype i32; expected one of f8e4m3 f8e5m2 f16"),
        (["bisect", STRIDED.replace("mb32", "mb0")], "no element to compute"),
        (["show", STRIDED, "--schedule", "oc:32 | stages=2 stages=3"], "'stages' is said twice"),
        (["show", STRIDED, "--schedule", "oc:32 | mma fma"], "'unit' is said twice"),
        *[
            (
                [verb, f"mb2ic8ih4oc8oh4kh3ph1 tag=nchw:oihw:{layout}", "--prop", "fwd", *more],
                "elements of which share a place in the layout",
            )
            for layout in ("strides(0,16,4,1)", "strides(0,0,0,0)", "strides(64,16,3,1)")
            for verb, *more in (["run"], ["show"], ["tune"], ["compile", "--target", "sm_90"])
        ],
        (
            ["run", "mb2ic8ih4oc8oh4kh3ph1 tag=nchw:oihw:strides(128,16,4,1)-5", "--prop", "fwd"],
            "negative stride or offset, which leads out of its memory; expected 0 or more",
        ),
        (["run", "lists/none.txt"], "FileNotFoundError: no such file: lists/none.txt"),
        (["tune", "lists/none"], "FileNotFoundError: no such file: lists/none"),
        (["check", "--target=sm_1", STRIDED], "target 'sm_1' is unknown; expected one of sm_80"),
        (["tune", "bench/problems/vgg16.txt", "--match", "("], "the pattern '(' cannot be read"),
        (["tune", "bench/problems/vgg16.txt", "--kinds", "thick"], "kinds thick are unknown; expected"),
        (["tune", "bench/problems/vgg16.txt", "--match", "resnet"], "none of 9 layers is selected"),
        (["run", STRIDED, "dt=s32"], "src of dtype i32; expected one of f8e4m3 f8e5m2 f16"),
        (["tune", STRIDED, "dt=s32"], "src of dtype i32; expected one of f8e4m3 f8e5m2 f16"),
        (["show", STRIDED, "--dtype", "s64"], "dt=s64 is unknown; expected one of f8e4m3 f8e5m2 f16"),
        (
            ["show", STRIDED + 'n"a\x07b"'],
            "the name 'a\\x07b' has a quote or a space in it, or what cannot",
        ),
        (["check", "--misalign=99999999999", STRIDED], "'99999999999' is no number up to"),
        (
            ["run", STRIDED, "--prop", "fwd", "--sizes", "N=3"],
            f"--sizes N=3 has nothing to set: the sizes of {STRIDED} are numbers",
        ),
        *[
            ([verb, "docs/examples/softmax.txt", "--sizes=N=3"], "the sizes of softmax are numbers")
            for verb in ("run", "bisect", "check")
        ],
        (["check", "--batch=/dev/zero"], "/dev/zero has more than"),
        (["tune", "/dev/zero"], "/dev/zero has more than"),
        (["tune", STRIDED, "--db", "/dev/zero"], "/dev/zero has more than"),
    ],
)
def test_errors_are_one_line(capsys: Output, words: list[str], message: str) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "content", "verbs", "message"),
    [
        ("empty.txt", b"# nothing\n", "run", "empty.txt has no problem"),
        ("empty.txt", b"# nothing\n", "demo --network", "empty.txt contains no problem"),
        ("empty.txt", b"# nothing\n", "fuzz --interpreter --file", "empty.txt contains no trial"),
        ("empty.txt", b"", "tune", "none of 0 layers is selected"),
        ("list.txt", b"mb1ic8ih6oc8oh6kh3ph1\n", "show", "is a file; show takes one problem"),
        ("bin.txt", b"\xff\xfe\0", "run", "bin.txt: this is no text; expected a benchdnn batch file"),
        ("a.json", b"{", "tune", "a.json: Expecting property name"),
        ("a.json", b"[1]", "tune", "a.json: layers of schema None; expected 'transconv-suite-1'"),
        (
            "a.json",
            b'{"schema": "transconv-suite-1", "layers": [{"name": "x"}]}',
            "tune",
            "layer 1 (x) has no 'in_size'",
        ),
        (
            "other.csv",
            b"a,b\n1,2\n",
            "tune mb1ic8ih6oc8oh6kh3ph1 --trials 1 --prop fwd --log",
            "other.csv is another table, with a, b among its columns",
        ),
        (
            "line.csv",
            b"notes",
            "tune mb1ic8ih6oc8oh6kh3ph1 --trials 1 --prop fwd --db",
            "line.csv holds no row of tuned schedules",
        ),
    ],
)
def test_files_that_are_something_else_are_refused_and_left_alone(
    capsys: Output, tmp_path: Path, name: str, content: bytes, verbs: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main([*verbs.split(), str(tmp_path / name)]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "words",
    [
        "tune x --trials 0",
        "tune x --jobs 0",
        "tune x --mb -1",
        "tune x --time-budget -1",
        "fuzz --n -5",
        "fuzz --jobs none",
        "bisect x --limit 0",
        "matrix --jobs -1",
        "compile x --target sm_90 --timeout nan",
        "compile x --target sm_90 --print asm",
        "check x --workers=-5",
        "check x --time-budget=nan",
        "check x --limit=0",
        "check x --memory=inf",
        "check x --shard=1/1",
        "check x --schedules=0",
        "fuzz --share 1.5",
        "fuzz --seed x",
        "fuzz --limit inf",
        "tune x --budget-ms 0",
        "tune x --limit 0",
        "matrix --share 5/3",
        "matrix --timeout 0",
        "check x --json=/proc/none/x",
        "tune x --db /proc/none/x.csv",
        "tune x --log .",
        "fuzz --json .",
    ],
)
def test_numbers_and_words_out_of_range_are_refused(capsys: Output, words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "error: argument --" in told and told.count("\n") == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["x²", "{y}", "a'b", "%s", "\\n", "#", "...", "ä" * 200])
def test_names_may_have_any_letters(capsys: Output, name: str) -> None:
    problem = f'mb1ic4ih5oc4oh5kh3ph1n"{name}"'
    assert "1 of 1 right" in printed(capsys, "run", problem, "--prop", "fwd")
    assert "passed:1" in printed(capsys, "check", "--dir=FWD_D", problem)


@pytest.mark.parametrize(
    "problem",
    [
        "ic1iw1000000000000000oc1kw10000000",
        "ic1iw1000000000000000oc1kw1000000000000000",
        "mb1000000ic1000000ih1000000oc1000000oh1000000kh3ph1",
    ],
)
def test_problems_that_no_machine_holds_are_shown_in_no_time(capsys: Output, problem: str) -> None:
    started = time.perf_counter()
    assert " GFLOP, " in printed(capsys, "show", problem, "--stage", "problem")
    assert time.perf_counter() - started < 30


def test_no_images_need_no_kernel(capsys: Output) -> None:
    assert "nothing to compute" in printed(capsys, "show", STRIDED.replace("mb32", "mb0"))


@pytest.mark.parametrize("verb", ["show", "run", "check", "compile", "demo"])
def test_help_has_an_example(capsys: Output, verb: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    assert f"examples:\n  transconv {verb}" in capsys.readouterr().out


def test_unknown_words_are_refused(capsys: Output) -> None:
    for words in (["shw"], ["show", STRIDED, "--prop", "forward"], ["show"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        assert "error: " in capsys.readouterr().err


def test_run_prints_a_row_for_each_direction(capsys: Output) -> None:
    page = printed(capsys, "run", "mb1ic8ih6oc16oh6kh3ph1", "--dtype", "f16", "--layout", "nhwc")
    rows = re.findall(r"^mb1ic8\S+ dt=f16 tag=nhwc +(\w+) +0 +right +.*conv_\w+\.py", page, re.MULTILINE)
    assert rows == ["fwd", "bwd_d", "bwd_w"]
    assert "3 of 3 right, each compared with the answer" in page


def test_run_goes_on_after_errors_and_tells(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = tmp_path / "list.txt"
    problems.write_text(
        "--dir=FWD_D\nmb1ic4ih5oc4oh5kh3ph1\nmb1ic4ih6oc4oh6kh3ph1\n--dir=BWD_W mb1ic4ih5oc4oh5kh3ph1\n"
    )
    honest = runtime.plan

    def plan(workload: object, *others: object, **more: object) -> object:
        if "ih6" in str(workload):
            raise RuntimeError("the compiler tripped")
        return honest(workload, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime, "plan", plan)
    for answer in ("convolve", "convolve_in_torch"):  # which are compared with one another
        monkeypatch.setattr(judgement, answer, _off_by_one(getattr(judgement, answer)))
    page = printed(capsys, "run", str(problems), code=1)
    assert "0 of 3 right" in page and "2 wrong, 1 with errors" in page
    assert "ERROR   RuntimeError: the compiler tripped" in page
    assert page.count("elements are wrong") == 4  # in the row, and again at the end


def _off_by_one(reference: object) -> object:
    def wrong(*arguments: object) -> object:
        return reference(*arguments) + 1  # type: ignore[operator]

    return wrong


@pytest.mark.slow
def test_compile_prints_resources(capsys: Output) -> None:
    page = printed(
        capsys,
        "compile",
        "mb32ic64ih28oc64oh28kh3ph1",
        "dt=bf16",
        "tag=nhwc",
        "--prop",
        "fwd",
        "--target",
        "sm_90,pvc",
        "--print",
        "ptx",
        code=1,
    )
    assert re.search(r"^sm_90 +\d+ +0 +\d+ +[\d.]+s  conv_fwd_\w+\n +HGMMA:\d+", page, re.MULTILINE)
    assert "xpu is not compilable offline" in page
    assert ".target sm_90a" in page
    text = (
        "compute twice ;; tensor X f32 [64] ;; tensor C f32 [64] ;; axes m=64 ;; read x = X[m] ;; "
        "store C[m] = x * 2"
    )
    assert "ttg.num-warps" in printed(capsys, "compile", text, "--target", "sm_90", "--print", "ttgir")


@pytest.mark.slow
def test_demo_of_a_small_network(capsys: Output, tmp_path: Path) -> None:
    network = tmp_path / "tiny.txt"
    network.write_text("mb64ic8ih12oc16oh6kh3sh2ph1\nmb64ic16ih6oc8oh6kh1\n")
    page = printed(capsys, "demo", "--network", str(network))
    assert "PASSED: 6 of 6 kernels of tiny are right" in page
    assert "always true: (qh*2 + 2 - th*2) % 2 == 0" in page
    assert "---- lanewise: " in page and "HGMMA:" in page and "v_mfma:" in page


def test_a_sum_over_no_images_has_a_page(capsys: Output) -> None:
    """A weight gradient of an empty batch is zero, which a kernel stores."""
    page = printed(capsys, "show", "mb0ic8ih8oc8oh8kh3ph1", "--prop", "bwd_w", "--target", "sm_90")
    assert "schedule   " in page and "def conv_bwd_w" in page


def test_one_step_is_one(capsys: Output) -> None:
    page = printed(
        capsys,
        "show",
        "mb64ic64ih1oc64oh1kh1",
        "dt=f16",
        "--target",
        "sm_90",
        "--schedule",
        "mb:64 oc:64 ic:64 | mma",
        "--stage",
        "schedule",
    )
    text = " ".join(page.split())
    assert "1 tile on 132 multiprocessors is" in text and "; 1 step of 64x64x64;" in text


def test_explicit_kernels_are_refused_for_the_interpreter(capsys: Output) -> None:
    explicit = "mb:2 oh:8 ow:8 oc:16 ic:16 | mma | a=box b=box via=gluon stages=2"
    words = [
        "show",
        "mb2ic16ih8oc16oh8kh3ph1",
        "dt=f16",
        "tag=nhwc",
        "--epilogue",
        "bias",
        "--target",
        "interpreter",
        "--schedule",
        explicit,
    ]
    assert main(words) == 2
    assert "via=gluon: Triton's interpreter cannot run Gluon" in capsys.readouterr().err


def test_diff_of_a_text_shows_what_each_pass_changed(capsys: Output) -> None:
    text = "compute scale\naxes n=64\nread x = X[n]\nstore Y[n] = x*2"
    page = printed(capsys, "show", text, "--target", "sm_90", "--schedule", "n:32 | fma", "--diff")
    assert [p.name for p in passes() if f"---- {p.name}: " not in page] == [] and "---- scale ----" in page
    assert "(unchanged)" in page and re.search(r"^\+.*tile:$", page, re.MULTILINE)
    assert "@triton.jit" in page


def test_pages_of_the_matrix_come_from_the_record_at_once(capsys: Output, tmp_path: Path) -> None:
    """Nothing is compiled; a second page lies beside the first, so that it must be a file of its own."""
    began = time.perf_counter()
    printed(capsys, "matrix", "--page", str(tmp_path / "targets.md"))
    assert time.perf_counter() - began < 30
    assert {p.name for p in tmp_path.iterdir()} == {"targets.md", "targets_kernels.md"}
    with pytest.raises(SystemExit) as left:
        main(["matrix", "--page", "/dev/stdout"])
    assert left.value.code == 2 and "is no Markdown file" in capsys.readouterr().err


def test_what_no_fusion_removes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums along two axes: one is in memory before the other kernel begins. Of one kernel nothing."""
    text = (
        "compute centred\n axes n=64 k=512\n read x = X[n, k]\n let rows = sum(x; k)\n"
        " let columns = sum(x; {axis})\n store Y[n, k] = x - rows / 512 - columns / 64"
    )
    for axis, warned in (("n", True), ("k", False)):
        file = tmp_path / f"{axis}.txt"
        file.write_text(text.format(axis=axis))
        assert main(["show", str(file), "--target", "sm_90"]) == 0
        said = "warning    rows_kept lies in memory between kernels, 256 bytes" in capsys.readouterr().out
        assert said is warned
