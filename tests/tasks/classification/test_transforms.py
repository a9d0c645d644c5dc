"""Framing, augmentation and normalisation, against PIL and against what each option promises."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from weightformer.tasks.classification.data import DataConfig
from weightformer.tasks.classification.transforms import (
    BatchAugmentation,
    Normalize,
    eval_framing,
    eval_transform,
    train_framing,
)
from weightformer.training.loader import Key, item_rng

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(width: int = 50, height: int = 40, mode: str = "RGB") -> Image.Image:
    array = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(array).convert(mode)


def framed(steps: list[Any], image: Image.Image) -> np.ndarray:
    return np.asarray(v2.Compose(steps)(image))


def crop_centre(image: Image.Image, size: int) -> Image.Image:
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return image.crop((left, top, left + size, top + size))


# Evaluation


@pytest.mark.parametrize(("size", "crop_pct", "resized"), [(28, 0.875, 32), (28, 1.0, 28), (30, 0.9, 33)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
def test_squash_resizes_to_a_square(size: int, crop_pct: float, resized: int, interpolation: Any) -> None:
    config = DataConfig(image_size=size, crop_pct=crop_pct, interpolation=interpolation)
    expected = crop_centre(picture().resize((resized, resized), Image.Resampling[interpolation.upper()]), size)
    assert np.array_equal(framed(eval_framing(config), picture()), np.asarray(expected))


@pytest.mark.parametrize(("width", "height", "resized"), [(50, 40, (40, 32)), (40, 50, (32, 40))])
def test_center_keeps_the_shape(width: int, height: int, resized: tuple[int, int]) -> None:
    config = DataConfig(image_size=28, crop_mode="center")
    expected = crop_centre(picture(width, height).resize(resized, Image.Resampling.BICUBIC), 28)
    assert np.array_equal(framed(eval_framing(config), picture(width, height)), np.asarray(expected))


def test_eval_transform_frames_and_normalises() -> None:
    config = DataConfig(image_size=28)
    result = eval_transform(config, 3, MEAN, STD)(picture())
    expected = (framed(eval_framing(config), picture()) / 255 - MEAN) / STD
    assert type(result) is torch.Tensor
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected.transpose(2, 0, 1), atol=1e-6)
    assert eval_transform(config, 1, [0.5], [0.5])(picture(mode="L")).shape == (1, 28, 28)


def test_eval_transform_takes_arrays_of_any_channels() -> None:
    image = torch.rand(13, 40, 50)
    result = eval_transform(DataConfig(image_size=28, crop_pct=1), 13, [0.5] * 13, [0.25] * 13)(image)
    resized = torch.nn.functional.interpolate(image[None], (28, 28), mode="bicubic", antialias=True)[0]
    torch.testing.assert_close(result, (resized - 0.5) / 0.25)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.5] * 3), ([0.5] * 3, [0.5] * 4)])
def test_statistics_of_another_length_are_refused(mean: list[float], std: list[float]) -> None:
    with pytest.raises(ValueError, match=r"has [14] values for 3 input channels"):
        eval_transform(DataConfig(), 3, mean, std)


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_a_std_that_is_not_positive_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="std must be positive"):
        Normalize(1, [0.5], [std])


# Training: one image


def augmented(config: DataConfig, key: Key = (0, 0), image: Image.Image | None = None, in_chans: int = 3) -> np.ndarray:
    with item_rng(0, *key):
        return framed(train_framing(config, in_chans, MEAN[:in_chans]), image or picture())


def test_without_a_random_crop_training_frames_as_evaluation() -> None:
    config = DataConfig(image_size=28)
    assert np.array_equal(augmented(config), framed(eval_framing(config), picture()))


def test_random_resized_crop_keeps_to_scale_and_ratio() -> None:
    """A crop of 1/4 of a ramp in x and y spans 1/4 of its values."""
    ramp = np.zeros((64, 64, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(64) * 4, np.arange(64)[:, None] * 4
    for ratio, spans in (((1, 1), (128, 128)), ((4, 4), (252, 64))):
        config = DataConfig(image_size=32, scale=(0.25, 0.25), ratio=ratio)
        results = [augmented(config, (0, i), Image.fromarray(ramp)) for i in range(8)]
        for result in results:
            assert result.shape == (32, 32, 3)
            span = [int(np.ptp(result[..., channel])) for channel in (0, 1)]
            np.testing.assert_allclose(span, spans, atol=8)
        assert len({result.tobytes() for result in results}) > 4


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("notation", ["rand-m9-mstd0.5-inc1", "rand-m10-n3-p1.0-inc1", "rand-m7-mmax12", "rand"])
def test_rand_augment_runs_on_any_image(mode: str, notation: str) -> None:
    config = DataConfig(image_size=28, rand_augment=notation)
    image = picture(mode=mode)
    plain = framed(eval_framing(config), image)
    framing = v2.Compose(train_framing(config, len(image.getbands()), MEAN[: len(image.getbands())]))
    changed = 0
    for index in range(150):  # some draw posterisation to no bits at all
        with item_rng(0, 0, index):
            result = framing(image)
        assert result.mode == mode
        assert result.size == (28, 28)
        changed += not np.array_equal(np.asarray(result), plain)
    assert changed > 75


def test_rand_augment_reads_its_options() -> None:
    def run(**options: Any) -> bytes:
        config = DataConfig(image_size=28, crop_pct=1, **{"rand_augment": "rand-m9-p1.0", **options})
        return b"".join(augmented(config, (0, i), picture(28, 28)).tobytes() for i in range(20))  # resized by nothing

    assert run() == run()
    others = [run(rand_augment="rand-m3-p1.0"), run(rand_augment="rand-m9-p0.5"), run(interpolation="nearest")]
    assert len({run(), *others}) == 4


def test_posterisation_agrees_with_pil_and_goes_down_to_black() -> None:
    config = DataConfig(image_size=28, rand_augment="rand-m9-inc1")
    (augment,) = train_framing(config, 3, MEAN)[2:]
    (posterize,) = [op.aug_fn for op in augment.ops if op.name.startswith("Posterize")]
    for bits in range(1, 9):
        assert np.array_equal(posterize(picture(), bits), ImageOps.posterize(picture(), bits))
    assert np.asarray(posterize(picture(), 0)).max() == 0


def test_rand_augment_needs_a_picture() -> None:
    with pytest.raises(ValueError, match=r"data\.rand_augment works on grey or RGB images, not on 4 channels"):
        train_framing(DataConfig(rand_augment="rand-m9"), 4, [0.5] * 4)


# Training: a batch


def batch_of(num_items: int, size: int = 12, channels: int = 2) -> torch.Tensor:
    return torch.randint(1, 256, (num_items, channels, size, size), dtype=torch.uint8)


def shifted_and_flipped(image: torch.Tensor, top: int, left: int, pad: int, flip: bool) -> torch.Tensor:
    size = image.shape[-1]
    padded = torch.zeros(image.shape[0], size + 2 * pad, size + 2 * pad, dtype=image.dtype)
    padded[:, pad : pad + size, pad : pad + size] = image
    cut = padded[:, top : top + size, left : left + size]
    return cut.flip(-1) if flip else cut


def test_shifts_and_flips_are_all_drawn_and_nothing_else() -> None:
    images = batch_of(300)
    augmentation = BatchAugmentation(DataConfig(pad_crop=2, hflip=0.25), seed=0, num_items=300)
    results = augmentation.shift_and_flip(images, [(0, i) for i in range(300)])
    choices = [(top, left, flip) for top in range(5) for left in range(5) for flip in (False, True)]
    drawn = []
    for image, result in zip(images, results, strict=True):
        drawn += [c for c in choices if torch.equal(shifted_and_flipped(image, c[0], c[1], 2, c[2]), result)]
    assert len(drawn) == 300
    assert {(top, left) for top, left, _ in drawn} == {(top, left) for top in range(5) for left in range(5)}
    assert 45 <= sum(flip for *_, flip in drawn) <= 105  # five standard deviations about 75


def test_an_item_is_varied_alike_in_any_batch() -> None:
    images = batch_of(20)
    config = DataConfig(pad_crop=3, hflip=0.5, erasing=0.5)

    def vary(indices: list[int], epoch: int = 0, seed: int = 0) -> torch.Tensor:
        augmentation = BatchAugmentation(config, seed=seed, num_items=20)
        keys = [(epoch, i) for i in indices]
        varied = augmentation.shift_and_flip(images[indices], keys)
        return augmentation.erase(varied.float(), keys)

    whole = vary(list(range(20)))
    order = torch.randperm(20).tolist()
    assert torch.equal(torch.cat([vary(order[:7]), vary(order[7:])]), whole[order])
    for other in (vary(list(range(20)), epoch=1), vary(list(range(20)), seed=1)):
        assert sum(torch.equal(a, b) for a, b in zip(whole, other, strict=True)) < 5


def test_epochs_may_alternate() -> None:
    images, keys = batch_of(8), [[(epoch, i) for i in range(8)] for epoch in (0, 1)]
    augmentation = BatchAugmentation(DataConfig(pad_crop=2), seed=0, num_items=8)
    first = augmentation.shift_and_flip(images, keys[0])
    second = augmentation.shift_and_flip(images, keys[1])
    assert not torch.equal(first, second)
    assert torch.equal(augmentation.shift_and_flip(images, keys[0]), first)


def test_erasing_replaces_one_rectangle_by_noise() -> None:
    augmentation = BatchAugmentation(DataConfig(erasing=0.5), seed=0, num_items=200)
    images = augmentation.erase(torch.full((200, 3, 32, 32), 9.0), [(0, i) for i in range(200)])
    erased = (images != 9).any(1)
    share = erased.float().mean((1, 2))
    assert 65 <= (share > 0).sum() <= 135
    assert share.max() < 0.36
    for mask in erased[share > 0]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        assert mask.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
    noise = images[images != 9]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


def test_erasing_draws_from_another_stream_than_the_framing() -> None:
    """Were it the same, what is erased would follow from the framing's first number."""
    augmentation = BatchAugmentation(DataConfig(erasing=0.5), seed=0, num_items=64)
    images = augmentation.erase(torch.zeros(64, 1, 32, 32), [(0, i) for i in range(64)])
    first = []
    for i in range(64):
        with item_rng(0, 0, i):
            first.append(random.random() <= 0.5)
    assert images.flatten(1).any(1).tolist() != first


def test_nothing_asked_for_changes_nothing() -> None:
    images = batch_of(4)
    augmentation = BatchAugmentation(DataConfig(), seed=0, num_items=4)
    keys = [(0, i) for i in range(4)]
    assert torch.equal(augmentation.erase(augmentation.shift_and_flip(images, keys), keys), images)
    assert augmentation.shift_and_flip(images[:0], []).shape == (0, 2, 12, 12)
