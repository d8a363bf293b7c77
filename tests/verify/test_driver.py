"""benchdnn's words: state, alternatives, nesting, comments, and the lines that ask again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from transconv.errors import ProblemError
from transconv.verify.benchdnn_requests import OPTIONS, BenchdnnRequest, Driver

A, B = "mb3ic4ih5oc4oh3kh3", "ic4iw5oc4ow3kw3"


def asked(*words: str) -> list[str]:
    return [shlex.join(r.words()) for r in Driver().requests(words)]


def test_options_hold_until_they_change_and_alternatives_multiply() -> None:
    assert asked(A, "--dir=BWD_D,BWD_W", "--dt=f16,", A, "--reset", B) == [
        A,
        f"--dir=BWD_D --dt=f16 {A}",
        f"--dir=BWD_D {A}",
        f"--dir=BWD_W --dt=f16 {A}",
        f"--dir=BWD_W {A}",
        B,
    ]


def test_every_option_can_be_said_and_is_said_again() -> None:
    others = {
        "dir": "BWD_D",
        "mb": "4",
        "misalign": "1",
        "seed": "7",
        "alg": "AUTO",
        "data": "float",
        "strided": "rows",
        "attr-deterministic": "true",
        "target": "sm_87",
    }
    for name in OPTIONS:
        word = f"--{name}={others.get(name, 'x')}"
        assert asked(word, A) == [f"{word} {A}"], name
        assert asked(word, f"--{name}=", A) == [A], name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alg", "DIRECT WINO AUTO direct wino auto"),
        ("data", "exact float exact+float"),
        ("strided", "rows steps expanded"),
        ("attr-deterministic", "true false"),
        ("dir", "FWD_D FWD_I FWD_B BWD_D BWD_W BWD_WB"),
    ],
)
def test_every_word_of_an_option_is_read_and_no_other(name: str, words: str) -> None:
    for word in words.split():
        (request,) = Driver().requests([f"--{name}={word}", A])
        assert request[name].upper() == word.upper()
    for other in ("other", words, words.split()[0] + "_"):
        with pytest.raises(ProblemError, match="expected one of"):
            list(Driver().requests([f"--{name}={other}", A]))


def test_an_asked_line_asks_for_the_same() -> None:
    words = [
        "--mode=B",
        "--engine=cpu",
        "--dt=f16,bf16",
        "--attr-post-ops=,sum+relu",
        "--stag=strides(300,75,15,1)",
        "--schedule=mb.oh:16 oc:16 ic:16 | mma | warps=4",
        A,
    ]
    first = list(Driver().requests(words))
    assert len(first) == 4
    for request in first:
        command = shlex.split(request.repeat())
        assert command[:2] == ["transconv", "check"]
        again = list(Driver().requests(command[2:]))
        assert again == [request]
    assert "--schedule=other" in shlex.split(first[0].repeat("other"))


def test_switched_passes_are_part_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = Driver().requests([A])
    monkeypatch.setenv("TRANSCONV_PASSES", "-cse,+hoist")
    assert request.repeat() == f"TRANSCONV_PASSES=-cse,+hoist transconv check {A}"


def test_batches_nest_beside_each_other_and_share_the_state(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text(f"# nothing\n{A}   # the rest {B}\n\n--dt=f16,\\\n  bf16\n")
    (tmp_path / "outer").write_text(f"--dir=BWD_D\n--batch=inner\n{B}\n")
    assert asked(f"--batch={tmp_path / 'outer'}", "--reset", A) == [
        f"--dir=BWD_D {A}",
        f"--dir=BWD_D --dt=f16 {B}",
        f"--dir=BWD_D --dt=bf16 {B}",
        A,
    ]
    where = [r.where for r in Driver().requests([f"--batch={tmp_path / 'outer'}"])]
    assert where == [f"{tmp_path / 'inner'}:2", *[f"{tmp_path / 'outer'}:3"] * 2]


def test_mode_match_engine_and_start_are_the_runs() -> None:
    driver = Driver()
    found = list(
        driver.requests(
            [
                "--mode=L",
                '--match=oc8.*n"b',
                "--reset",
                'ic4ih5oc8kh3n"a"',
                'ic4ih5oc8kh3n"b"',
                'ic4ih5oc4kh3n"b"',
            ]
        )
    )
    assert [(r.descriptor, r.mode) for r in found] == [('ic4ih5oc8kh3n"b"', "L")]
    assert asked("--start=1", "--dt=f16,bf16,f32", A) == [f"--dt=bf16 {A}", A]
    assert [r.engine for r in Driver().requests(["--engine=gpu:0", A])] == ["gpu"]


def test_words_without_effect_are_kept_with_a_reason() -> None:
    driver = Driver()
    assert (
        len(
            list(
                driver.requests(
                    ["--conv", "-v5", "--verbose=1", "--skip-impl=ref", "--allow-enum-tags-only=0", A]
                )
            )
        )
        == 1
    )
    assert set(driver.remarks) == {"--skip-impl=ref", "--allow-enum-tags-only=0"}
    assert all(driver.remarks.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fast=1", A], "argument 1: option '--fast' is unknown; the options of a problem are"),
        ([A, "--dir=UP"], "argument 2: direction 'UP' is unknown; expected one of FWD_B"),
        (["--mb=many", A], "'many' is no number"),
        (["--mode=X", A], "mode 'X' is unknown; expected letters of LIRCBPFS"),
        (["--match=(", A], "the pattern '(' cannot be read"),
        (["--engine=tpu", A], "'tpu' is unknown; expected one of gpu cpu numpy opencl auto"),
        (["--data=random", A], "expected one of exact float exact+float"),
        (["ic3ih8oc4kh"], "argument 1: problem 'ic3ih8oc4kh': key 'kh' has no number"),
    ],
)
def test_what_cannot_be_read_says_where(words: list[str], told: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(told)):
        asked(*words)


def test_a_mistake_in_a_nested_file_says_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("\n--dir=UP\n")
    (tmp_path / "outer").write_text("--batch=inner\n")
    (tmp_path / "cycle").write_text("--batch=cycle\n")
    with pytest.raises(ProblemError, match=re.escape(f"{tmp_path / 'inner'}:2: direction 'UP'")):
        asked(f"--batch={tmp_path / 'outer'}")
    with pytest.raises(ProblemError, match="no cycle"):
        asked(f"--batch={tmp_path / 'cycle'}")
    with pytest.raises(OSError, match="missing"):
        asked(f"--batch={tmp_path / 'missing'}")


def test_a_request_compares_by_what_it_asks() -> None:
    assert BenchdnnRequest(A, (("dt", "f16"),), where="a:1") == BenchdnnRequest(
        A, (("dt", "f16"),), where="b:2"
    )
