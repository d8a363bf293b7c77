"""Lines of trials of kernels: they are executed, so that a line says nothing but a computation."""

from __future__ import annotations

from pathlib import Path

import pytest

from transconv.__main__ import main
from transconv.errors import ProblemError
from transconv.kernel.trials.draw import draw_trial, work
from transconv.kernel.trials.trial import KernelTrial

HEAD = "kernel work=4 group=4 seed=1 X=f32[4] Y=f32[4]! ;; i, = group.work_offset()"
STORE = "group.store(Y[i:], group.load(X[i:], shape=group.shape))"


def test_all_drawn_lines_are_read() -> None:
    for number in range(400):
        trial = draw_trial("lines", number)
        assert KernelTrial.parse(str(trial)) == trial


@pytest.mark.parametrize(
    "evil",
    [
        "open('EVIL', 'w')",
        "__import__('os').system('touch EVIL')",
        "import os",
        "from os import system",
        "exec('x')",
        "eval('1')",
        "np.save(X, X)",
        "np.load(X)",
        "X.tofile(X)",
        "X.dump(X)",
        "np.lib",
        "group.__class__",
        "v = group.load.__globals__",
        "v = X.__class__.__mro__",
        "np.core",
        "np.os",
        "np.sys",
        "np.add.at(X, 0, 1)",
        "np.frompyfunc(X, 1, 1)",
        "np.vectorize(X)",
        "np.memmap(X)",
        "np.__builtins__",
        "v = 'text'",
        "v = f'{X}'",
        "v = b'x'",
        "globals()",
        "getattr(X, X)",
        "v = [x for x in X]",
        "del X",
        "global v",
        "v = lambda a=open: a",
        "kernel(X)",
        "drawn(X)",
        "print(X)",
        "breakpoint()",
        "with X: pass",
        "raise X",
        "try: pass\nexcept: pass",
        "class A: pass",
        "yield X",
        "await X",
        "assert X",
        "v = (w := X)",
        "while True: pass",
        "@open ;; def f(a): ;; > pass",
        "def f(a): ;; > pass",
        "v = {1: 2}",
        "v = {1}",
        "@group.workitems ;; def f(a=open): ;; > pass",
        "@group.workitems ;; def f(a: open): ;; > pass",
        "@group.workitems ;; def f(*a): ;; > pass",
        "@group.workitems ;; def _(a): ;; > pass",
        "@group.workitems ;; @open ;; def f(a): ;; > pass",
        "@group.store ;; def f(a): ;; > pass",
        "v = (lambda open: 1) ;; open(X)",
        "open = 1",
        "@group.workitems ;; def open(a): ;; > pass",
        "@group.workitems ;; def f(exec): ;; > pass",
        "for open in range(3): ;; > pass",
        "drawn = 1",
        "kernel.func(X)",
        "Group(X)",
        "np = X",
        "abs = X",
        "mixed = X",
        "v = _",
        "__debug__",
        "v = ...",
        "v = 1j",
        "X, *v = X",
        "v: int = 1",
        "v = 0\n@open\ndef g(): pass",
        "v = 0\nimport os",
        "v = 0\rimport os",
        "print",
        "Ｘ + ｏｐｅｎ",
        "v = (" * 300,
        "v = " + "-" * 100_000 + "1",
        "v = " + "(" * 150 + "1" + ")" * 150 + ".real",
    ],
)
def test_a_line_is_no_program(
    evil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"{HEAD} ;; {evil.replace('EVIL', str(tmp_path / 'evil'))} ;; {STORE}"
    with pytest.raises(ProblemError, match="trial|statements"):
        KernelTrial.parse(line)
    assert main(["fuzz", "--interpreter", f"--line={line}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "head",
    [
        "kernel work=4 group=4 seed=1 X=f32[4] X=f32[4]",
        "kernel work=4 group=4 seed=1 X=f32[99999,99999]",
        "kernel work=4 group=4 seed=1 Xª=f32[4]",
        "kernel work=٤ group=4 seed=1 X=f32[4]",
        "kernel work=4 group=4 seed=1 X=f32[4]:os",
        "kernel work=4 group=4 seed=" + "9" * 5000 + " X=f32[4]",
    ],
)
def test_heads(head: str) -> None:
    with pytest.raises(ProblemError):
        KernelTrial.parse(f"{head} ;; v = 1")


def test_a_right_line_still_runs() -> None:
    row = work(line=f"{HEAD} ;; {STORE}")
    assert (row["status"], row["nonzero"]) == ("passed", 1.0), row
