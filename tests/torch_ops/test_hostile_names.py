"""Names of modules, parameters, problems and files that hold code: none is executed, none leaves a
folder."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transconv
from transconv.compute import Alone, parse
from transconv.conv import ConvProblem, Prop, build
from transconv.errors import Unsupported
from transconv.runtime import build_compute
from transconv.runtime.standalone.files import write
from transconv.runtime.standalone.machine_code import packaged
from transconv.runtime.standalone.python_file import python_text
from transconv.target import TARGETS
from transconv.torch_ops.quantized.quantize import chains

EVIL = 'x"), open("PATH", "w"), getattr(self, "'


class Named(torch.nn.Module):
    """A convolution, and a parameter or a module of a name."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.conv, self.kind, self.name = torch.nn.Conv2d(3, 4, 3), kind, name
        if kind == "module":
            self._modules[name] = torch.nn.ReLU()
        elif kind == "parameter":
            self._parameters[name] = torch.nn.Parameter(torch.ones(1))
        else:
            self._buffers[name] = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self._modules[self.name](y) if self.kind == "module" else y * getattr(self, self.name)


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
@pytest.mark.parametrize(
    "name", [EVIL, "a\n    open('PATH', 'w')\n    b", "a\\", "a'b", "class", "\uff57", "a\x00", "a\r"]
)
def test_fold_refuses_names_that_are_code(kind: str, name: str, tmp_path: Path) -> None:
    name = name.replace("PATH", str(tmp_path / "evil"))
    model = Named(kind, name).eval()
    before = list(torch.nn.Module.named_modules(model))
    with pytest.raises(ValueError, match="means something else in the text that torch.fx executes"):
        transconv.fold(model)
    assert chains(model, {"conv": model.conv}) == {}
    assert not (tmp_path / "evil").exists() and list(model.named_modules()) == before


@pytest.mark.parametrize("name", ["0", "my-block", "block 1", "größe", "_x", "a+b"])
def test_fold_takes_other_names(name: str) -> None:
    model = Named("module", name).eval()
    x = torch.randn(1, 3, 6, 6)
    torch.testing.assert_close(transconv.fold(model)(x), model(x))


@pytest.mark.parametrize("name", ["*/int/**/evil;/*", "a\\N{x}", "a\\x", "\\"])
def test_comments_of_exported_files_end_where_they_end(name: str) -> None:
    problem = ConvProblem.parse(f'mb1ic4ih6oc4oh6kh3ph1n"{name}"')
    package = packaged(build(problem, Prop.FWD, TARGETS["sm_90"]))
    for text in (package.title, *package.about):
        assert "*/" not in text and "\\" not in text and '""' not in text
    ast.parse(python_text(package))


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "a/../../evil", "", "a//b", "."])
def test_exports_stay_in_their_folder(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no path in the folder"):
        write(tmp_path / "out", {path: b"x", "good": b"y"})
    assert not list(tmp_path.iterdir())


def test_a_plan_of_another_name_is_not_exported() -> None:
    compute = parse(
        "compute f: tensor x f32 [i=8]: tensor y f32 [i=8]: axes i=8: read a = x[i]: "
        "store y[i] = a + a".replace(": ", "\n")
    )
    plan = build_compute(compute, TARGETS["sm_90"])
    packaged(plan)
    plan.workload = Alone(replace(compute, name="../evil"))
    with pytest.raises(Unsupported, match="cannot be a name in an exported file"):
        packaged(plan)
