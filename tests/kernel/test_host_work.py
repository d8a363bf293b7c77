"""What a repeated call of a kernel costs the host, counted: functions of Python, and of C."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from transconv.backend_triton import KernelStart
from transconv.kernel import Group, kernel
from transconv.kernel.launch.arguments import tensors_of
from transconv.kernel.launch.declaration import signature
from transconv.runtime import torch_internals
from transconv.target import TARGETS


@kernel
def scaled(group: Any, X: Any, Y: Any, alpha: float) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * alpha)


def test_a_known_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one function of ours from the call to the kinds of its arguments, one that was written
    for it from these to Triton's launch function, and each address is asked for once."""
    monkeypatch.setattr(torch_internals, "current_device", lambda: lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    started: list[tuple[Any, ...]] = []
    x, y = torch.randn(1000), torch.empty(1000)
    args = Group(1000, 256), x, y, 2.0
    asked = scaled.asked(args, {})
    arguments = tensors_of(asked.given)
    made, values = scaled._launches.of(asked, arguments, TARGETS["sm_90"])
    made.step.triton.kept[0, True] = KernelStart(
        lambda *given: started.append(given[13:]),
        SimpleNamespace(function="f", packed_metadata="m"),
        sizes=len(values),
    )
    there: Any = SimpleNamespace(
        kinds=arguments.kinds, tensors=arguments.tensors, device=SimpleNamespace(type="cuda", index=0)
    )
    scaled._launches.remember(signature(args), made.launch(True, values), args, asked, there)
    ours, native = list[str](), list[str]()

    def profile(frame: FrameType, event: str, found: Any) -> None:
        code = frame.f_code
        if event == "call" and (
            frame.f_globals.get("__name__", "").startswith("transconv") or code.co_filename == "<string>"
        ):
            ours.append(code.co_name)
        elif event == "c_call":
            native.append(found.__name__)

    sys.setprofile(profile)
    try:
        scaled(*args)
    finally:
        sys.setprofile(None)
    assert started == [(x.data_ptr(), y.data_ptr(), 2.0, *values.values())]
    assert ours == ["__call__", "__call__", "signature", "__hash__", "run"]
    native.remove("setprofile")
    assert native.count("data_ptr") == 2 and len(native) <= 11, native
