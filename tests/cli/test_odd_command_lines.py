"""Invalid words, numbers and files for every command: an answer, or one line and exit code 2; never a
traceback."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bench.__main__
import transconv.__main__
from bench import environment
from transconv.__main__ import main

bench_main = bench.__main__.main
PARSERS = {module: functools.cache(module.parser) for module in (transconv.__main__, bench.__main__)}

P = "mb1ic8ih6oc8oh6kh3ph1"
WORDS = (
    "",
    " ",
    "-",
    "---",
    "--nonsense",
    "--help=1",
    "\n",
    "a\nb",
    "\0",
    "é",
    "²",
    "mb²ic1",
    "\udcff",
    "x" * 5000,
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "~nobody/x",
    f"{P} dt=s64",
    f"{P} dt=s32",
    f"{P} tag=zzz",
    f"{P} math=x",
    f"{P} foo=1",
    f"{P} dt=f16 dt=f16",
    "ic8ih6oc8oh6kh3ph1sh0",
    f"{P}g0",
    f"g7{P}",
    "mb99999999999999999999ic1",
    "compute",
    "compute x\nread y",
    "--batch",
    "--batch=/dev/zero",
    "--batch=",
    "--prop",
    "--prop=x",
    "--target=sm_²",
    "--schedule=oc:0",
    "--schedule=\udcff",
    "1e400",
)
FILES = {
    "empty": b"",
    "binary": bytes(range(256)),
    "latin": b"mb1\xe9",
    "zeros": bytes(99),
    "a.json": b"{}",
    "deep.json": b"[" * 99999,
    "row.json": b'{"schema": "transconv-suite-1", "layers": [3]}',
    "b.csv": b"a,b\n1,2\n",
    "computation": b"compute x\n  axes \n",
    "cycle": b"--batch=cycle\n",
}
NUMBERS = (
    "",
    "-1",
    "1e400",
    "nan",
    "-inf",
    "²",
    "x",
    "9" * 4400,
    "0x10",
    "\udcff",
    "99999999999999999999",
)
VERBS = {  # what stands before the odd word, and the options that take numbers
    "show": ([], ""),
    "words": ([], ""),
    "run": (["--prop=fwd"], ""),
    "bisect": (["--here", "--parts=ir", "--prop=fwd"], "--seed --limit"),
    "check": (["--mode=L"], "--workers --limit --memory --mb --misalign --seed --start"),
    "report": (["--prop=fwd", "--no-compile", "--limit=1", "--out=/dev/null"], "--limit --timeout"),
    "compile": (["--target=xpu", "--prop=fwd"], "--timeout"),
    "export": (["--target=sm_90", "--prop=fwd", "--output=exported"], "--timeout --workers"),
    "doctor": ([], ""),
    "sharded": ([], ""),
    "demo": (["--network"], ""),
    "tune": (
        ["--time-budget=0", "--trials=1"],
        "--mb --trials --jobs --limit --compile-limit --budget-ms",
    ),
    "fuzz": (
        ["--interpreter", "--n=0", "--no-corpus", "--file"],
        "--n --computes --seed --first --jobs --limit --share --shrink",
    ),
    "matrix": (["--targets=sm_80", "--problems=none"], "--jobs --timeout"),
}
COMMANDS = {
    "time": "--mb --limit --shard --shards --inductor-limit --budget-ms --compile-limit --workers",
    "check": "--sample --workers --memory --limit",
    "ablation": "--mb --workers --limit --budget-ms",
    "networks": "--limit --workers --processes",
    "overhead": "--calls --bursts",
    "dropin": "--processes --limit",
    "samples": "--processes --limit",
}


def ends(
    run: Callable[[list[str]], int],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    codes: tuple[int, ...],
) -> None:
    try:
        code = run(words)
    except SystemExit as left:
        code = int(left.code or 0)
    told = capsys.readouterr()
    assert code in codes, (words, told)
    if code == 2:
        assert told.err.count("\n") == 1 and len(told.err) < 3000 and not told.out, (words, told)
    assert "Traceback" not in told.out + told.err, (words, told)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words, and files and folders of a folder in which commands run; all of a process have one parser."""
    monkeypatch.chdir(tmp_path)
    for module, made in PARSERS.items():
        monkeypatch.setattr(module, "parser", made)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    Path("folder").mkdir()
    Path("itself").symlink_to("itself")
    return [*WORDS, *FILES, "folder", "itself", "none/at.all"]


@pytest.mark.parametrize("verb", VERBS)
def test_odd_words_are_refused(verb: str, odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` goes on after a problem that means nothing, and then ends with 1."""
    codes = (0, 1, 2) if verb == "check" else (2,)
    for word in odd:
        ends(main, [verb, *VERBS[verb][0], word], capsys, codes)


def numbers() -> Iterator[tuple[str, str, str]]:
    for verb, (_, options) in VERBS.items():
        yield from itertools.product([verb], options.split(), NUMBERS)


def test_numbers_out_of_range_are_refused(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    may_be_empty = ("--mb", "--misalign", "--seed", "--start")  # of check: the default
    for verb, option, number in numbers():
        if verb != "check" or number or option not in may_be_empty:
            ends(main, [verb, f"{option}={number}", *[P] * (verb not in ("fuzz", "matrix"))], capsys, (2,))


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_of_the_benchmarks_are_refused(
    command: str, odd: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option, number in itertools.product(COMMANDS[command].split(), NUMBERS):
        ends(bench_main, [command, f"{option}={number}"], capsys, (2,))


@pytest.mark.parametrize(
    "words",
    [
        ["report", "none.csv"],
        ["report", "empty"],
        ["report", "b.csv"],
        ["report", "binary"],
        ["trials", "empty"],
        ["trials", "zeros"],
        ["trials", "none"],
        ["overhead", "--device=zz"],
        ["computations", "--device=zz"],
        ["time", "--out=empty"],
        ["time", "none"],
        ["time", "binary"],
        ["time", "--dtypes=s32", "resnet50"],
        ["time", "--dtypes=s64", "resnet50"],
        ["check", "--dtypes=s32", "resnet50"],
    ],
)
def test_odd_files_for_the_benchmarks_are_refused(
    words: list[str], odd: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ends(bench_main, words, capsys, (2,))


def test_what_texts_do_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of convolutions, and words beside a text, are never silently left out."""
    text = "compute rows\n axes m=3 k=4\n read x = X[m, k]\n store Y[m] = sum(x; k)"
    for verb, *words in (
        ["show", "--dtype=f16"],
        ["show", "--epilogue=relu"],
        ["show", P],
        ["run", "--prop=bwd_d"],
        ["compile", "--target=sm_90", "--layout=nhwc"],
        ["bisect", "--prop=fwd"],
        ["tune", "--prop=fwd"],
        ["report", "--prop=fwd", "--out=none"],
        ["export", "--prop=all", "--output=none"],
        ["prepare", "dt=f16", "--target=sm_90"],
        ["check", "--dt=f16"],
    ):
        assert main([verb, text, *words]) == 2, words
        said = capsys.readouterr().err
        assert re.search("is about convolutions; rows|no computation, as rows|is not for rows", said), said


def test_sizes_that_are_arguments_take_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", "mb2?ic16ih9?oc16oh9kh3ph1", "--dtype=bf16", "--epilogue=relu", "--stage=problem"])
        == 0
    )
    page = capsys.readouterr().out
    assert re.search(r"tensor src +bf16 ", page) and "max(sum_2, 0.0)" in page


@pytest.mark.parametrize(
    "words", [["kernels"], ["short-sums"], ["short-rows"], ["attention"], ["parts", "b.csv"]]
)
def test_measures_of_a_gpu_leave_their_rows_without_one(
    words: list[str], odd: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "device_name", lambda: "cpu")
    rows = Path(f"{words[0].replace('-', '_')}.csv")
    rows.write_text("kept")
    ends(bench_main, [*words, "--out=."], capsys, (2,))
    assert rows.read_text() == "kept"
