"""torch's internals: all of them are in the torch that is installed, and one file alone names them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from transconv.backend_triton import torch_internals

WITH_CUDA = {"raw_stream", "device_number"}


@pytest.mark.parametrize("name", torch_internals.INTERNALS)
def test_this_torch_has_it(name: str) -> None:
    if name in WITH_CUDA and torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(AttributeError):
            getattr(torch_internals, name)
    else:
        assert getattr(torch_internals, name) is not None


def test_what_is_not_listed_is_not_found() -> None:
    with pytest.raises(AttributeError, match="has no attribute meaning"):
        torch_internals.meaning  # noqa: B018


def test_a_compiler_that_read_its_backends_before_learns_of_this_one() -> None:
    code = ("import torch, torch._dynamo.backends.registry as registry; registry.list_backends(); "
            "registry._BACKENDS.pop('transconv', None); import transconv; "
            "print(registry.lookup_backend('transconv').__module__)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith("transconv.graph")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = ("import sys; from transconv.runtime import torch_internals; "
            "print('torch' in sys.modules, torch_internals.backends(), torch_internals.compiled_code()); "
            "torch_internals.deterministic; print('torch._dynamo' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False {} ()", "False"]
