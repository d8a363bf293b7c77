"""Wrong inputs as people give them, and the sentence that each gets: tests/golden/wrong_inputs.txt.

``pytest tests/cli/test_wrong_inputs.py --update-golden`` writes the file, which is to be read then: each
message says what was asked, what is wrong with it, and the cure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import transconv
from tests.shown import ROOT
from transconv.__main__ import main

GOLDEN = ROOT / "tests" / "golden" / "wrong_inputs.txt"
ROWS = """compute t
    tensor X f32 [n=4, k=8]
    tensor Y f32 [n=4]
    axes   n=4 | k=8
    read   x = X[n, k]
    {line}"""
LINES = (  # of a computation that reads x = X[n, k]
    "store Y[n] = sum(x, k)",
    "store Y[n] = mean(x; k)",
    "store Y[n] = sum(x ^ 2; k)",
    "store Y[n] = sum(x if x > 0 else 0; k)",
    "store Y[n] = cumsum(x; k)",
    "store Y[n] = atomic_add(x)",
    "Y[n] += x",
    "H[x] += 1",
    "Y[n] = sum(x; k)",
    "store Y[n] = x",
    "store Y[n, k] sum= 1",
    "store Y[n] sum= 1",
    "store Y[n] = summ(x; k)",
    "store Y[n] = sum(tanhh(x); k)",
    "store Y[n] = sum(z; k)",
    "store Y[n] = sum(x; q)",
    "store Y[n] = sum(x; k",
    "store Z = sum(x; k)",
    "sotre Y[n] = sum(x; k)",
    "let s = x\n    store Y[n] = sum(t; k)",
    "read z = X[n]\n    store Y[n] = sum(z; k)",
    "read z = X[n/2, k]\n    store Y[n] = sum(z; k)",
    "read z = X[n, x]\n    store Y[n] = sum(z; k)",
    "store Y[n] = sum(x and 1; k)",
    "store Y[n] = sum(x; k)\n    store Y[n] = max(x; k)",
    "store Y[n] = where(x, 1, 0)",
    "store Y[n] = sum(x @ x; k)",
    "store Y[n] = softmax(x; k)",
    "store Y[n] = sum(x.abs(); k)",
    "store Y[n] = sum(torch.exp(x); k)",
    "store Y[n] = sum(max(x); k)",
    "store Y[n] = sum(float(x); k)",
    "store Y[n] = sum(x > 0 ? x : 0; k)",
    "store Y[n, k] = x > 0 && x < 1",
)
SUMS = "store Y[n] = sum(x; k)"
KERNEL = """
@kernel
def {name}(group, X):
    i = group.work_offset()[0]
    group.store(X[i:], group.load(X[i:], shape=group.shape) * 2)
"""
IMPORT = "from transconv.kernel import kernel\n"
FILES = {  # that command lines name
    "histogram.txt": "compute h\n    tensor X i32 [n=8]\n    tensor H i32 [b=4]\n    axes   n=8\n"
    "    read   x = X[n]\n    store  H[x] sum= 1\n",
    "indices.txt": "compute h\n    tensor X i32 [n=8]\n    axes   n=8\n    read   x = X[n]\n"
    "    store  H[x, 3] sum= 1\n",
    "kern.py": IMPORT + KERNEL.format(name="doubled"),
    "two.py": IMPORT + KERNEL.format(name="doubled") + KERNEL.format(name="again"),
    "none.py": "x = 1\n",
}
TENSORS = (  # instead of the line of X
    "tensor X float32 [n=4, k=8]",
    "tensor X bool [n=4, k=8]",
    "tensor X half [n=4, k=8]",
    "tensor X f32 (4, 8)",
    "tensor X f32 [n=4, k=9.5]",
    "tensor X f32 [4 8]",
    "tensor X int [n=4, k=8]",
    "tensr X f32 [n=4, k=8]",
)
CALLS: tuple[tuple[str, Callable[[], object]], ...] = (
    *(
        (f'transconv.compile(text, "{chip}")', lambda chip=chip: transconv.compile(text(SUMS), chip))  # type: ignore[misc]
        for chip in ("h100", "sm90", "A100", "H10", "mi300", "t4", "cuda")
    ),
    *(
        (
            f'transconv.compile(text, "sm_90", "{schedule}")',
            lambda schedule=schedule: transconv.compile(text(SUMS), "sm_90", schedule),
        )  # type: ignore[misc]
        for schedule in ("n:16 k:8 | fma | warp=4", "rows:16 | fma", "n:16 | fmma")
    ),
    ('transconv.config.cpu = "interpreter"', lambda: setattr(transconv.config, "cpu", "interpreter")),
    ('transconv.config.fallbak = "warn"', lambda: setattr(transconv.config, "fallbak", "warn")),
    ("transconv.config.sizes = True", lambda: setattr(transconv.config, "sizes", True)),
    ("transconv.config.changed(cpuu=..)", lambda: transconv.config.changed(cpuu="x").__enter__()),
    ("transconv.optimise", lambda: transconv.optimise),
    ("transconv.functional.sotfmax", lambda: transconv.functional.sotfmax),
    ("transconv.explain(model, x)", lambda: transconv.explain(torch.nn.ReLU(), torch.ones(1))),
    ("transconv.optimize(3)", lambda: transconv.optimize(3)),
    ("transconv.optimize(model, measure=True)", lambda: transconv.optimize(torch.nn.ReLU(), measure=True)),
    (
        "transconv.fused_conv2d(x, w, activation='rellu')",
        lambda: transconv.fused_conv2d(torch.ones(1, 4, 5, 5), torch.ones(4, 4, 1, 1), activation="rellu"),
    ),
    ("transconv.softmax", lambda: transconv.softmax),
    ("transconv.Conv2d", lambda: transconv.Conv2d),
    ("transconv.functional.softmax([1.0], 0)", lambda: transconv.functional.softmax([1.0], 0)),
    ('transconv.compile("nothere.txt")', lambda: transconv.compile("nothere.txt")),
    ("transconv.compile(model)", lambda: transconv.compile(torch.nn.ReLU())),
    ("transconv.certify(model)", lambda: transconv.certify(torch.nn.ReLU())),
    ("transconv.graph.report(model)", lambda: transconv.graph.report(torch.nn.ReLU())),
    (
        "transconv.within(model, '8 GB', x)",
        lambda: transconv.within(torch.nn.ReLU(), "8 GB", torch.ones(1)),
    ),
    ('convert_(model, filter_fn="0")', lambda: transconv.convert_(torch.nn.ReLU(), filter_fn="0")),
    ("@kernel(3)", lambda: transconv.kernel.kernel(3)),
)
COMMANDS = (
    "shwo mb1ic8ih6oc8oh6kh3ph1",
    "show mb1ic8ih6oc8oh6kh3ph1 --target h100",
    "show mb1ic8ih6oc8oh6kh3ph1 --targt h100",
    "show mb1ic8ih6oc8oh6kh3ph1 --prop fwdd",
    "show mb1ic8ih6oc8oh6kh3ph1 --stage lowering",
    "show mb1ic8ih6oc8oh6kh3ph1 --prop forward",
    "show mb1ic8ih6oc8oh6kh3ph1 --prop FWD_D",
    "show mb1ic8ih6oc8oh6kh3ph1 --prop wgrad",
    "show mb1ic8ih6oc8oh6kh3ph1 dt=float16",
    "show mb1ic8ih6oc8oh6kh3ph1 --layout channels_last",
    "show mb1ic8ih6oc8oh6kh3ph1 --layout NHWC",
    "show mb1ic8ih6oc8oh6kh3ph1 --dtype bool",
    "show mb1ic8ih6oc8oh6kh3ph1 --dir=bwd_d",
    "show mb1ic8ih6oc8oh6kh3ph1 --epilogue bias+reul",
    "show mb1ic8ih6oc8oh6kh3ph1zz3",
    "show nothere.txt",
    "show --hlep",
    "show --targt sm_90",
    "prepare nothere.json",
    "kernel nothere",
    "show none.py",
    "show histogram.txt --target sm_90",
    "show indices.txt --target sm_90",
    "run mb1ic8ih6oc8oh6kh3ph1 --sizes n=3",
    "kernel nothere.py",
    "kernel kern.py",
    "kernel two.py",
    "kernel two.py:tripled",
    "kernel none.py",
    "check --dir=FORWARD mb1ic8ih6oc8oh6kh3ph1",
    "check --dt=float mb1ic8ih6oc8oh6kh3ph1",
    "kernel kern.py --group 8 --args float32[8]",
    "check --batch=nothere.txt",
    "check --dri=FWD_B mb1ic8ih6oc8oh6kh3ph1",
    "check --attr-post-ops=eltwise_relo mb1ic8ih6oc8oh6kh3ph1",
    "words warp",
    "run",
    "",
    "--version",
)


def text(line: str, tensor: str = "") -> str:
    made = ROWS.format(line=line)
    return made.replace("tensor X f32 [n=4, k=8]", tensor) if tensor else made


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "NOTHING IS SAID"


def told(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        main(words.split())
    except SystemExit:
        pass
    said = capsys.readouterr()
    return (said.err or said.out).strip()


def sentences(capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    for line in LINES:
        yield line, refused(lambda line=line: transconv.compile(text(line), "sm_90"))  # type: ignore[misc]
    for tensor in TENSORS:
        made = text(SUMS, tensor)
        yield tensor, refused(lambda made=made: transconv.compile(made, "sm_90"))  # type: ignore[misc]
    for name, call in CALLS:
        yield name, refused(call)
    for words in COMMANDS:
        yield f"$ transconv {words}", told(words, capsys)


def test_each_wrong_input_gets_its_sentence(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "utf-8")
    monkeypatch.chdir(tmp_path)
    found = [(given, said.replace(f"{tmp_path}/", "")) for given, said in sentences(capsys)]
    made = "\n".join(f"{given}\n    " + said.replace("\n", "\n    ") + "\n" for given, said in found)
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(made, "utf-8")
        return
    assert made == GOLDEN.read_text("utf-8"), "read the new sentences; --update-golden if they are meant"


def test_each_sentence_has_a_cure() -> None:
    """What is expected, allowed or known, or what is meant."""
    said = re.split(r"\n(?=\S)", GOLDEN.read_text("utf-8"))
    assert len(said) >= 60
    cure = re.compile(
        r"^    transconv \d|expected|did you mean|allowed|known|write |use |choose from|"
        r"--help|needs|give|"
        r"such as|required|axes are",
        re.IGNORECASE,
    )
    assert not [s for s in said if not cure.search(s.split("\n", 1)[1])]
