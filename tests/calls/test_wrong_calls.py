"""What a call is given that is of no use to it: told at once, in one line, by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import transconv
from transconv.__main__ import main
from transconv.errors import ComputeError

TEXT = """compute twice
    tensor X f32 [n=4, k=8]
    tensor Y f32 [n=4, k=8]
    axes   n=4 k=8
    read   x = X[n, k]
    store  Y[n, k] = x * 2"""
X = torch.randn(1, 4, 5, 5)


@pytest.mark.parametrize(
    "function",
    [
        transconv.convert_,
        transconv.revert_,
        transconv.fold,
        transconv.inference,
        transconv.prepare,
        transconv.quantize_,
        partial(transconv.export, directory="never_made"),
    ],
    ids=["convert_", "revert_", "fold", "inference", "prepare", "quantize_", "export"],
)
@pytest.mark.parametrize(
    ("model", "said"),
    [(torch.nn.Conv2d, "the class Conv2d"), ([torch.nn.ReLU()], "list"), (None, "NoneType")],
)
def test_what_is_no_module(function: Callable[[Any], Any], model: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"^transconv\.\S+: expected a torch.nn.Module, got {said}$"):
        function(model)


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        (None, {"h": 0}, "mesh: expected a DeviceMesh, .*, got NoneType"),
        (2, {"h": 0}, "mesh: .*, got int"),
    ],
)
def test_what_is_no_mesh(mesh: Any, plan: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        transconv.distributed.parallelize(torch.nn.Conv2d(4, 4, 3), mesh, plan)
    with pytest.raises(TypeError, match=said):
        transconv.distributed.verify(torch.nn.Conv2d(4, 4, 3), mesh, plan, X)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: transconv.compile(3), "compute: expected a Compute or its text, got int"),  # type: ignore[arg-type]
        (lambda: transconv.compile(TEXT, 90), "target: expected a Target or its text, got int"),  # type: ignore[arg-type]
        (
            lambda: transconv.compile(TEXT, "sm_90", 64),  # type: ignore[arg-type]
            "schedule: expected a Schedule or its text, got int",
        ),
        (lambda: transconv.lower(TEXT, None), "schedule: expected a Schedule or its text, got NoneType"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_class(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}$"):
        call()


@pytest.mark.parametrize("fused", [transconv.fused_conv1d, transconv.fused_conv2d, transconv.fused_conv3d])
def test_operands_without_an_epilogue(fused: Callable[..., Any]) -> None:
    dims = int(fused.__name__[-2])
    x, w = torch.randn(1, 4, *[5] * dims), torch.randn(4, 4, *[3] * dims)
    with pytest.raises(RuntimeError, match="operands are what an epilogue reads .* expected epilogue="):
        fused(x, w, operands=[x])


@pytest.mark.parametrize("options", [{"graphs": True}, {"rest": "torch"}, {"cudagraphs": "no"}])
def test_options_of_torch_compile(options: dict[str, Any]) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(ValueError, match=r"^options .*; expected \{.rest.: .*True or False"):
        transconv.graph.backend(graph, [X], options=options)


def test_modes_of_torch_compile() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(ValueError, match=r"^mode 'fast'; expected one of: default, reduce-overhead, "):
        transconv.graph.backend(graph, [X], mode="fast")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("Y[n, k] =", "Y[n, k+1] ="),
            "4 of the 32 elements of Y are stored by no point; expected a store",
        ),
        (
            ("axes   n=4", "axes   n=3"),
            "8 of the 32 elements of Y are stored by no point; expected a store",
        ),
        (
            ("Y[n, k] = x * 2", "Y[n, k] = x * 2\n    store Y[n, k] = x"),
            "several points are stored in one",
        ),
        (("k=8\n    read", "k=8 j=2\n    read"), "several points are stored in one place of Y"),
        (("Y[n, k] = x * 2", "Y[n, 0] = sum(x; k)"), "28 of the 32 elements of Y are stored by no point"),
    ],
)
def test_results_that_are_not_stored_once(change: tuple[str, str], said: str) -> None:
    """Their memory would have anything."""
    with pytest.raises(ComputeError, match=f"^twice: {said}"):
        transconv.computation(TEXT.replace(*change))


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.replace("Y[n, k]", "Y[3 - n, k]"),
        TEXT.replace("k=8\n    read", "k=4 j=2\n    read")
        .replace("[n, k] ", "[n, k*2 + j] ")
        .replace("X[n, k]", "X[n, k*2 + j]"),
        TEXT.replace("axes   n=4 k=8", "axes   n=4 k=4").replace("* 2", "* 2\n    store  Y[n, k + 4] = x"),
        TEXT.replace("axes   n=4 k=8", "axes   n=5 k=9"),  # what is outside is not stored
        TEXT.replace("Y f32 [n=4, k=8]", "Y f32 [k=9]").replace("Y[n, k] = x * 2", "Y[k] += sum(x; n)"),
        TEXT.replace("Y f32 [n=4, k=8]", "Y f32 [k=9]").replace("Y[n, k] =", "Y[k] +="),
    ],
)
def test_results_that_are_stored_once(text: str) -> None:
    assert transconv.computation(text)(torch.randn(4, 8)).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_of_another_chip_are_explained(device: str) -> None:
    x, w = (torch.empty(shape, device=device) for shape in ((2, 8, 14, 14), (16, 8, 3, 3)))
    found = transconv.explain(x, w, padding=1, target="sm_90")
    assert found.native and all("mma" in part.schedule for part in found.parts)
    here = transconv.explain(x, w, padding=1)
    assert here.reasons == (f"device:{device}",) and str(here).count(f"    device:{device}: ") == 1
    with pytest.raises(ValueError, match="did you mean sm_90"):
        transconv.explain(x, w, target="h100")


def test_what_is_listed_and_said() -> None:
    assert {"softmax", "layer_norm"} <= {*dir(transconv.functional)} == {*transconv.functional.__all__}
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
    assert str(transconv.convert_(model)) == "1 convolution converted, 0 left"
    assert str(transconv.revert_(model)) == "1 convolution torch's again"


def test_directions_as_in_files_of_onednn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--dir=bwd_d", "mb1ic8ih4oc8oh4kh3ph1"]) == 0
    assert "passed:1" in capsys.readouterr().out
