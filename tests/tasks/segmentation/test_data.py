"""Batches from files in ADE20K's layout: pairs, orders, workers, processes, and files with faults."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification.images import ImageReadError
from weightformer.tasks.segmentation.data import DataConfig, SegmentationData, find_pairs

OPTIONS: dict[str, Any] = {
    "crop_size": 32, "batch_size": 8, "short_side": 0, "scale": (0.8, 1.25), "photometric": False, "val_batch_size": 4,
}  # fmt: skip


def build(root: Path, seed: int = 0, in_chans: int = 1, **options: Any) -> SegmentationData:
    shares = {name: options.pop(name) for name in ("rank", "world_size", "class_names") if name in options}
    config = DataConfig(root=str(root), **{**OPTIONS, **options})
    return SegmentationData(config, in_chans=in_chans, mean=[0.5] * in_chans, std=[0.5] * in_chans, seed=seed, **shares)


@pytest.fixture
def broken(scenes: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the scenes with another file in place of one of theirs."""

    def make(name: str, content: Any) -> Path:
        root = tmp_path / "broken"
        shutil.copytree(scenes, root)
        path = root / name
        path.write_bytes(content) if isinstance(content, bytes) else content.save(path)
        return root

    return make


def first_error(data: SegmentationData) -> str:
    with pytest.raises(ImageReadError) as caught:
        for _ in data.val_loader():
            pass
    return str(caught.value)


def test_training_batches(scenes: Path) -> None:
    data = build(scenes)
    loader = data.train_loader()
    batches = list(loader)
    assert len(batches) == len(loader) == 15
    for images, labels in batches:
        assert images.shape == (8, 1, 32, 32)
        assert labels.shape == (8, 32, 32)
    assert set(torch.stack([labels for _, labels in batches]).unique().tolist()) == {0, 1, 2, 3, 255}
    assert data.class_names == ["backdrop", "zero", "one", "four"]


def test_evaluation_keeps_the_masks_as_they_are(scenes: Path) -> None:
    items = [item for batch in build(scenes, short_side=40).val_loader() for item in batch]
    assert len(items) == 21
    assert {tuple(image.shape[1:]) for image, _ in items} == {(40, 40), (40, 58), (58, 40)}
    for (_, labels), (_, path) in zip(items, find_pairs(scenes, "validation"), strict=True):
        values = np.asarray(Image.open(path)).astype(int)
        assert np.array_equal(labels, np.where(values == 0, 255, values - 1))


def test_the_order_and_the_crops_depend_on_seed_and_epoch_alone(scenes: Path) -> None:
    def epoch(number: int, **options: Any) -> torch.Tensor:
        loader = build(scenes, **options).train_loader()
        loader.sampler.set_epoch(number)
        return torch.cat([images for images, _ in loader])

    first = epoch(0)
    assert torch.equal(first, epoch(0))
    assert torch.equal(first, epoch(0, num_workers=2))
    for other in (epoch(1), epoch(0, seed=1)):
        assert not torch.equal(first, other)
    halves = [epoch(0, rank=rank, world_size=2, batch_size=4) for rank in (0, 1)]
    assert torch.equal(torch.stack(halves, 1).flatten(0, 1), first)


@pytest.mark.parametrize("world_size", [1, 2, 4, 30])
def test_evaluation_serves_every_image_once_on_any_number_of_processes(scenes: Path, world_size: int) -> None:
    loaders = [build(scenes, rank=rank, world_size=world_size).val_loader() for rank in range(world_size)]
    served = [[len(batch) for batch in loader] for loader in loaders]
    assert sum(map(sum, served)) == 21
    assert len(set(map(len, served))) == 1, "every process takes part in as many steps"


def test_an_interrupted_epoch_goes_on_where_it_was(scenes: Path) -> None:
    straight = list(build(scenes).train_loader())
    loader = build(scenes).train_loader()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    resumed = build(scenes).train_loader()
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert len(rest) == 9
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(rest, straight[6:], strict=True))


def test_three_channels_and_distortion(scenes: Path) -> None:
    images, _ = next(iter(build(scenes, in_chans=3, photometric=True).train_loader()))
    assert images.shape == (8, 3, 32, 32)
    with pytest.raises(ValueError, match=r"data\.photometric works on grey or RGB images, not on 5 channels"):
        build(scenes, in_chans=5, photometric=True)


def exif_turned(image: Image.Image, path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def test_images_turned_by_exif_fit_their_masks(scenes: Path, tmp_path: Path) -> None:
    root = tmp_path / "turned"
    shutil.copytree(scenes, root)
    path = root / "images" / "validation" / "012.png"
    exif_turned(Image.open(path), path)
    assert Image.open(path).size == (51, 74), "stored on its side"
    pairs = [[item for batch in build(r).val_loader() for item in batch][12] for r in (scenes, root)]
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][1], pairs[1][1])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("images/validation/003.png", b"no image", r"images/validation/003\.png"),
        ("annotations/validation/003.png", b"", r"annotations/validation/003\.png"),
        ("annotations/validation/003.png", Image.new("RGB", (48, 48)), r"003\.png is a colour image"),
        ("annotations/validation/003.png", Image.new("L", (48, 48), 9), r"003\.png holds 9: with 4 classes"),
        ("annotations/validation/003.png", Image.new("L", (47, 48), 1),
         r"images/validation/003\.png is 48 x 48 px \(upright\), its mask .*annotations/validation/003\.png 48 x 47"),
        ("images/validation/003.png", Image.new("L", (400, 500)), "more than data.max_pixels"),
    ],
    ids=["no image", "empty mask", "colours", "out of range", "sizes", "large"],
)  # fmt: skip
def test_faults_are_named(broken: Callable[..., Path], name: str, content: Any, sentence: str) -> None:
    root = broken(name, content)
    error = first_error(build(root, max_pixels=100_000))
    assert re.search(sentence, error), error
    assert "data.on_bad_image: skip" in error
    data = build(root, max_pixels=100_000, on_bad_image="skip")
    with pytest.warns(UserWarning, match="passed over"):
        assert sum(len(batch) for batch in data.val_loader()) == 20
    assert [Path(path).name for path in data.skipped] == ["003.png"]


def test_training_takes_the_next_pair_in_place_of_a_bad_one(broken: Callable[..., Path], scenes: Path) -> None:
    data = build(broken("annotations/training/007.png", b"no mask"), on_bad_image="skip", num_workers=1)
    with_bad = list(data.train_loader())
    assert [Path(path).name for path in data.skipped] == ["007.png"]
    clean = list(build(scenes).train_loader())
    assert len(with_bad) == len(clean) == 15
    same = [torch.equal(a[0][i], b[0][i]) for a, b in zip(with_bad, clean, strict=True) for i in range(8)]
    assert same.count(False) == 1


def black_and_white(root: Path) -> None:
    for path in root.glob("annotations/*/*.png"):
        values = np.asarray(Image.open(path))
        Image.fromarray(np.where(values > 1, 255, 0).astype(np.uint8)).save(path)


@pytest.mark.parametrize("reduce_zero_label", [True, False])
def test_black_and_white_masks_are_refused(scenes: Path, tmp_path: Path, reduce_zero_label: bool) -> None:
    root = tmp_path / "binary"
    shutil.copytree(scenes, root)
    black_and_white(root)
    (root / "classes.txt").write_text("backdrop\nitem\n")
    error = first_error(build(root, reduce_zero_label=reduce_zero_label))
    assert re.search(r"mask .*000\.png holds 0 and 255 alone, and so do the others", error)


def test_one_mask_of_the_first_class_and_ignored_pixels_is_fine(broken: Callable[..., Path]) -> None:
    mask = Image.new("L", (48, 48), 0)
    mask.paste(255, (0, 0, 10, 10))
    data = build(broken("annotations/validation/003.png", mask), reduce_zero_label=False)
    Path(data.config.root, "classes.txt").write_text("a\nb\nc\nd\ne\n")
    data = build(Path(data.config.root), reduce_zero_label=False)
    assert sum(len(batch) for batch in data.val_loader()) == 21


def test_missing_folders_and_masks(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="names no classes"):
        build(tmp_path)
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    (root / "annotations" / "training" / "005.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 120 images under .*training have no mask .*005\.png"):
        build(root).train_loader()
    (root / "images" / "validation" / "002.png").unlink()
    with pytest.warns(UserWarning, match=r"1 mask\(s\) have no image .*002\.png"):
        assert len(build(root).val_loader()) == 5
    shutil.rmtree(root / "images" / "validation")
    with pytest.raises(FileNotFoundError, match=r"no folder .*images/validation; data\.root must hold"):
        build(root).val_loader()
    (root / "images" / "validation").mkdir()
    with pytest.raises(FileNotFoundError, match="no images under"):
        build(root).val_loader()


def test_the_classes_of_the_model_must_be_those_of_the_data(scenes: Path) -> None:
    build(scenes, class_names=["backdrop", "zero", "one", "four"])
    with pytest.raises(ValueError, match=r"\(backdrop, zero, one, four\) are not those of the model \(backdrop, one\)"):
        build(scenes, class_names=["backdrop", "one"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"crop_size": 0}, "crop_size"), ({"batch_size": 0}, "batch_size"), ({"short_side": -1}, "short_side"),
        ({"scale": (0, 1)}, "scale"), ({"scale": (2, 1)}, "scale"), ({"cat_max_ratio": 0}, "cat_max_ratio"),
        ({"hflip": 2}, "hflip"),
    ],
)  # fmt: skip
def test_values_out_of_range(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{name}"):
        DataConfig(**options)
