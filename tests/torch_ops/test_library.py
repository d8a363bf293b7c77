"""The registered operators: opcheck, compile, export, FLOPs, profiles of their fakes."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import transconv
from tests.torch_ops import samples as s
from transconv.runtime import first_run_check
from transconv.torch_ops import operators
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion import export
from transconv.torch_ops.conversion.aten_convolutions import aten_backward
from transconv.torch_ops.fused import fused_functional

OP = operators.convolution
BACKWARD = operators.convolution_backward
FORMATS = (s.contiguous, s.channels_last, s.reversed_dims)


def operands(ndims: int = 2, form: Any = s.contiguous) -> tuple[torch.Tensor, ...]:
    x = s.vary(torch.randn(2, 4, *[5] * ndims), form).requires_grad_()
    w = s.vary(torch.randn(4, 2, *[3] * ndims), form).requires_grad_()
    return x, w, torch.randn(4, requires_grad=True)


@pytest.mark.every(14)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(form: Any, transposed: bool, with_bias: bool) -> None:
    x, w, b = operands(form=form)
    numbers = ([2, 1], [1, 1], [1, 2], transposed, [0, 0], 2)
    assert set(opcheck(OP, (x, w, b if with_bias else None, *numbers)).values()) == {"SUCCESS"}
    grad = torch.randn_like(OP(x, w, b, *numbers), requires_grad=True)
    if with_bias:
        return
    mask = [True, True, True]
    found = opcheck(BACKWARD, (grad.detach().requires_grad_(), x, w, *numbers, mask))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.every(3)
@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True]])
def test_opcheck_of_partial_gradients(mask: list[bool]) -> None:
    x, w, _ = (t.detach() for t in operands())
    grad = torch.randn(2, 4, 3, 3)
    found = opcheck(BACKWARD, (grad, x, w, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask))
    assert set(found.values()) == {"SUCCESS"}


def test_two_sided_padding() -> None:
    """The operators take low sides and high sides; nothing is padded twice and nothing is lost."""
    x, w, _ = (t.detach().double().requires_grad_() for t in operands())
    numbers = ([1, 1], [2, 0, 1, 1], [1, 1], False, [0, 0], 2)
    wanted = F.conv2d(F.pad(x, (0, 1, 2, 1)), w, groups=2)
    got = OP(x, w, None, *numbers)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got.sin().sum(), (x, w)), torch.autograd.grad(wanted.sin().sum(), (x, w))
    )
    assert torch.autograd.gradcheck(lambda x, w: OP(x, w, None, *numbers), (x, w), fast_mode=True)


def test_backward_operator_wants_a_fitting_gradient() -> None:
    x, w, _ = operands()
    with pytest.raises(RuntimeError, match="Expected grad_output of size"):
        BACKWARD(torch.randn(2, 4, 9, 9), x, w, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, [True] * 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda g, x, w: (g.double(), x, w),
        lambda g, x, w: (g.to("meta"), x, w),
        lambda g, x, w: (g, x, w.double()),
        lambda g, x, w: (g, x, w.to("meta")),
    ],
    ids=["type", "device", "weight's type", "weight's device"],
)
def test_gradients_have_the_type_and_device_of_the_input(change: Any) -> None:
    """Also after a call that fits: a route is found by all of them."""
    x, w, _ = (t.detach() for t in operands())
    grad, text, mask = torch.randn(2, 4, 3, 3), "stride=1x1 groups=2", [True] * 3
    given = change(grad, x, w)
    for call in (
        lambda *t: operators.bwd_d(*t, text),
        lambda *t: operators.bwd_w(*t, text),
        lambda *t: BACKWARD(*t, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask),
    ):
        call(grad, x, w)
        with pytest.raises(RuntimeError, match="Input type .* type .* should be the same"):
            call(*given)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_compiles_without_a_graph_break(name: str) -> None:
    ndims = int(name[-2])
    x, w, b = operands(ndims)

    def call(f: Any) -> Any:
        groups = 1 if "transpose" in name else 2
        return lambda x, w, b: f(x, w, b, stride=2, padding=1, groups=groups).relu()

    if "transpose" in name:
        b = torch.randn(2, requires_grad=True)
    compiled = torch.compile(call(s.ours(name)), fullgraph=True, backend="aot_eager")
    got, wanted = compiled(x, w, b), call(s.theirs(name))(x, w, b)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    for pair in zip(
        torch.autograd.grad(got.sum(), (x, w, b)),
        torch.autograd.grad(wanted.sum(), (x, w, b)),
        strict=True,
    ):
        torch.testing.assert_close(*pair)


def graphs(f: Any, *args: Any, dynamic: bool | None = None) -> list[torch.fx.GraphModule]:
    """The graphs that dynamo hands to a backend for these calls."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    for given in args:
        torch.testing.assert_close(compiled(*given), f(*given))
    return seen


def test_the_compiled_graph_holds_our_operator() -> None:
    x, w, b = operands()
    (graph,) = graphs(lambda x: transconv.conv2d(x, w, b, 1, "same", groups=2), (x,))
    assert [n for n in graph.graph.nodes if n.target is OP]


def test_one_recompilation_over_batch_sizes() -> None:
    _, w, b = operands()
    batches = [(torch.randn(n, 4, 5, 5),) for n in (7, 6, 9, 13, 16)]  # no other size of the call
    assert len(graphs(lambda x: transconv.conv2d(x, w, b, padding=1, groups=2), *batches)) <= 2
    assert (
        len(graphs(lambda x: transconv.conv2d(x, w, b, padding=1, groups=2), *batches, dynamic=True)) == 1
    )


@pytest.mark.slow
def test_dynamic_spatial_sizes() -> None:
    _, w, b = operands()
    for call in (
        lambda x: transconv.conv2d(x, w, b, 1, "same", groups=2),
        lambda x: transconv.conv_transpose2d(x, w, None, 2, 1, 1),
        lambda x: transconv.conv2d(x, w, padding=x.shape[0] // 2, groups=2),
    ):
        torch._dynamo.reset()
        sizes = [(torch.randn(2, 4, n, n + 1),) for n in (5, 6, 9)]
        assert len(graphs(call, *sizes)) <= 2


@pytest.mark.slow
def test_dynamic_groups() -> None:
    """A number of groups that the compiled function is given is a symbol."""
    compiled = torch.compile(transconv.conv2d, fullgraph=True, backend="aot_eager", dynamic=True)
    for groups in (1, 3, 6):
        x, w = torch.randn(2, 6, 5, 5), torch.randn(6, 6 // groups, 3, 3)
        torch.testing.assert_close(compiled(x, w, groups=groups), F.conv2d(x, w, groups=groups))


def test_a_wrong_call_fails_while_compiling_too() -> None:
    compiled = torch.compile(lambda x, w: transconv.conv2d(x, w), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="to have 2 channels"):
        compiled(torch.randn(1, 3, 5, 5), torch.randn(4, 2, 3, 3))


@pytest.mark.every(6)
@pytest.mark.parametrize("region", ["inside", "outside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_autocast(region: str, dtype: torch.dtype) -> None:
    x, w, b = operands()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return transconv.conv2d(x, w, b, groups=2)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return transconv.conv2d(x, w, b, groups=2)

    if region == "inside":
        y = torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
    else:
        with torch.autocast("cpu", dtype=dtype):
            y = torch.compile(plain, backend="aot_eager", fullgraph=True)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, inside(x))


@pytest.mark.every(2)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_graph_does_not_cast_what_the_kernel_can_add(activation: str | None) -> None:
    """A float32 bias under autocast: the kernel adds it to its sums, its gradient is float32."""
    x, w, b = (t.detach() for t in operands())
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    texts: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        texts.append(graph.code)
        return make_boxed_func(graph)

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if activation:
            return fused_functional.fused_conv2d(x, w, b, groups=2, activation=activation)
        return transconv.conv2d(x, w, b, groups=2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.compile(layer, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(
            *leaves
        )
        wanted = layer(x, w, b)
    torch.testing.assert_close(y, wanted)
    (call,) = re.findall(r"torch.ops.transconv.fwd.default\((.*?)\)", texts[0])
    given = call.split(", ")
    assert given[2].startswith("primals") and not any(g.startswith("primals") for g in given[:2])
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.dtype for g in found] == [torch.float32] * 3
    with pytest.raises(RuntimeError, match="bias type .* should be the same"):
        transconv.conv2d(x.bfloat16(), w.bfloat16(), b, groups=2)  # nobody asked for casts


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("call", "theirs"),
    [
        (
            lambda x, w, b: transconv.conv2d(x, w, b, padding="same"),
            lambda x, w, b: F.conv2d(x, w, b, padding="same"),
        ),
        (lambda x, w, b: transconv.conv2d(x, w, b), F.conv2d),
        (lambda x, w, b: transconv.conv_transpose2d(x, w, b), F.conv_transpose2d),
        (
            lambda x, w, b: fused_functional.fused_conv2d(x, w, b, padding="same", activation="relu"),
            lambda x, w, b: F.conv2d(x, w, b, padding="same"),
        ),
    ],
    ids=range(4),
)
def test_a_wide_bias_that_no_autocast_has_left(call: Any, theirs: Any) -> None:
    """Refused where torch refuses it, which some CPUs' libraries do not, by whichever way it comes to the
    operators; where shapes alone are known it is refused always."""
    x, w, b = torch.randn(1, 4, 5, 5).bfloat16(), torch.randn(4, 4, 3, 3).bfloat16(), torch.randn(4)
    try:
        theirs(x, w, b)
    except RuntimeError:
        for f in (call, torch.compile(call, backend="eager", fullgraph=True)):
            with pytest.raises(Exception, match="bias type .*should be the same"):
                f(x, w, b)
        with pytest.raises(Exception, match="should be the same"):
            torch.jit.trace(call, (x, w, b))
    else:
        assert call(x, w, b).dtype is x.dtype
    with FakeTensorMode() as mode, pytest.raises(Exception, match="should be the same"):
        call(*map(mode.from_tensor, (x, w, b)))


@pytest.mark.slow
def test_transforms_inside_compiled_code() -> None:
    x, w, _ = (t.detach() for t in operands())

    def call(f: Any) -> Any:
        loss = lambda w: f(x, w, groups=2).square().sum()  # noqa: E731
        one = lambda x, w: f(x[None], w, groups=2)  # noqa: E731
        return lambda w: (
            torch.func.grad(loss)(w),
            torch.vmap(one, (0, None))(x, w),
            torch.func.jvp(loss, (w,), (w,))[1],
        )

    got = torch.compile(call(transconv.conv2d), backend="aot_eager", fullgraph=True)(w)
    torch.testing.assert_close(got, call(F.conv2d)(w))


@pytest.mark.slow
def test_compiled_autograd() -> None:
    x, w, b = operands()
    wanted = torch.autograd.grad(F.conv2d(x, w, b, groups=2).sum(), (x, w, b))
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        transconv.conv2d(x, w, b, groups=2).sum().backward()
    torch.testing.assert_close((x.grad, w.grad, b.grad), wanted)


@pytest.mark.slow
def test_checkpoint_inside_compiled_code() -> None:
    x, w, b = operands()

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: transconv.conv2d(x, w, b, groups=2).sin(), x, use_reentrant=False
        )

    y = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    wanted = torch.autograd.grad(F.conv2d(x, w, b, groups=2).sin().sum(), (x, w, b))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w, b)), wanted)


@pytest.mark.slow
def test_inductor() -> None:
    x, w, b = operands(form=s.channels_last)
    f = lambda x, w, b: transconv.conv2d(x, w, b, padding=1, groups=2).relu() * 2  # noqa: E731
    got = torch.compile(f, fullgraph=True)(x, w, b)
    torch.testing.assert_close(got, f(x, w, b))
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), (x, w, b)), torch.autograd.grad(f(x, w, b).sum(), (x, w, b))
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = transconv.nn.Conv2d(4, 6, 3, padding="same")
        self.up = transconv.nn.ConvTranspose2d(6, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.conv(x).relu())


@pytest.mark.every(2)
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    net = Net()
    x = torch.randn(2, 4, 6, 6)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},), strict=strict)
    targets = [n.target for n in program.graph.nodes]
    assert targets.count(OP) == 2
    for given in (x, torch.randn(5, 4, 6, 6)):
        torch.testing.assert_close(program.module()(given), net(given))
        torch.testing.assert_close(program.run_decompositions().module()(given), net(given))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_flops(name: str) -> None:
    ndims = int(name[-2])
    counts = []
    for f in (s.ours(name), s.theirs(name)):
        x = torch.randn(2, 4, *[5] * ndims, requires_grad=True)
        w = torch.randn(4, 4, *[3] * ndims, requires_grad=True)
        with FlopCounterMode(display=False) as mode:
            f(x, w, stride=2, padding=1).sum().backward()
        counts.append(mode.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_fake_tensors_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, b = (t.detach() for t in operands(form=s.channels_last))
    real = transconv.conv2d(x, w, b, 2, "valid", groups=2)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w, b)]
    for made in (
        transconv.conv2d(*fakes, 2, "valid", groups=2),
        transconv.conv2d(*(t.to("meta") for t in (x, w, b)), 2, "valid", groups=2),
    ):
        assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)


def test_the_plain_autograd_function() -> None:
    x, w, b = operands()
    y = transconv.conv2d(x, w, b, groups=2)
    assert y.grad_fn is not None and y.grad_fn.name() == "ConvolutionFunctionBackward"
    z = OP(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    assert torch.equal(y, z)
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), (x, w, b)), torch.autograd.grad(z.sin().sum(), (x, w, b))
    )


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_without_derivatives(transposed: bool) -> None:
    x, w, b = (t.detach() for t in operands(form=s.channels_last))
    numbers = ([2, 1], [1, 1], [1, 2], transposed, [0, 0], 2)
    params = operators.resolve(x, w, None, numbers)
    text = operators.spelled(params)
    y = operators.fwd(x, w, b, None, text)
    assert torch.equal(y, OP(x, w, b, *numbers))
    res = None if transposed else torch.randn_like(y)
    fused_functional = operators.spelled(params, "" if transposed else "relu")
    assert set(opcheck(operators.fwd, (x, w, b, res, fused_functional)).values()) == {"SUCCESS"}
    wanted = BACKWARD(y, x, w, *numbers, [True, True, False])
    for op, right in zip((operators.bwd_d, operators.bwd_w), wanted, strict=False):
        assert set(opcheck(op, (y, x, w, text)).values()) == {"SUCCESS"}
        torch.testing.assert_close(op(y, x, w, text), right)
    for op in (operators.bwd_d, operators.bwd_w):
        with pytest.raises(RuntimeError, match="Expected grad_output of size"):
            op(x, x, w, text)


@pytest.mark.parametrize(
    ("numbers", "activation", "text"),
    [
        (((1, 1), (0, 0), (1, 1), False, (0, 0), 1), "", "stride=1x1"),
        (((2,), (3,), (1,), False, (0,), 4), "gelu_tanh", "stride=2 padding=3 groups=4 gelu_tanh"),
        (((1, 2), (0, 1, 1, 1), (2, 1), False, (0, 0), 1), "", "stride=1x2 padding=0x1:1x1 dilation=2x1"),
        (
            ((2, 2, 2), (0, 0, 0), (1, 1, 1), True, (1, 0, 1), 1),
            "",
            "stride=2x2x2 output_padding=1x0x1 transposed",
        ),
    ],
)
def test_the_numbers_as_text(numbers: Any, activation: str, text: str) -> None:
    params = Params(*numbers)
    assert operators.spelled(params, activation) == text
    assert operators.read(text)[:2] == (params, activation)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stride=",
        "stride=1,1",
        "padding=1x1",
        "stride=1x1 padding=0x0",
        "stride=1x1 groups=1",
        "groups=2 stride=1x1",
        "stride=1x1 stride=1x1",
        "stride=1x1 relu transposed",
        "stride=1xx1",
        "stride=x1",
        "stride=1x1 padding=:1x1",
        "stride=1x1 padding=-1x0",
        "stride=1x1 groups=2x3",
        "stride=1x1  relu",
        "stride=1x1 pads=1x1",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    x, w, b = (t.detach() for t in operands(form=s.channels_last))
    with pytest.raises(RuntimeError, match=r"expected a text such as 'stride=1x1"):
        operators.fwd(x, w, b, None, text)


def test_traced_graphs_hold_operators_without_derivatives() -> None:
    """Python's derivatives would cost a compiled graph more than a launch per call."""
    x, w, b = operands(form=s.channels_last)
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes if "transconv" in str(n.target))
        return make_boxed_func(graph.forward)

    f = torch.compile(
        lambda x: transconv.fused_conv2d(
            transconv.conv2d(x, w, b, padding=1, groups=2), w, b, groups=2, activation="relu"
        ),
        backend=aot_autograd(fw_compiler=note),
    )
    f(x).sum().backward()
    assert sorted(seen) == sorted(
        ["transconv.fwd.default"] * 2 + ["transconv.bwd_d.default"] * 2 + ["transconv.bwd_w.default"] * 2
    )
    seen.clear()
    with torch.no_grad():
        f(x)
    assert seen == ["transconv.fwd.default"] * 2


def test_operators_in_inference_mode() -> None:
    """Autograd is passed by there: the operators' own kernels are reached."""
    x, w, b = (t.detach() for t in operands())
    numbers = ([1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    with torch.inference_mode():
        y = OP(x, w, b, *numbers)
        activated = operators.fused_convolution(x, w, b, None, "relu", *numbers)
        found = BACKWARD(y, x, w, *numbers, [True, False, True])
        with pytest.raises(RuntimeError, match="Expected grad_output of size"):
            BACKWARD(x, x, w, *numbers, [True, True, True])
    torch.testing.assert_close(y, F.conv2d(x, w, b, groups=2))
    torch.testing.assert_close(activated, y.relu())
    torch.testing.assert_close(found[0], BACKWARD(y.clone(), x, w, *numbers, [True] * 3)[0])
    assert found[1].numel() == 0 and torch.allclose(found[2], y.sum((0, 2, 3)))


@pytest.mark.every(6)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: transconv.conv2d(x, w, b, padding=1),
        lambda x, w, b: transconv.conv_transpose2d(x, w, b, padding=1),
        lambda x, w, b: transconv.fused_conv2d(x, w, b, padding=1, activation="tanh", residual=x),
    ],
    ids=["conv", "transposed", "fused"],
)
def test_compiled_code_keeps_tangents(call: Any, backend: str) -> None:
    x, w, b, t = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(4), torch.randn(2, 4, 5, 5)

    def inside(x: torch.Tensor, t: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, t), w, b)).tangent

    wanted = torch.func.jvp(lambda x: call(x, w, b), (x,), (t,))[1]
    made = torch.compile(inside, fullgraph=True, backend=backend)(x, t)
    torch.testing.assert_close(made, wanted)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    plain = compiled(x, w, b)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, t), w, b))
    torch.testing.assert_close((y.primal, y.tangent), (plain, wanted))
    torch.testing.assert_close(compiled(x, w, b), plain)


@pytest.mark.every(2)
@pytest.mark.parametrize("enabled", [False, True])
def test_operators_keep_tangents(enabled: bool) -> None:
    x, w, t = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(2, 4, 5, 5)
    numbers = ([1, 1], [1, 0, 2, 1], [1, 1], False, [0, 0], 1)
    grad = torch.randn_like(OP(x, w, None, *numbers))
    calls = (
        lambda x: OP(x, w, None, *numbers),
        lambda x: BACKWARD(grad, x, w, *numbers, [True, True, False])[1],
        lambda x: operators.fused_convolution(x, w, None, None, "relu", *numbers),
    )
    padded = F.pad(t, (0, 1, 1, 2))
    right = (
        F.conv2d(padded, w),
        torch.nn.grad.conv2d_weight(padded, w.shape, grad),
        F.conv2d(padded, w) * (OP(x, w, None, *numbers) > 0),
    )
    with contextlib.ExitStack() as stack:
        if enabled:
            stack.enter_context(transconv.use(("cpu",)))
        for call, wanted in zip(calls, right, strict=True):
            with forward_ad.dual_level():
                made = forward_ad.unpack_dual(call(forward_ad.make_dual(x, t))).tangent
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def test_torch_func_sees_through_the_operators() -> None:
    x, w, _ = (t.detach() for t in operands())
    numbers = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    ours, theirs = (lambda t: OP(t, w, None, *numbers)), (lambda t: F.conv2d(t, w, None, 1, 1, 1, 2))
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sum())(x),
        lambda f: torch.func.vmap(f)(x[None]),
        lambda f: torch.func.jvp(f, (x,), (x,)),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))
    with pytest.raises(RuntimeError, match="expected 3 flags, got 1"), torch.inference_mode():
        BACKWARD(torch.ones(2, 4, 5, 5), x, w, *numbers, [True])


def test_a_mask_of_two_flags_is_refused_under_transforms_too() -> None:
    x, w = torch.randn(2, 1, 2, 5), torch.randn(2, 2, 1)
    numbers: tuple[Any, ...] = ([1], [0], [1], False, [0], 1)
    backward = torch.ops.transconv.convolution_backward
    with pytest.raises(RuntimeError, match="3 flags"):
        torch.func.vmap(lambda t: backward(t, t, w, *numbers, [True, False])[0])(x)


def test_convolutions_are_captured_with_numbers_for_all_dims() -> None:
    """One number may stand for each dim."""
    x, w = torch.randn(1, 4, 7, 6), torch.randn(4, 4, 3, 3)

    class Called(torch.nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers = [2] * self.n, [1] * self.n, [1] * self.n, False, [0] * self.n
            return torch.ops.aten.convolution.default(x, w, None, *numbers, 1)

    (one,), (two,) = (export.recorded(Called(n), [x], False) for n in (1, 2))
    assert one == two and one.parts[0].problem.stride == (2, 2) and not one.why_not


@pytest.mark.every(2)
@pytest.mark.parametrize("padding", [((0, 2), (1, 0)), ((1, 1), (0, 3)), ((2, 0), (1, 3))])
def test_torchs_gradients_of_two_sided_paddings(padding: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (top, bottom), (left, right) = padding
    x, w = torch.randn(2, 3, 6, 5, requires_grad=True), torch.randn(4, 3, 3, 2, requires_grad=True)
    y = torch.conv2d(torch.nn.functional.pad(x, (left, right, top, bottom)), w)
    grad = torch.randn_like(y)
    p = Params((1, 1), (top, left, bottom, right), (1, 1), False, (0, 0), 1)
    found = aten_backward(grad, x.detach(), w.detach(), p, (True, True, True))
    torch.testing.assert_close(found, (*torch.autograd.grad(y, (x, w), grad), grad.sum((0, 2, 3))))


def test_a_plan_is_loaded_when_all_of_its_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run_check, "is_trusted", lambda *_: True)

    def plan(*loaded: bool) -> Any:
        return SimpleNamespace(
            steps=[
                SimpleNamespace(triton=SimpleNamespace(is_loaded=lambda *_, one=one: one))
                for one in loaded
            ]
        )

    for loaded in ((True,), (True, True), (False, True), (True, False), (False,)):
        assert lower_call.is_loaded(plan(*loaded), torch.device("cpu"), True) is all(loaded)


def test_asking_for_counts_leaves_them() -> None:
    transconv.stats(reset=True)
    transconv.conv2d(torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3))
    first = transconv.stats()
    assert first.native or first.fallback
    assert first == transconv.stats() == transconv.stats(reset=True) != transconv.stats()
