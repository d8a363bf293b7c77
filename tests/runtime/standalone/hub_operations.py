"""``python hub_operations.py FOLDER path|kernels``: the functions of an exported folder beside torch's
operations, in Triton's interpreter. The folder is loaded by its path alone, or by Hugging Face's
`kernels`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def by_path(folder: Path) -> Any:
    """The package, as `kernels` imports it."""
    at = folder / "build" / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("_loaded", at)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["_loaded"] = made
    spec.loader.exec_module(made)
    return made


def by_kernels(folder: Path) -> Any:
    """The package by the loader itself; its digests are those that the loader computes."""
    kernels: Any = importlib.import_module("kernels")
    rust: Any = importlib.import_module("kernels._rust")
    for variant in (folder / "build").iterdir():
        told = rust.Metadata.read_from_file(variant / "metadata.json").digest
        told.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
    return kernels.get_local_kernel(folder)


def compared(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], shapes: list[Any], bound: float
) -> None:
    """Results and gradients of both, of drawn operands."""
    found = []
    drawn = torch.Generator().manual_seed(1)
    given = [torch.randn(s, generator=drawn) for s in shapes]
    for function in (ours, torchs):
        operands = [t.clone().requires_grad_() for t in given]
        y = function(*operands)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
        found.append([y.detach(), *[t.grad for t in operands]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def causal(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (3, 0)), w[:, None], b, groups=x.shape[1])


def upsampled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), w, b, padding=1)


def patches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, stride=w.shape[2:]).flatten(2).transpose(1, 2)


def check(kernel: Any, compiled: bool) -> int:
    """Compare every function that is there at sizes that divide nothing; ``compiled``: also under
    torch.compile. Returns how many were compared."""
    done = 0
    if "causal_conv1d" in kernel.__all__:
        for n, c, row in ((2, 5, 9), (1, 17, 130), (3, 1, 2)):
            shapes: list[Any] = [(n, c, row), (c, 4), (c,)]
            compared(kernel.causal_conv1d, causal, shapes, 1e-4)
            compared(
                lambda *t: kernel.causal_conv1d(*t, activation="silu"),
                lambda *t: F.silu(causal(*t)),
                shapes,
                1e-4,
            )
            done += 2
    if "group_norm_silu" in kernel.__all__:
        for shape, groups in (((2, 8, 5, 7), 4), ((1, 6, 33), 3), ((3, 4, 2, 3, 5), 1)):
            compared(
                lambda x, w, b, groups=groups: kernel.group_norm_silu(x, groups, w, b),
                lambda x, w, b, groups=groups: F.silu(F.group_norm(x, groups, w, b)),
                [shape, shape[1], shape[1]],
                1e-4,
            )
            done += 1
    if "upsample_conv2d" in kernel.__all__:
        for n, c, e, h, w in ((1, 3, 5, 4, 6), (2, 17, 2, 3, 3)):
            compared(kernel.upsample_conv2d, upsampled, [(n, c, h, w), (e, c, 3, 3), (e,)], 1e-4)
            done += 1
    if "patch_embed" in kernel.__all__:
        for n, c, e, h, w, p, q in ((1, 3, 5, 8, 12, 4, 4), (2, 3, 33, 6, 10, 3, 5)):
            compared(kernel.patch_embed, patches, [(n, c, h, w), (e, c, p, q), (e,)], 1e-4)
            done += 1
    if "scaled_norms" in kernel.__all__:  # texts of the test: any size, and one that is derived
        for m, k in ((5, 7), (64, 33)):
            torch.testing.assert_close(kernel.twice(torch.ones(m, k)), torch.full((m, k), 3.0))
        compared(kernel.scaled_norms, lambda x: x.norm(dim=1), [(8, 20)], 1e-5)
        if compiled:
            made = torch.compile(kernel.scaled_norms, backend="aot_eager", fullgraph=True)
            compared(made, lambda x: x.norm(dim=1), [(8, 20)], 1e-5)
        done += 3
    return done


def check_triton(kernel: Any) -> None:
    """A chip that asks for a later Triton gets no kernel of an older one."""
    package = getattr(kernel, kernel.__all__[-1]).__module__.rpartition(".")[0]
    expect = sys.modules[f"{package}._operators"]._expect_triton
    for chip, release, taken in (
        ("sm_100", "3.6.0", False),
        ("sm_100", "3.7.1", True),
        ("sm_90", "3.6.0", True),
        ("gfx1250", "3.6.0", False),
        ("gfx942", "3.6.0", True),
    ):
        amd = None if chip.startswith("sm_") else "7.0"
        number = 0 if amd else int(chip.removeprefix("sm_"))
        about = SimpleNamespace(major=number // 10, minor=number % 10, gcnArchName=f"{chip}:xnack-")
        expect.cache_clear()
        with (
            mock.patch("torch.cuda.get_device_properties", lambda _, about=about: about),
            mock.patch("torch.version.hip", amd),
            mock.patch("triton.__version__", release),
        ):
            try:
                expect(torch.device("cuda:0"))
            except RuntimeError as error:
                assert not taken and "expected Triton 3.7.1 or later" in str(error), error
            else:
                assert taken


if __name__ == "__main__":
    loaded = (by_path if sys.argv[2] == "path" else by_kernels)(Path(sys.argv[1]))
    check_triton(loaded)
    print(f"{check(loaded, sys.argv[2] == 'kernels')} compared")
