"""Small random graphs: results, strides and gradients are torch's; a failing graph is shrunk."""

from __future__ import annotations

import pytest
import torch

from tests.graph.draw import Draw, Drawn, Step, smaller, why_wrong
from tests.graph.meant import Meant
from tests.graph.shaken import F64, movements
from transconv.graph.lowerings import view_indexing

SEED, COUNT = 20_000, 40  # `make check-all` draws 500


@pytest.mark.every(8)
@pytest.mark.parametrize("part", range(8))
def test_drawn_graphs(part: int) -> None:
    for seed in range(SEED + part, SEED + COUNT, 8):
        drawn = Draw(seed).drawn(gradients=seed % 10 == 0)
        if why_wrong(drawn):
            least = smaller(drawn, lambda d: bool(why_wrong(d)))
            pytest.fail(f"seed {seed}\n{least}\n{why_wrong(least)}")


def _flipped() -> Drawn:
    """Several operations, of which one will be wrong."""
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4).requires_grad_()
    steps = [
        Step((0,), torch.sin, "sin"),
        Step((1,), lambda x: x.flip(1), "flip"),
        Step((2,), torch.exp, "exp"),
        Step((3, 1), torch.mul, "mul"),
        Step((4,), torch.tanh, "tanh"),
    ]
    return Drawn((x,), tuple(steps), (3, 5))


@pytest.mark.slow
def test_a_planted_mistake_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "never")
    monkeypatch.setattr(view_indexing, "flip", lambda shape, dims: lambda at: at)
    assert "off by" in why_wrong(_flipped())
    least = smaller(_flipped(), lambda d: bool(why_wrong(d)))
    assert [s.says for s in least.steps] == ["flip"] and str(least).endswith("return x1")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float64, "f64"), (torch.int64, "i64"), (torch.int8, "i8"), (torch.bool, "boolean")],
)
def test_texts_that_store_parts_leave_the_others(dtype: torch.dtype, name: str) -> None:
    """Whatever is there before: NaN is stored as any other value, and an integer is never NaN."""
    parts = [
        f"""compute some
    tensor x f64 [n=4]
    tensor y {name} [m=8]
    axes i=4
    read a = x[i]
    store y[2*i + {at}] = {value}"""
        for at, value in enumerate(
            {"f64": ("log(a)", "-a"), "boolean": ("a > 1", "a < 3")}.get(name, ("i32(a)", "-i32(a)"))
        )
    ]
    x = torch.tensor([2.0, 0.0, 3.0, -1.0], dtype=torch.float64)
    y = torch.tensor([float("nan"), 7.0] * 2 + [7.0] * 4, dtype=torch.float64).to(dtype)
    for at, (part, want) in enumerate(
        zip(parts, {"f64": (x.log(), -x), "boolean": (x > 1, x < 3)}.get(name, (x, -x)), strict=True)
    ):
        before = y[1 - at :: 2].clone()
        Meant((part,)).start([x, y])
        torch.testing.assert_close(y[at::2], want.to(dtype), equal_nan=True)
        torch.testing.assert_close(y[1 - at :: 2], before, equal_nan=True)


def test_roundings_move_what_is_nearly_singular() -> None:
    """A norm of equal columns is 0, or a rounding times 1 / sqrt(eps); a sine has no such thing."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.layer_norm(x[:, :1].repeat(1, 3) + 10, (3,)), x.sin(), x.t()

    x = torch.randn(4, 3, dtype=torch.float64)
    norm, sine, view = movements(f, [x])
    assert 1e-5 < norm < 1e-2 and 0 < sine < 1e-6 and view == 0
    assert max(movements(f, [x], F64)) < 1e-8
