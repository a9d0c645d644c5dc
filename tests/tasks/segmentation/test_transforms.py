"""Image and mask move together; crops keep their size and their variety; colours change as they should."""

from __future__ import annotations

import random

import pytest
import torch

from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.segmentation.data import DataConfig
from weightformer.tasks.segmentation.transforms import TrainTransform, photometric_distortion, resize, scaled_size

PLAIN = {"short_side": 0, "scale": (1.0, 1.0), "hflip": 0.0, "photometric": False, "cat_max_ratio": 1.0}


def build(**options: object) -> TrainTransform:
    return TrainTransform(DataConfig(**{**PLAIN, **options}), Normalize(1, [0.0], [1.0]))


@pytest.fixture(autouse=True)
def _python_seed() -> None:
    random.seed(0)


def blocks(height: int, width: int) -> torch.Tensor:
    """A mask of 8 x 8 squares, each its own class."""
    rows, columns = torch.arange(height) // 8, torch.arange(width) // 8
    return (rows[:, None] * (-(-width // 8)) + columns).to(torch.uint8)


@pytest.mark.parametrize("size", [(32, 32), (33, 70), (20, 90), (7, 5)])
@pytest.mark.parametrize("scale", [(0.5, 2.0), (1.0, 1.0)])
def test_image_and_mask_stay_together_at_any_size(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """An image whose pixels are its mask's labels shows wherever the two part."""
    mask = blocks(*size)
    transform = build(crop_size=32, scale=scale, hflip=0.5)
    for _ in range(10):
        image, labels = transform(mask[None], mask)
        assert image.shape == (1, 32, 32)
        assert labels.shape == (32, 32)
        assert labels.dtype == torch.int64
        valid = labels != 255
        if scale == (1.0, 1.0):
            assert torch.equal((image[0] * 255).round().long()[valid], labels[valid])
        else:  # where classes meet, the image is interpolated and the mask is not
            assert ((image[0] * 255 - labels).abs()[valid] < 0.6).float().mean() > 0.5
        assert (image[0][~valid] == 0).all()
        assert valid.any()


def test_padding_is_at_the_right_and_bottom() -> None:
    image, labels = build(crop_size=12)(
        torch.full((1, 5, 9), 51, dtype=torch.uint8), torch.ones(5, 9, dtype=torch.uint8)
    )
    assert (labels[:5, :9] == 1).all()
    assert (labels != 255).sum() == 45
    assert image[0, :5, :9].unique().tolist() == pytest.approx([0.2])


def test_every_option_changes_the_result() -> None:
    mask = blocks(48, 64)
    image = (torch.arange(48 * 64) % 251).view(1, 48, 64).to(torch.uint8)

    def outcome(**options: object) -> tuple[object, ...]:
        random.seed(3)
        images, labels = build(**{"crop_size": 24, **options})(image, mask)
        return images.flatten().tolist(), labels.flatten().tolist()

    base = outcome()
    changed = {"crop_size": 16, "short_side": 30, "scale": (0.5, 0.6), "hflip": 1.0, "photometric": True}
    for name, value in changed.items():
        assert outcome(**{name: value}) != base, name
    assert outcome() == base


def test_crops_full_of_one_class_are_drawn_again() -> None:
    mask = torch.zeros(64, 256, dtype=torch.uint8)
    mask[:, :32] = 1
    image = mask[None]

    def share_with_both(ratio: float) -> float:
        transform = build(crop_size=32, cat_max_ratio=ratio)
        crops = [transform(image, mask)[1] for _ in range(100)]
        return sum(len(crop.unique()) == 2 for crop in crops) / 100

    assert share_with_both(1.0) < 0.3
    assert share_with_both(0.75) > 0.45


def test_ignored_pixels_do_not_count_as_a_class() -> None:
    mask = torch.full((40, 200), 255, dtype=torch.uint8)
    mask[:, :20] = 0
    mask[:, 20:40] = 1
    transform = build(crop_size=40, cat_max_ratio=0.75)
    found = sum((transform(mask[None], mask)[1] != 255).any().item() for _ in range(50))
    assert found > 30, "crops without any label are drawn again as well"


def test_a_mask_without_labels_does_not_hang() -> None:
    mask = torch.full((40, 40), 255, dtype=torch.uint8)
    assert (build(crop_size=32, cat_max_ratio=0.75)(mask[None], mask)[1] == 255).all()


def test_scaled_size() -> None:
    assert scaled_size(683, 512, 512) == (683, 512)
    assert scaled_size(1366, 1024, 512) == (683, 512)
    assert scaled_size(256, 300, 512) == (512, 600)
    assert scaled_size(100, 800, 512) == (256, 2048)
    assert scaled_size(1, 4000, 512) == (1, 2048)
    assert scaled_size(1366, 1024, 512, 0.5) == (342, 256)
    assert scaled_size(20, 90, 0) == (20, 90)
    assert scaled_size(20, 90, 0, 1.5) == (30, 135)


def test_resize_is_antialiased_and_leaves_equal_sizes_alone() -> None:
    stripes = (torch.arange(64) % 2 * 255).to(torch.uint8).expand(1, 64, 64)
    assert resize(stripes, (64, 64)) is stripes
    assert resize(stripes, (16, 16)).float().std() < 10


@pytest.mark.parametrize("channels", [1, 3])
def test_photometric_distortion(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 16, 16), dtype=torch.uint8)
    outcomes = [photometric_distortion(image) for _ in range(60)]
    assert all(x.dtype == torch.uint8 and x.shape == image.shape for x in outcomes)
    unchanged = sum(torch.equal(x, image) for x in outcomes)
    assert 0 < unchanged < 40
    grey = torch.full((channels, 4, 4), 100, dtype=torch.uint8)
    values = torch.stack([photometric_distortion(grey) for _ in range(300)])
    assert values.min() < 60
    assert values.max() > 150
    assert (values.flatten(2).max(2).values == values.flatten(2).min(2).values).all()
