"""What is drawn lies where it was found, in a colour and under a name that can be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightformer.tasks.detection.coco import encode_mask
from weightformer.tasks.detection.draw import draw_results

CATEGORIES = {3: "Bag", 90: "Ankle boot"}


def record(category: int, x: int, y: int, w: int, h: int, size: tuple[int, int] = (60, 80)) -> dict[str, object]:
    mask = np.zeros(size, np.uint8)
    mask[y : y + h, x : x + w] = 1
    return {"category_id": category, "bbox": [x, y, w, h], "score": 0.75, "segmentation": encode_mask(mask)}


def test_masks_and_boxes_lie_on_their_objects() -> None:
    image = torch.full((1, 60, 80), 100, dtype=torch.uint8)
    picture = draw_results(image, [record(3, 10, 20, 30, 20), record(90, 50, 40, 20, 15)], CATEGORIES)
    pixels = np.asarray(picture).astype(int)
    factor = 7
    assert pixels.shape == (60 * factor, 80 * factor, 3)
    assert (pixels[2, 2] == 100).all(), "what is not found stays as it was"
    first, second = pixels[30 * factor, 25 * factor], pixels[48 * factor, 60 * factor]
    assert np.ptp(first) > 30
    assert np.ptp(second) > 30
    assert np.abs(first - second).max() > 30, "another category, another colour"
    assert (pixels[20 * factor : 40 * factor, 10 * factor + 1] == pixels[30 * factor, 10 * factor + 1]).all()


def test_the_better_of_two_covers_the_other() -> None:
    image = torch.full((1, 60, 80), 100, dtype=torch.uint8)
    best, other = record(3, 10, 20, 30, 20), {**record(90, 20, 20, 40, 20), "score": 0.5}
    pixels = [np.asarray(draw_results(image, found, CATEGORIES))[30 * 7, 30 * 7] for found in ([best], [best, other])]
    assert (pixels[0] == pixels[1]).all()


def test_boxes_at_the_border_are_closed() -> None:
    image = torch.full((1, 60, 80), 100, dtype=torch.uint8)
    pixels = np.asarray(draw_results(image, [record(3, 40, 30, 40, 30)], CATEGORIES))
    for row, column in ((300, -1), (300, -2), (-1, 400), (-2, 400)):  # as thick there as elsewhere
        assert (pixels[row, column] == pixels[300, 40 * 7]).all()


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_of_any_kind(channels: int, dtype: torch.dtype) -> None:
    image = (torch.rand(channels, 60, 80) * 200).to(dtype)
    before = image.clone()
    for results in ([], [record(3, 0, 0, 80, 60)], [record(90, 70, 0, 10, 4)]):
        assert draw_results(image, results, CATEGORIES).mode == "RGB"
    assert torch.equal(image, before)


def test_large_images_keep_their_size() -> None:
    picture = draw_results(torch.zeros(3, 600, 300, dtype=torch.uint8), [record(3, 5, 5, 9, 9, (600, 300))], CATEGORIES)
    assert picture.size == (300, 600)
