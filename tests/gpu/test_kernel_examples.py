"""examples/kernels on a GPU, beside torch. Drawn kernels: `transconv fuzz --kernels 5000`."""

from __future__ import annotations

import pytest

from tests.kernel.test_examples import EXAMPLES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    check(name, "cuda")
