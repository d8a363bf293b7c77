"""Whole models over a mesh: results and gradients of one process; plans that a mesh does not have."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import transconv
from tests.distributed import processes
from transconv.distributed import rules, sharded_modules
from transconv.distributed.sharded_modules import pool


class Small(nn.Module):
    """With a skip connection, norms, a stride, a pool and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down = nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(3, 1, 1),
            nn.InstanceNorm2d(8, affine=True),
        )
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Sequential(
            nn.MaxPool2d(3, 1, 1),
            nn.GroupNorm(8, 8, affine=False),
            nn.Conv2d(8, 2, 5, padding=2, padding_mode="circular"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        return self.last(torch.cat([a, self.up(self.down(a))], 1))  # type: ignore[no-any-return]


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Small().double(), torch.randn(2, 3, 10, 12).double()


def trained(shape: tuple[int, ...], plan: dict[str, int | str]) -> list[str]:
    """What differs from one process after a step."""
    transconv.config.fallback = "silent"
    whole, x = made()
    y = whole(x)
    y.square().mean().backward()
    model, _ = made()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns")[: len(shape)])
    transconv.distributed.parallelize(model, mesh, plan)
    result = model(x)
    target = distribute_tensor(torch.zeros_like(y), mesh, result.placements)
    (result - target).square().mean().backward()
    for (name, b), want in zip(model.named_buffers(), whole.buffers(), strict=True):
        if not torch.allclose(b.full_tensor(), want):  # type: ignore[operator]
            return [f"{name}: {b} for {want}"]
    found = [] if result.placements[0].is_shard() else [f"placements {result.placements}"]
    with torch.no_grad():
        if not torch.allclose(model.eval()(x).full_tensor(), whole.eval()(x)):
            found.append("inference")
    if not torch.allclose(result.full_tensor(), y):
        found.append("result")
    for (name, p), want in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and want.grad is not None
        if p.grad.placements != (Replicate(),) * mesh.ndim:
            found.append(f"{name}: {p.grad.placements}")
        if not torch.allclose(p.grad.full_tensor(), want.grad):
            found.append(f"gradient of {name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2,), {"h": 0}),
        ((3,), {"w": "rows"}),
        ((2, 2), {"h": 0, "w": 1}),
        ((2, 2), {"n": 0, "h": "columns"}),
    ],
)
def test_a_step_of_training(shape: tuple[int, ...], plan: dict[str, int | str]) -> None:
    found = processes.run(torch.Size(shape).numel(), trained, shape, plan)
    assert found == [[] for _ in found], found


class Off(nn.ReLU):
    """Is wrong on one rank, where its image is sharded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wrong = isinstance(x, DTensor) and torch.distributed.get_rank() == 1
        return super().forward(x) * (1.5 if wrong else 1)


def certified() -> list[tuple[bool, str]]:
    transconv.config.fallback = "silent"
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(1, 3, 9, 8)
    normed = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3))
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    wrong = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Off())
    found = [
        transconv.distributed.verify(normed, mesh, {"h": 0}, x),
        transconv.distributed.verify(plain, mesh, {"w": 0}, x, exact=True),
        transconv.distributed.verify(wrong, mesh, {"h": 0}, x, exact=True),
    ]
    return [(bool(c), str(c)) for c in found]


@pytest.mark.slow
def test_certificates() -> None:
    """Rows that one rank has wrong are told as its own."""
    found = processes.run(2, certified)
    assert found[0] == found[1]
    (normed, told), (exact, bits), (right, wrong) = found[0]
    assert normed and "8 tensors equal those of one process, within the error of one process" in told
    assert exact and "6 tensors equal those of one process, bit by bit" in bits
    lines = {line.split("  ")[0].strip(): line for line in wrong.splitlines()}
    assert not right and "are wrong" in wrong
    assert lines["result"].endswith("rank 1")


def bordered(first: int, count: int) -> list[str]:
    """What differs of drawn convolutions with borders of the image's own rows: results and gradients."""
    transconv.config.fallback = "silent"
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for seed in range(first, first + count):
        r = random.Random(seed)
        n, k, s, d = r.randint(1, 3), r.randint(1, 5), r.randint(1, 3), r.choice((1, 1, 2))
        mode = r.choice(("circular", "reflect", "replicate"))
        padding = r.randint(0, 4) if s > 1 or r.random() < 0.5 else "same"
        torch.manual_seed(seed)
        layer = getattr(nn, f"Conv{n}d")(
            4, 4, k, s, padding, d, groups=r.choice((1, 2)), bias=r.random() < 0.7, padding_mode=mode
        ).double()
        layer.weight.data.mul_(8).round_()
        x = torch.randint(-9, 10, (2, 4, *(r.randint(9, 14) for _ in range(n)))).double()
        a, dim = x.clone().requires_grad_(), r.choice((0, *range(2, n + 2)))
        want = layer(a)
        grad = torch.arange(want.numel()).view(want.shape).double()
        want.backward(grad)
        expected = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        transconv.distributed.parallelize(layer, mesh, {})
        b = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        got = sharded_modules.convolution(layer, b)
        got.backward(distribute_tensor(grad, mesh, got.placements))  # type: ignore[no-untyped-call]
        same = [
            torch.allclose(got.full_tensor(), want),
            got.placements == (Shard(dim),),
            torch.equal(b.grad.full_tensor(), a.grad),  # type: ignore[union-attr, arg-type]
            *(
                torch.allclose(p.grad.full_tensor(), e)  # type: ignore[union-attr]
                for p, e in zip(layer.parameters(), expected, strict=True)
            ),
        ]
        if not all(same):
            found.append(f"{layer} of {list(x.shape)} along {dim}: {same}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_drawn_borders(ranks: int) -> None:
    found = processes.run(ranks, bordered, 100 * ranks, 40)
    assert found == [[]] * ranks, found


def upsampled(first: int, count: int) -> list[str]:
    """What differs of drawn nearest upsampling: results and gradients."""
    rules.serve_models()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for seed in range(first, first + count):
        r = random.Random(seed)
        n, dim = r.randint(1, 3), 0
        x = torch.randint(-9, 10, (2, 3, *(r.randint(1, 9) for _ in range(n)))).double()
        torch.distributed.broadcast(x, 0)
        dim = r.choice((0, 1, *range(2, n + 2)))
        how = {"mode": r.choice(("nearest", "nearest-exact"))}
        if r.random() < 0.5:
            how["scale_factor"] = r.choice((2, 3, 1.7, 0.6)) if min(x.shape[2:]) > 1 else 2
        else:
            how["size"] = [r.randint(1, 20) for _ in range(n)]
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        want, got = F.interpolate(a, **how), F.interpolate(b, **how)
        grad = torch.arange(want.numel()).view(want.shape).double()
        want.backward(grad)
        got.backward(distribute_tensor(grad, mesh, [Shard(dim)]))  # type: ignore[no-untyped-call]
        plain = b.detach()
        with torch.inference_mode():
            alone = F.interpolate(plain, **how)
            same = [torch.equal(alone.full_tensor(), want)]  # type: ignore[attr-defined]
        same += [
            torch.equal(got.full_tensor(), want),
            got.placements == (Shard(dim),),
            torch.equal(b.grad.full_tensor(), a.grad),
        ]  # type: ignore[union-attr, arg-type]
        if not all(same):
            found.append(f"{how} of {list(x.shape)} along {dim}: {same}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_drawn_upsampling(ranks: int) -> None:
    found = processes.run(ranks, upsampled, 100 * ranks, 60)
    assert found == [[]] * ranks, found


def beside_fsdp() -> bool:
    """Images dealt over one mesh dim, rows over another: FSDP averages the gradients over the first."""
    transconv.config.fallback = "silent"
    whole, x = made()
    loss = [whole(image[None]).square().mean() for image in x]
    torch.stack(loss).mean().backward()
    model, _ = made()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("images", "rows"))
    transconv.distributed.parallelize(model, mesh["rows"], {"h": 0})
    fully_shard(model, mesh=mesh["images"])
    result = model(x[mesh.get_local_rank("images")][None])
    result.square().mean().backward()
    return all(
        torch.allclose(p.grad.full_tensor(), want.grad)  # type: ignore[union-attr, arg-type]
        for p, want in zip(model.parameters(), whole.parameters(), strict=True)
    )


@pytest.mark.slow
def test_beside_fsdp() -> None:
    assert processes.run(4, beside_fsdp) == [True] * 4


def pooled(first: int) -> list[str]:
    """What differs of drawn pools, result and gradient."""
    mesh = init_device_mesh("cpu", (3,))
    found = []
    for seed in range(first, first + 30):
        r = random.Random(seed)
        n, kernel, stride = r.randint(1, 3), r.randint(1, 5), r.randint(1, 4)
        kind = r.choice(("MaxPool", "AvgPool"))
        numbers = {"kernel_size": kernel, "stride": stride, "padding": r.randint(0, kernel // 2)}
        if kind == "MaxPool":
            numbers["dilation"] = r.choice((1, 1, 2))
        module = getattr(nn, f"{kind}{n}d")(**numbers)
        x = torch.randint(-9, 10, (2, 3, *(r.randint(9, 14) for _ in range(n)))).double()
        dim = r.randrange(n + 2)
        torch.distributed.broadcast(x, 0)
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        want, got = module(a), pool(module, b)  # type: ignore[arg-type]
        grad = torch.arange(want.numel()).view(want.shape).double()
        want.backward(grad)
        got.backward(distribute_tensor(grad, mesh, got.placements))  # type: ignore[no-untyped-call]
        if not (torch.equal(got.full_tensor(), want) or torch.allclose(got.full_tensor(), want)):
            found.append(f"{module} of {list(x.shape)} along {dim}: {got.full_tensor()} for {want}")
        elif kind == "AvgPool" and not torch.allclose(b.grad.full_tensor(), a.grad):  # type: ignore
            found.append(f"{module} of {list(x.shape)} along {dim}: gradient")
    return found


@pytest.mark.slow
def test_drawn_pools() -> None:
    found = processes.run(3, pooled, 0)
    assert found == [[]] * 3, found


def padding(first: int) -> list[str]:
    """Borders of any width, also negative ones, along sharded axes and others."""
    mesh, found = init_device_mesh("cpu", (3,)), []
    rules.serve_models()
    for seed in range(first, first + 40):
        r = random.Random(seed)
        n = r.choice((1, 2, 3))
        x = torch.arange(1.0, 1 + 6 * 7**n).reshape(2, 3, *[7] * n)
        dim, widths = r.randrange(n + 2), [r.randint(-2, 4) for _ in range(2 * r.randint(1, n))]
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        want, got = (F.pad(t, widths, value=1.5) for t in (a, b))
        grad = torch.arange(want.numel()).view(want.shape).to(x)
        want.backward(grad)
        got.backward(distribute_tensor(grad, mesh, got.placements))  # type: ignore[attr-defined]
        if not (
            torch.equal(got.full_tensor(), want)  # type: ignore[attr-defined]
            and torch.equal(b.grad.full_tensor(), a.grad)
        ):  # type: ignore[union-attr]
            found.append(f"{widths} of {list(x.shape)} along {dim}")
    return found


@pytest.mark.slow
def test_constant_borders() -> None:
    found = processes.run(3, padding, 0)
    assert found == [[]] * 3, found


def without_rules() -> list[str]:
    """Modules of torch for which DTensor has no rules, forward or backward, parametrized weights among
    them: what differs from one process, with gradients."""
    transconv.config.fallback = "silent"
    mesh, found = init_device_mesh("cpu", (3,)), []
    between: list[nn.Module] = [
        *(kind(2) for kind in (nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d)),
        *(
            nn.AvgPool2d(3, 2, 1, **word)
            for word in ({"count_include_pad": False}, {"divisor_override": 5})
        ),
        *(nn.LPPool2d(2, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AdaptiveAvgPool2d(2)),
        *(
            nn.PReLU(3),
            nn.LocalResponseNorm(2),
            nn.Softmax2d(),
            nn.Hardtanh(),
            nn.LogSigmoid(),
            nn.PixelShuffle(1),
        ),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3, padding=1)),
        nn.utils.parametrizations.spectral_norm(nn.ConvTranspose2d(3, 3, 4, 2, 1)).eval(),
    ]
    for module in between:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Conv2d(2, 3, 3), module, nn.Conv2d(3, 2, 1)).double()
        model, x = copy.deepcopy(whole), torch.randn(1, 2, 10, 7).double()
        transconv.distributed.parallelize(model, mesh, {"h": 0})
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, got = whole(a), model(b)
        grad = torch.arange(want.numel()).view(want.shape).to(x).sin()
        want.backward(grad)
        got.backward(distribute_tensor(grad, mesh, got.placements))
        pairs = [
            (got, want),
            *zip(
                (b.grad, *(p.grad for p in model.parameters())),
                (a.grad, *(p.grad for p in whole.parameters())),
                strict=True,
            ),
        ]
        for one, other in pairs:
            one = one.full_tensor() if isinstance(one, DTensor) else one
            if one is None or not torch.allclose(one, other, atol=1e-9):
                found.append(f"{module}: {list(other.shape)}")
    return found


@pytest.mark.slow
def test_modules_without_rules() -> None:
    found = processes.run(3, without_rules)
    assert found == [[]] * 3, found


def numbers() -> list[bool]:
    """A group norm of images that are single numbers, and its gradients."""
    mesh = init_device_mesh("cpu", (2,))
    rules.serve_models()
    given = [torch.arange(18.0).reshape(3, 6).sin(), torch.arange(6.0), torch.ones(6)]
    plain = [t.clone().requires_grad_() for t in given]
    dealt = [
        distribute_tensor(t, mesh, [place]).requires_grad_()
        for t, place in zip(given, (Shard(0), Replicate(), Replicate()), strict=True)
    ]
    want, got = (F.group_norm(t[0], 2, t[1], t[2]) for t in (plain, dealt))
    grad = torch.arange(18.0).reshape(3, 6).cos()
    want.backward(grad)
    got.backward(distribute_tensor(grad, mesh, got.placements))  # type: ignore[attr-defined]
    pairs = [(got, want), *((b.grad, a.grad) for a, b in zip(plain, dealt, strict=True))]
    return [torch.allclose(b.full_tensor(), a, atol=1e-5) for b, a in pairs]  # type: ignore


@pytest.mark.slow
def test_a_norm_of_images_without_rows() -> None:
    assert processes.run(2, numbers) == [[True] * 4] * 2


class Attends(nn.Module):
    """Each pixel sees all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.attention = nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.Flatten(2), nn.Softmax(-1), nn.Unflatten(2, (6, 5))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.attention(self.first(x)))
        return y


class Pixels(nn.Module):
    """A norm of each pixel's channels, with a part of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.act = nn.Parameter(torch.ones(channels, 1, 1)), nn.LeakyReLU(0.2, True)

    def forward(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        return self.act(input=F.normalize(x, dim=1) * self.gamma * times)  # type: ignore[no-any-return]


class ByPixel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), Pixels(4)
        self.out, self.own = nn.Conv2d(4, 2, 3, 2, 1), nn.Parameter(torch.randn(2, 2, 3, 3))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.norm(self.act(input=self.first(x)), times=2.0))
        return F.conv2d(y, self.own, padding=1)


def against_one_process(model: nn.Module, words: dict[str, object]) -> list[object]:
    """Placements; whether the result and all gradients are those of one process."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(1, 2, 6, 5)
    want = model(x)
    want.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    transconv.distributed.parallelize(model, mesh, {"h": 0}, **words)  # type: ignore[arg-type]
    got = model(x)
    got.square().sum().backward()
    close = [
        torch.allclose(p.grad.full_tensor(), g, atol=1e-5)  # type: ignore[union-attr, attr-defined]
        for p, g in zip(model.parameters(), grads, strict=True)
    ]
    return [got.placements, torch.allclose(got.full_tensor(), want, atol=1e-5), *close]


def differentiated_twice() -> list[object]:
    """Whether gradients of a gradient of the input are those of one process."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 6, 5).double()
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(4, 2, 3, padding=1),
        nn.LeakyReLU(0.1, True),
        nn.Conv2d(2, 2, 3),
        nn.ReLU(),
    ).double()
    alone = copy.deepcopy(model)
    transconv.distributed.parallelize(model, mesh, {"h": 0})
    for net, given in ((alone, x.clone()), (model, distribute_tensor(x, mesh, [Shard(2)]))):
        given.requires_grad_()
        loss = net(given).square().sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
        first.square().sum().backward()  # type: ignore[no-untyped-call]
    return [
        torch.allclose(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr, arg-type]
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]


def named_modules() -> list[list[object]]:
    torch.manual_seed(0)
    found = [
        against_one_process(Attends(), {"whole": ["attention"]}),
        against_one_process(ByPixel(), {"rows": [Pixels]}),
    ]
    try:
        against_one_process(ByPixel(), {"rows": ["norm", "out"]})
    except ValueError as error:
        found.append([str(error)])
    return [*found, differentiated_twice()]


@pytest.mark.slow
def test_modules_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that every rank computes whole, and those whose rows are their own; gradients of gradients."""
    for attends, by_pixel, refused, twice in processes.run(2, named_modules):
        assert twice == [True] * 6, twice
        assert attends == [(Shard(2),), *[True] * 7], attends
        assert by_pixel == [(Shard(2),), *[True] * 7], by_pixel
        assert "'out' was said to compute row by row" in str(refused[0])
    monkeypatch.setattr(transconv.distributed.models, "DeviceMesh", _Mesh)
    with pytest.raises(ValueError, match="no module middle"):
        transconv.distributed.parallelize(Attends(), _Mesh(), {"h": 0}, whole=["middle"])


class _Mesh:
    ndim, mesh_dim_names = 1, None


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got builtin_function_or_method"):
        transconv.distributed.parallelize(torch.relu, _Mesh(), {"h": 0})  # type: ignore[arg-type]
