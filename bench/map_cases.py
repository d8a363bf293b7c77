"""Maps, reductions and norms as networks have them: a text for us, a function for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MapCase:
    """``text``: the computation; ``instead``: what a user of torch calls, on the same tensors. ``more``:
    computations that run with it, on tensors of the same names. ``other``: the tensors as torch may like
    them better, laid out before anything is timed. ``below``: what whole numbers are smaller than."""

    name: str
    text: str
    instead: Callable[[Tensors], object]
    more: tuple[str, ...] = ()
    other: Callable[[Tensors], Tensors] | None = None
    below: int = 1

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *self.more)


def cases() -> list[MapCase]:
    """All of them, grouped by kind."""
    from bench.map_gradients import gradients
    from bench.map_moves import moves

    return [
        *_activations(),
        *_copies(),
        *_sums(),
        *_softmaxes(),
        *_norms(),
        *_images(),
        *moves(),
        *gradients(),
    ]


def _text(name: str, axes: str, *lines: str) -> str:
    return "\n    ".join([f"compute {name}", *lines[:0], f"axes   {axes}", *lines])


def _with(tensors: str, text: str) -> str:
    head, _, rest = text.partition("\n")
    return "\n".join([head, *(f"    tensor {t}" for t in tensors.split("; ")), rest])


def _activations() -> list[MapCase]:
    found = []
    for name, sizes in (("resnet", (64, 256, 56, 56)), ("vae", (1, 256, 1024, 1024))):
        n, c, h, w = sizes
        shape = f"[n={n}, c={c}, h={h}, w={w}] nhwc"
        axes = f"n={n} c={c} h={h} w={w}"
        found.append(
            MapCase(
                f"silu {name}",
                _with(
                    f"X bf16 {shape}; Y bf16 {shape}",
                    _text("silu", axes, "read   x = X[n, c, h, w]", "store  Y[n, c, h, w] = silu(x)"),
                ),
                lambda t: F.silu(t["X"]),
            )
        )
        found.append(
            MapCase(
                f"add relu {name}",
                _with(
                    f"X bf16 {shape}; R bf16 {shape}; Y bf16 {shape}",
                    _text(
                        "add_relu",
                        axes,
                        "read   x = X[n, c, h, w]",
                        "read   r = R[n, c, h, w]",
                        "store  Y[n, c, h, w] = relu(x + r)",
                    ),
                ),
                lambda t: F.relu(t["X"] + t["R"]),
            )
        )
    shape = "[m=8192, n=11008]"
    found.append(
        MapCase(
            "swiglu llama",
            _with(
                f"X bf16 {shape}; G bf16 {shape}; Y bf16 {shape}",
                _text(
                    "swiglu",
                    "m=8192 n=11008",
                    "read   x = X[m, n]",
                    "read   g = G[m, n]",
                    "store  Y[m, n] = silu(g) * x",
                ),
            ),
            lambda t: F.silu(t["G"]) * t["X"],
        )
    )
    return found


def _copies() -> list[MapCase]:
    return [
        MapCase(
            "transpose 8192",
            _with(
                "X bf16 [m=8192, n=8192]; Y bf16 [n=8192, m=8192]",
                _text("transpose", "n=8192 m=8192", "read   x = X[m, n]", "store  Y[n, m] = x"),
            ),
            lambda t: t["X"].t().contiguous(),
        ),
        MapCase(
            "to channels last",
            _with(
                "X bf16 [n=64, c=256, h=56, w=56]; Y bf16 [n=64, c=256, h=56, w=56] nhwc",
                _text(
                    "to_last",
                    "n=64 c=256 h=56 w=56",
                    "read   x = X[n, c, h, w]",
                    "store  Y[n, c, h, w] = x",
                ),
            ),
            lambda t: t["X"].contiguous(memory_format=torch.channels_last),
        ),
    ]


def _sums() -> list[MapCase]:
    found = []
    whole = {"first": ("Y[m, n]", 0), "middle": ("Y[b, n]", 1), "last": ("Y[b, m]", 2)}
    for place, (stored, dim) in whole.items():
        name = "bmn"[dim]
        sizes = {"b": 64, "m": 1024, "n": 2048}
        free = " ".join(f"{k}={v}" for k, v in sizes.items() if k != name)
        found.append(
            MapCase(
                f"sum {place}",
                _with(
                    "X bf16 [b=64, m=1024, n=2048]",
                    _text(
                        "total",
                        f"{free} | {name}={sizes[name]}",
                        "read   x = X[b, m, n]",
                        f"store  {stored} = sum(x; {name})",
                    ),
                ),
                lambda t, d=dim: t["X"].sum(d, dtype=torch.float32),
            )
        )
    found.append(
        MapCase(
            "sum columns",
            _with(
                "X bf16 [m=65536, n=4096]",
                _text("columns", "n=4096 | m=65536", "read   x = X[m, n]", "store  Y[n] = sum(x; m)"),
            ),
            lambda t: t["X"].sum(0, dtype=torch.float32),
        )
    )
    found.append(
        MapCase(
            "sum all",
            _with(
                "X bf16 [m=16384, n=8192]; Y f32 [one=1]",
                _text(
                    "everything",
                    "one=1 | m=16384 n=8192",
                    "read   x = X[m, n]",
                    "store  Y[one] = sum(x; m n)",
                ),
            ),
            lambda t: t["X"].sum(dtype=torch.float32),
        )
    )
    found.append(
        MapCase(
            "average pool resnet",
            _with(
                "X bf16 [n=256, c=2048, h=7, w=7] nhwc; Y bf16 [n=256, c=2048]",
                _text(
                    "pooled",
                    "n=256 c=2048 | h=7 w=7",
                    "read   x = X[n, c, h, w]",
                    "store  Y[n, c] = sum(x; h w) / 49",
                ),
            ),
            lambda t: t["X"].mean((2, 3)),
        )
    )
    return found


def _softmaxes() -> list[MapCase]:
    found = []
    for rows, length in ((262144, 128), (32768, 1024), (8192, 4096), (4096, 32768), (512, 262144)):
        shape = f"[n={rows}, k={length}]"
        found.append(
            MapCase(
                f"softmax {rows}x{length}",
                _with(
                    f"X bf16 {shape}; Y bf16 {shape}",
                    _text(
                        "softmax",
                        f"n={rows} | k={length}",
                        "read   x = X[n, k]",
                        "let    top = max(x; k)",
                        "let    e = exp(x - top)",
                        "let    total = sum(e; k)",
                        "store  Y[n, k] = e / total",
                    ),
                ),
                lambda t: torch.softmax(t["X"], -1),
            )
        )
    shape = "[n=8192, k=4096]"
    found.append(
        MapCase(
            "softmax backward 8192x4096",
            _with(
                f"Y bf16 {shape}; G bf16 {shape}; X bf16 {shape}",
                _text(
                    "softmax_backward",
                    "n=8192 | k=4096",
                    "read   y = Y[n, k]",
                    "read   g = G[n, k]",
                    "let    s = sum(y*g; k)",
                    "store  X[n, k] = y*(g - s)",
                ),
            ),
            lambda t: torch._softmax_backward_data(t["G"], t["Y"], -1, torch.bfloat16),
        )
    )
    return found


def _norms() -> list[MapCase]:
    found = []
    for rows, length in ((16384, 4096), (8192, 8192), (65536, 768)):
        shape = f"[n={rows}, k={length}]"
        found.append(
            MapCase(
                f"rms norm {rows}x{length}",
                _with(
                    f"X bf16 {shape}; G bf16 [k={length}]; Y bf16 {shape}",
                    _text(
                        "rms_norm",
                        f"n={rows} | k={length}",
                        "read   x = X[n, k]",
                        "read   g = G[k]",
                        f"let    r = rsqrt(sum(x*x; k) / {length} + 0.00001)",
                        "store  Y[n, k] = x * r * g",
                    ),
                ),
                lambda t: F.rms_norm(t["X"], t["G"].shape, t["G"], 1e-5),
            )
        )
        found.append(
            MapCase(
                f"layer norm {rows}x{length}",
                _with(
                    f"X bf16 {shape}; G bf16 [k={length}]; B bf16 [k={length}]; Y bf16 {shape}",
                    _text(
                        "layer_norm",
                        f"n={rows} | k={length}",
                        "read   x = X[n, k]",
                        "read   g = G[k]",
                        "read   b = B[k]",
                        f"let    mean = sum(x; k) / {length}",
                        "let    d = x - mean",
                        f"let    r = rsqrt(sum(d*d; k) / {length} + 0.00001)",
                        "store  Y[n, k] = d * r * g + b",
                    ),
                ),
                lambda t: F.layer_norm(t["X"], t["G"].shape, t["G"], t["B"], 1e-5),
            )
        )
    return found


def _images() -> list[MapCase]:
    """Norms over images: few rows that are long."""
    found = []
    for c, size in ((512, 128), (512, 256), (512, 512), (256, 512), (256, 1024), (128, 1024)):
        shape = (
            f"[n=1, g=32, c={c // 32}, h={size}, w={size}] strides({c * size * size},{c // 32},1,"
            f"{size * c},{c})"
        )
        found.append(
            MapCase(
                f"group norm {c}x{size}x{size}",
                _with(
                    f"X bf16 {shape}; G bf16 [g=32, c={c // 32}]; "
                    f"B bf16 [g=32, c={c // 32}]; Y bf16 {shape}",
                    _text(
                        "group_norm",
                        f"n=1 g=32 | c={c // 32} h={size} w={size}",
                        "read   x = X[n, g, c, h, w]",
                        "read   gamma = G[g, c]",
                        "read   beta = B[g, c]",
                        f"let    mean = sum(x; c h w) / {c // 32 * size * size}",
                        "let    d = x - mean",
                        f"let    r = rsqrt(sum(d*d; c h w) / {c // 32 * size * size} + 0.00001)",
                        "store  Y[n, g, c, h, w] = d * r * gamma + beta",
                    ),
                ),
                lambda t: F.group_norm(t["X"].flatten(1, 2), 32, t["G"].flatten(), t["B"].flatten(), 1e-5),
                other=lambda t: t | {"X": t["X"].contiguous()},
            )
        )
    shape = "[n=2, c=32, d=128, h=128, w=128]"
    found.append(
        MapCase(
            "instance norm 128^3",
            _with(
                f"X bf16 {shape}; G bf16 [c=32]; B bf16 [c=32]; Y bf16 {shape}",
                _text(
                    "instance_norm",
                    "n=2 c=32 | d=128 h=128 w=128",
                    "read   x = X[n, c, d, h, w]",
                    "read   gamma = G[c]",
                    "read   beta = B[c]",
                    "let    mean = sum(x; d h w) / 2097152",
                    "let    d_ = x - mean",
                    "let    r = rsqrt(sum(d_*d_; d h w) / 2097152 + 0.00001)",
                    "store  Y[n, c, d, h, w] = d_ * r * gamma + beta",
                ),
            ),
            lambda t: F.instance_norm(t["X"], weight=t["G"], bias=t["B"], eps=1e-5),
        )
    )
    return found
