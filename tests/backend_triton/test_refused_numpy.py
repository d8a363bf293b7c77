"""A NumPy that Triton's interpreter cannot run with gives an error of one line."""

from __future__ import annotations

import pytest

from transconv.backend_triton.launch import interpreter
from transconv.errors import Unsupported


@pytest.mark.parametrize(
    ("numpy", "triton", "told"),
    [
        ("2.4.0", "3.6.0", True),
        ("3.0", "3.6.0", True),
        ("2.3.5", "3.6.0", False),
        ("2.4.1", "3.9.0", False),
    ],
)
def test_a_numpy_that_is_too_new_is_told(
    monkeypatch: pytest.MonkeyPatch, numpy: str, triton: str, told: bool
) -> None:
    """Kernels that run are let run, and errors of other pairs are left alone."""
    monkeypatch.setattr(interpreter, "version", {"numpy": numpy, "triton": triton}.get)
    with interpreter.explained():
        pass
    with pytest.raises(Unsupported if told else TypeError) as raised, interpreter.explained():
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
    assert ("pip install 'numpy<2.4'" in str(raised.value)) == told
    assert "\n" not in str(raised.value)
