"""Exported files of Python: they run in a process that cannot import transconv, with the same bits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from tests.runtime.standalone.alone import load
from tests.runtime.standalone.cases import compute, computed_here, conv, run_alone
from transconv import ir
from transconv.compute import OPS
from transconv.errors import Unsupported
from transconv.runtime import Plan
from transconv.runtime.standalone import files_of, packaged
from transconv.runtime.standalone.python_file import joined, python_text
from transconv.runtime.standalone.reference_check import TORCHS

SOFTMAX = """compute softmax
    axes   n=6 | k=40
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
GATHER = """compute skip
    tensor I i64 [10]
    tensor X f16 [20, 32]
    tensor S f16 [10, 32]
    tensor W f16 [16, 64]
    axes   m=10 n=16 | k=64
    read   i = I[m]
    read   a = X[i, k]
    read   b = S[m, k - 32]
    let    x = where(k < 32, a, b)
    read   w = W[n, k]
    store  Y[m, n] = sum(x*w; k)"""
CASES: dict[str, Callable[[], Plan]] = {
    "forward": lambda: conv("mb2ic16ih8oc16oh8kh3ph1", "fwd", epilogue="bias+relu"),
    "phases": lambda: conv("mb1ic3ih9oc16oh5kh3sh2ph1", "bwd_d"),
    "split": lambda: conv(
        "mb2ic8ih4oc8oh4kh3ph1", "bwd_w", "ic.kh.kw:64 oc:16 mb.oh.ow:16 | mma | split_k=2"
    ),
    "atomic": lambda: conv(
        "mb2ic8ih4oc8oh4kh3ph1", "bwd_w", "ic.kh.kw:64 oc:16 mb.oh.ow:16 | mma | split_k=2 reduce=atomic"
    ),
    "packed": lambda: conv(
        "mb2ic32ih4oc32oh4kh3ph1 dt=f16", "fwd", "mb.oh.ow:32 oc:32 ic:32 | mma | pack=a.c stages=2"
    ),
    "merged": lambda: conv(
        "g4mb2ic16ih6oc16oh6kh3ph1 dt=f16 tag=nhwc",
        "fwd",
        "mb.oh.ow:32 oc:16 ic:16 | mma | merge=4 stages=2",
    ),
    "boxes": lambda: conv(
        "mb2ic16ih8oc16oh8kh3ph1 dt=f16 tag=nhwc",
        "fwd",
        "mb:2 oh:8 ow:8 oc:16 ic:16 | mma | a=box b=box swap=1 stages=2",
    ),
    "depthwise": lambda: conv("g16mb1ic16ih4oc16oh4kh3ph1 dt=f16 tag=nhwc", "fwd", epilogue="silu"),
    "residual": lambda: conv("mb2ic16ih6oc16oh6kh3ph1 dt=f16 tag=nhwc", "fwd", epilogue="bias+res+silu"),
    "blocked": lambda: conv("mb1ic9ih5oc20oh5kh3ph1 dt=f32 tag=nChw16c", "fwd", epilogue="relu"),
    "volume": lambda: conv("mb1ic2id2oc2od2kd3pd1 dt=f64", "bwd_d"),
    "early": lambda: conv(
        "mb2ic4ih4oc4oh4kh3ph1", "bwd_w", "ic.kh.kw:64 oc:16 mb.oh.ow:16 | mma | split_k=2", target="sm_90"
    ),
    "early_boxes": lambda: conv(
        "mb2ic16ih8oc16oh8kh3ph1 tag=nhwc",
        "fwd",
        "mb:2 oh:8 ow:8 oc:16 ic:16 | mma | a=box b=box swap=1 stages=2",
        target="sm_90",
    ),
    "softmax": lambda: compute(SOFTMAX, "n:8 k:64 | fma"),
    "sum": lambda: compute(
        "compute rows\n axes m=9 k=40\n read x = X[m, k]\n store Y[m] = sum(x*x; k) / 4"
    ),
    "several": lambda: compute(
        "compute two\n axes n=70\n read x = X[n]\n let y = gelu(x)\n store Y[n] = y\n store Z[n] = y*y"
    ),
    "gather": lambda: compute(GATHER),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Plan, str]]:
    """All cases as files, each with what came out of it elsewhere."""
    folder = tmp_path_factory.mktemp("exported")
    plans = {name: make() for name, make in CASES.items()}
    packages, files = files_of(list(plans.values()))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    found = run_alone(folder / "found", [folder / f"{p.name}.py" for p in packages])
    return {name: (plan, found[p.name]) for (name, plan), p in zip(plans.items(), packages, strict=True)}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_without_transconv(name: str, exported: dict[str, tuple[Plan, Any]]) -> None:
    plan, found = exported[name]
    assert found["code"] == 0, "its own check says it is wrong"
    wanted = computed_here(plan, found["given"])
    assert len(found["got"]) == len(wanted)
    for got, want in zip(found["got"], wanted, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
        assert want.isfinite().all() and want.any()


@pytest.mark.slow
def test_the_cases_are_what_they_are_called() -> None:
    """Phases, copies, parts of sums and descriptors are in the files that are about them."""
    launches = {
        name: [x.kernel for x in packaged(CASES[name]()).launches]
        for name in ("phases", "split", "packed")
    }
    assert {name: len(found) for name, found in launches.items()} == {"phases": 4, "split": 2, "packed": 3}
    assert "wei.zero_()" in python_text(packaged(CASES["atomic"]()))
    assert "src_box = TensorDescriptor(src" in python_text(packaged(CASES["boxes"]()))
    assert "tf32=True" in python_text(packaged(CASES["early_boxes"]()))
    assert "] = 0  # beyond the shape" in python_text(packaged(CASES["blocked"]()))


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of an exported file, in this process."""
    package = packaged(conv("mb1ic4ih4oc4oh4kh3ph1", "fwd"))
    path = tmp_path_factory.mktemp("forward") / f"{package.name}.py"
    path.write_text(python_text(package))
    return load(str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.double(), "src: expected torch.float32, got torch.float64"),
        (lambda x: x[:, :, :3], r"src: expected shape \(1, 4, 4, 4\), got \(1, 4, 3, 4\)"),
        (
            lambda x: x.to(memory_format=torch.channels_last),
            r"src: expected strides \(64, 16, 4, 1\), got",
        ),
        (
            lambda x: torch.complex(x, x).conj().imag.contiguous()._neg_view(),
            "src: expected values as they",
        ),
        (lambda x: [1.0], "src: expected a tensor, got list"),
        (lambda x: x.to("meta"), "src: expected a tensor on a GPU, or with TRITON_INTERPRET=1 on the CPU"),
    ],
)
def test_tensors_of_another_kind_are_refused(forward: Any, change: Any, says: str) -> None:
    x, w = torch.randn(1, 4, 4, 4), torch.randn(4, 4, 3, 3)
    assert forward.run(x, w).shape == (1, 4, 4, 4)
    with pytest.raises(ValueError, match=says):
        forward.run(change(x), w)


def test_a_wrong_kernel_is_noticed(tmp_path: Path) -> None:
    """The file's own check fails, with exit code 1, for a kernel that is off by a tenth."""
    package = packaged(conv("mb1ic4ih4oc4oh4kh3ph1", "fwd"))
    text = python_text(package)
    wrong = text.replace("acc.to(tl.float32)", "(acc * 1.1).to(tl.float32)")
    assert wrong != text
    path = tmp_path / "wrong.py"
    path.write_text(wrong)
    assert load(str(path)).main() == 1


def test_kernels_that_are_not_interpreted_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = packaged(conv("mb2ic64ih8oc64oh8kh3ph1 dt=f16 tag=nhwc", "fwd", target="sm_90"))
    assert any(x.explicit for x in package.launches)
    path = tmp_path / "explicit.py"
    path.write_text(python_text(package))
    assert load(str(path)).main() == 2
    assert "written in Gluon, which Triton does not interpret" in capsys.readouterr().out


def test_a_chip_that_asks_for_a_later_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor machine code of an older one."""
    plan = conv("mb1ic4ih4oc4oh4kh1", "fwd", target="sm_100")
    monkeypatch.setattr("transconv.target.records.triton_release", lambda: (3, 7, 0))
    with pytest.raises(Unsupported, match=r"expected Triton 3\.7\.1 or later"):
        files_of([plan], ahead=True)
    path = tmp_path / "later.py"
    path.write_text(python_text(packaged(plan)))
    assert load(str(path)).INTERPRETED
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr("triton.__version__", "3.7.1")
    assert not load(str(path)).INTERPRETED
    monkeypatch.setattr("triton.__version__", "3.7.0")
    with pytest.raises(ImportError, match=r"expected Triton 3\.7\.1 or later; kernels of older ones"):
        load(str(path))


def test_functions_of_one_name_and_two_texts_are_told_apart() -> None:
    one = (
        "# one\n\nimport a\n\n\ndef part(x):\n    return x  # part\n\n\ndef first(x):\n"
        "    return part(x)\n"
    )
    two = (
        "# two\n\nimport a\nimport b\n\n\ndef part(x):\n    return x + 1\n\n\ndef second(x):\n"
        "    return part(x)\n"
    )
    imports, texts = joined([one, two, one.replace("first", "third")])
    assert imports == ["import a", "import b"]
    assert [comments for comments, _ in texts] == [("# one",), ("# two",), ("# one",)]
    made: dict[str, Any] = {}
    exec("\n\n".join(text for _, text in texts), made)
    assert (made["first"](1), made["second"](1), made["third"](1)) == (1, 2, 1)
    assert "part_3" not in made


def test_nothing_to_export_is_said() -> None:
    with pytest.raises(Unsupported, match="the result has no elements"):
        packaged(conv("mb0ic4ih4oc4oh4kh3ph1", "fwd"))


def test_torch_has_every_function_of_the_table() -> None:
    """And of the derivatives, in f32 and f64."""
    for row, dtype in itertools.product(OPS.values(), (ir.f32, ir.f64)):
        if row.arity == 1:
            x = ir.Var("x", dtype)
            made = [row(x), *(row.derivative(x) if row.derivative is not None else ())]
            for name in {c.name for e in made if e is not None for c in ir.find(e, ir.Call)} - {"fma"}:
                assert callable(operator.attrgetter(TORCHS.get(name, name))(torch)), name
