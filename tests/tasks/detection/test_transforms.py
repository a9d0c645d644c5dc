"""Image, masks and boxes move together; what vanishes is left out."""

from __future__ import annotations

import random

import pytest
import torch

from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.detection.data import DataConfig
from weightformer.tasks.detection.transforms import TrainTransform, fitted_size, mask_boxes, resize

PLAIN = Normalize(1, [0.0], [1.0])


def scene() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A grey image 40 x 60 whose two objects are the only bright pixels."""
    masks = torch.zeros(2, 40, 60, dtype=torch.uint8)
    masks[0, 5:25, 10:30] = 1
    masks[1, 30:38, 40:58] = 1
    return (masks[0] * 200 + masks[1] * 250)[None], masks, torch.tensor([3, 1])


def test_fitted_size_keeps_the_shape() -> None:
    assert fitted_size((480, 640), 1024) == (768, 1024)
    assert fitted_size((1333, 800), 1024) == (1024, 615)
    assert fitted_size((3, 1000), 64) == (1, 64)


def test_boxes_enclose_masks() -> None:
    masks = scene()[1]
    torch.testing.assert_close(mask_boxes(masks), torch.tensor([[10.0, 5.0, 30.0, 25.0], [40.0, 30.0, 58.0, 38.0]]))
    assert mask_boxes(torch.zeros(1, 4, 4, dtype=torch.uint8)).tolist() == [[0, 0, 0, 0]]
    assert mask_boxes(torch.zeros(0, 4, 4, dtype=torch.uint8)).shape == (0, 4)


@pytest.mark.parametrize("jitter", [(1.0, 1.0), (0.3, 0.9), (1.2, 2.5), (0.1, 3.0)])
def test_image_masks_and_boxes_agree(jitter: tuple[float, float]) -> None:
    transform = TrainTransform(DataConfig(image_size=64, jitter=jitter, hflip=0.5), PLAIN)
    sizes, counts, checked = set(), set(), 0
    for seed in range(40):
        random.seed(seed)
        image, target = transform(*scene())
        assert max(image.shape[-2:]) <= 64
        sizes.add(tuple(image.shape[-2:]))
        counts.add(len(target["labels"]))
        torch.testing.assert_close(target["boxes"], mask_boxes(target["masks"]))
        assert target["masks"].shape[1:] == image.shape[-2:]
        for mask, label in zip(target["masks"], target["labels"].tolist(), strict=True):
            if min(mask.any(0).sum(), mask.any(1).sum()) > 8:  # of a thin one, antialiasing dims all
                checked += 1
                assert image[0][mask.bool()].median() * 255 == pytest.approx({3: 200, 1: 250}[label], abs=5)
    assert checked > 15
    assert (len(sizes) > 1) == (jitter != (1.0, 1.0))
    assert min(counts) < 2 or jitter[1] < 1.1, "a crop must be able to cut an object off"


def test_flip_probability() -> None:
    image, masks, labels = scene()
    for hflip in (0.0, 1.0):
        flipped, target = TrainTransform(DataConfig(image_size=60, hflip=hflip), PLAIN)(image, masks, labels)
        expected = image.flip(-1) if hflip else image
        torch.testing.assert_close(flipped, expected / 255)
        assert target["boxes"][0, 0] == (30 if hflip else 10)


def test_objects_of_a_pixel_are_left_out() -> None:
    image, masks, labels = scene()
    masks[1] = 0
    masks[1, 7, 3:20] = 1  # one pixel high
    target = TrainTransform(DataConfig(image_size=60), PLAIN)(image, masks, labels)[1]
    assert target["labels"].tolist() == [3]
    empty = TrainTransform(DataConfig(image_size=60), PLAIN)(image, masks[:0], labels[:0])[1]
    assert (empty["boxes"].shape, empty["masks"].shape) == ((0, 4), (0, 40, 60))


def test_resize_leaves_the_right_size_alone() -> None:
    image = torch.randint(0, 255, (3, 20, 30), dtype=torch.uint8)
    assert resize(image, (20, 30)) is image
    assert resize(image, (10, 15)).shape == (3, 10, 15)
