"""Sums over regions are those of the untiled pooling, whatever the rows come in, and count beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from weightformer import ops
from weightformer.streaming.passes import region_areas, region_sums


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(("height", "width"), [(3, 3), (7, 9), (20, 11), (2, 5), (1, 1)])
def test_sums_of_parts_are_the_means_of_the_whole(height: int, width: int, size: int) -> None:
    x = torch.randn(2, height, width, 4, dtype=torch.float64)
    for rows in (1, 2, 5):
        total = torch.zeros(2, size, size, 4, dtype=torch.float64)
        for row in range(0, height, rows):
            total += region_sums(x[:, row : row + rows], row, height, total.dtype, size)
        means = total / region_areas(height, width, total, size)
        assert (means - ops.region_mean(x, size)).abs().max() < 1e-12


def test_a_grid_of_more_tokens_than_32_bits_count() -> None:
    """3,000,001 x 2,000,003 tokens, 48 by 32 megapixels a side with a patch of 16."""
    height, width = 3_000_001, 2_000_003
    areas = region_areas(height, width, torch.zeros(1, dtype=torch.float64))[..., 0]
    for i in range(3):
        for j in range(3):
            rows = -(-(i + 1) * height // 3) - i * height // 3
            columns = -(-(j + 1) * width // 3) - j * width // 3
            assert int(areas[i, j]) == rows * columns > 2**31
    far = region_sums(torch.ones(1, 2, 5, 1), height - 2, height, torch.float64)
    assert far[0, :, :, 0].sum(1).tolist() == [0, 0, 2 * 7]  # five columns lie in regions of 2, 3 and 2
