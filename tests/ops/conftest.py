"""While op tests run, new memory holds NaN and nondeterministic kernels raise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from weightformer.ops import products

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode needs it on a GPU


@pytest.fixture(autouse=True)
def _strict_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch.empty would hold leftovers"
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _a_call_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test sizes are small: without this the loops over images would never run. `test_products` runs both."""
    monkeypatch.setattr(products, "_SMALL", 0)
