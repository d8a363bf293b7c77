"""Where layers come from: suite files, benchdnn lists, the project's own lists."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import layers
from bench.roofline import CEILINGS, Ceiling, ceiling_of, floor_us, intensity
from transconv.conv.conv_problem import ConvProblem, Prop

ROOT = Path(__file__).parents[2]
SUITE = Path(os.environ.get("TRANSCONV_SUITE", ROOT / "../shared/suite"))

ROW = {
    "name": "x",
    "n": 2,
    "cin": 8,
    "cout": 12,
    "groups": 2,
    "in_size": [9, 7],
    "kernel": [4, 2],
    "stride": [2, 1],
    "pad": [1, 0],
    "dilation": [1, 2],
    "transposed": False,
    "epilogue": "bn_relu",
    "bias": False,
    "tier": "core",
    "tags": ["t"],
}


def one(**changes: object) -> layers.ListedLayer:
    return layers.from_json({"schema": layers.SCHEMA, "layers": [{**ROW, **changes}]})[0]


def test_a_row_becomes_a_problem() -> None:
    layer = one()
    assert layer.shape == ConvProblem.make(2, 8, 12, (9, 7), (4, 2), (2, 1), (1, 2), (1, 0), g=2)
    assert layer.epilogue == "bias+relu"
    assert [layer.prop(d) for d in layers.DIRECTIONS] == list(Prop)
    assert layer.tags == ("t", "core")


def test_high_padding_counts_only_where_it_is_given() -> None:
    assert one(pad_high=[2, 1]).shape.o == (5, 6)
    assert one().shape.o == (4, 5)


def test_a_transposed_row_is_the_mirrored_problem() -> None:
    layer = one(transposed=True, output_padding=[1, 0], in_size=[5, 6])
    p = layer.shape
    assert (p.ic, p.oc) == (12, 8)
    assert p.o == (5, 6)
    assert p.i == ((5 - 1) * 2 - 2 + 3 + 1 + 1, (6 - 1) * 1 + 2 + 1)  # torch's conv_transpose
    assert [layer.prop(d).value for d in layers.DIRECTIONS] == ["bwd_d", "fwd", "bwd_w"]


def test_a_bias_comes_before_the_activation() -> None:
    assert one(epilogue="gelu", bias=True).epilogue == "bias+gelu"
    assert one(epilogue="none", bias=True).epilogue == "bias"
    assert one(epilogue="none").epilogue == ""


def test_an_unknown_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'transconv-suite-1'"):
        layers.from_json({"schema": "other", "layers": []})


def test_dtypes_and_layouts_of_a_layer() -> None:
    layer = one()
    assert str(layer.problem("bf16", "nhwc")).endswith("dt=bf16 tag=nhwc")
    assert layer.problem("f32").math == "ieee"
    assert layer.problem("tf32").math == "tf32"
    assert layer.problem("tf32").src.dtype.name == "f32"


@pytest.mark.parametrize(
    ("g", "ic", "oc", "kind"),
    [
        (1, 64, 64, "dense"),
        (2, 64, 64, "dense"),
        (4, 64, 64, "grouped"),
        (64, 64, 64, "depthwise"),
        (64, 64, 128, "depthwise"),
        (1, 3, 64, "first"),
        (1, 64, 3, "last"),
    ],
)
def test_kinds(g: int, ic: int, oc: int, kind: str) -> None:
    assert layers.ListedLayer("", ConvProblem.make(1, ic, oc, (8, 8), (3, 3), g=g)).kind == kind


def test_equal_shapes_of_a_list_are_one_layer(tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(
        'ic4ih6oc8oh4kh3n"first"\n--mb=2 ic4ih6oc8oh4kh3n"again"\n'
        "ic4ih6oc8oh4kh3\n--dir=BWD_D --dt=f16 mb2ic4ih6oc8oh4kh3\n"
    )
    found = layers.read(tmp_path / "shapes")
    assert [x.name for x in found] == ["first"]
    (tmp_path / "empty").write_text("")
    assert layers.read(tmp_path) == found


def test_a_reduced_batch() -> None:
    assert one().reduced(1).shape == one(n=1).shape
    assert one().reduced(0) == one().reduced(9) == one()


def test_own_lists_are_found_by_name_and_selected() -> None:
    found = layers.read("resnet50")
    assert found[0].name == "resnet50:conv1"
    assert [x.kind for x in layers.select(found, kinds="first")] == ["first"]
    assert all("conv2" in x.name for x in layers.select(found, "conv2"))
    with pytest.raises(FileNotFoundError):
        layers.read("no_such_list")


def test_floors() -> None:
    p = ConvProblem.make(32, 64, 64, (56, 56), (3, 3), pad=1, dtype="bf16")
    gflop = 2 * 32 * 56 * 56 * 64 * 64 * 9 / 1e9
    assert floor_us(p, Ceiling(780, 60, 4.3)) == pytest.approx(gflop / 780 * 1e3)
    assert floor_us(p, Ceiling(1e9, 60, 4.3)) == pytest.approx(p.bytes_moved() / 4.3e6)
    assert floor_us(p.with_dtype("f32"), Ceiling(780, 60, 1e9)) == pytest.approx(gflop / 390 * 1e3)
    assert intensity(p) == pytest.approx(gflop * 1e9 / (2 * (2 * 32 * 64 * 56 * 56 + 64 * 64 * 9)))
    assert ceiling_of("NVIDIA_H200") is CEILINGS["H200"]
    assert ceiling_of("cpu") is CEILINGS[""]


@pytest.mark.skipif(not SUITE.is_dir(), reason="TRANSCONV_SUITE is not there")
def test_every_layer_of_the_suite_has_its_published_size_and_floor() -> None:
    rows = json.loads((SUITE / "layers.json").read_text())["layers"]
    for layer, row in zip(layers.read(SUITE / "layers.json"), rows, strict=True):
        p = layer.problem("bf16", "nhwc")
        assert list(p.i if layer.transposed else p.o) == row["derived"]["out_size"], layer.name
        assert p.flops(valid=False) / 1e9 == pytest.approx(row["derived"]["gflop"], abs=1e-3)
        assert floor_us(p, CEILINGS["H200"]) == pytest.approx(row["derived"]["h200_roofline_us"], abs=0.01)
