"""COCO's files as batches: upright images, labels in step, errors that name the image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification.images import ImageReadError
from weightformer.tasks.detection.data import DataConfig, DetectionData

CocoFile = Callable[..., Path]


def open_data(root: Path, categories: dict[int, str] | None = None, **changes: Any) -> DetectionData:
    config = DataConfig(root=str(root), **{"image_size": 30, **changes})
    return DetectionData(config, in_chans=1, mean=[0.0], std=[1.0], seed=0, categories=categories)


def annotation(number: int, **changes: Any) -> dict[str, Any]:
    outline = [4, 5, 12, 5, 12, 11, 4, 11]
    return {"id": number, "image_id": 1, "category_id": 7, "bbox": [4, 5, 8, 6], "segmentation": [outline], **changes}


def first_batch(data: DetectionData) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    return next(iter(data.train_loader()))


def test_labels_follow_the_sorted_ids_and_crowds_are_left_out(coco_file: CocoFile) -> None:
    crowd = annotation(3, iscrowd=1, segmentation={"size": [20, 30], "counts": [0, 600]})
    path = coco_file(
        [annotation(1, category_id=90), crowd, annotation(2, category_id=3)], categories=[90, 3, 7], images=1
    )
    images, targets = first_batch(open_data(path.parent.parent))
    assert images[0].shape == (1, 20, 30)
    assert targets[0]["labels"].tolist() == [3, 1]
    assert targets[0]["masks"].sum((1, 2)).tolist() == [48, 48]
    torch.testing.assert_close(targets[0]["boxes"][0], torch.tensor([4.0, 5.0, 12.0, 11.0]))
    assert (targets[0]["image_id"], targets[0]["size"]) == (1, (20, 30))


def test_images_without_objects_are_kept(coco_file: CocoFile) -> None:
    data = open_data(coco_file([annotation(1)]).parent.parent, batch_size=2)
    _, targets = first_batch(data)
    assert sorted(len(target["labels"]) for target in targets) == [0, 1]
    assert sum(len(images) for images, _ in data.val_loader()) == 2


def test_a_rotated_photograph(coco_file: CocoFile) -> None:
    """Orientation 6: stored 30 x 20, shown 20 x 30. The file's numbers are those of the image as shown."""
    root = coco_file([annotation(1)], images=1).parent.parent
    shown = np.zeros((20, 30), np.uint8)
    shown[5:11, 4:12] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(shown).copy()).save(root / "train2017" / "1.png", exif=exif)
    images, targets = first_batch(open_data(root))
    assert images[0][0][targets[0]["masks"][0].bool()].min() == 1
    assert images[0].sum() == 48
    Image.fromarray(np.rot90(shown).copy()).save(root / "train2017" / "1.png")
    with pytest.raises(ValueError, match=r"image 1 \(.*1\.png\) has 30 x 20 px, its annotations are for 20 x 30"):
        first_batch(open_data(root))


def test_errors_name_the_file(coco_file: CocoFile) -> None:
    root = coco_file([annotation(1)], images=1).parent.parent
    with pytest.raises(ImageReadError, match=r"1\.png: it has 600 pixels, more than data.max_pixels \(500\)"):
        first_batch(open_data(root, max_pixels=500))
    (root / "train2017" / "1.png").write_bytes(b"no image")
    with pytest.raises(ImageReadError, match=r"1\.png"):
        first_batch(open_data(root))
    (root / "train2017" / "1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1\.png"):
        first_batch(open_data(root))
    with pytest.raises(ImageReadError, match=r"1\.png"):
        next(iter(open_data(root, num_workers=1, max_pixels=500).val_loader()))


@pytest.mark.parametrize("workers", [0, 1])
def test_images_that_cannot_be_read_are_passed_over_where_asked(coco_file: CocoFile, workers: int) -> None:
    """One damaged, one of another size than its annotations: training takes the next, evaluation goes without."""
    root = coco_file([annotation(1)], images=4).parent.parent
    for split in ("train2017", "val2017"):
        (root / split / "2.png").write_bytes(b"no image")
        Image.new("L", (30, 21)).save(root / split / "3.png")
    with pytest.raises(ImageReadError, match=r"2\.png.*data\.on_bad_image: skip"):
        list(open_data(root).val_loader())
    data = open_data(root, on_bad_image="skip", batch_size=2, num_workers=workers)
    seen = [sorted(t["image_id"] for _, targets in loader for t in targets)
            for loader in (data.train_loader(), data.val_loader())]  # fmt: skip
    assert seen == [[1, 4, 4, 4], [1, 4]]
    assert [Path(path).name for path in data.skipped] == ["2.png", "3.png"] * 2
    for number in (1, 4):
        (root / "train2017" / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(ImageReadError, match="none of the 4 training images can be read"):
        list(open_data(root, on_bad_image="skip").train_loader())


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(coco_file: CocoFile, orientation: int) -> None:
    root = coco_file([annotation(1)], images=1).parent.parent
    shown = np.zeros((20, 30), np.uint8)
    shown[5:11, 4:12] = 255
    stored = {1: shown, 2: shown[:, ::-1], 3: shown[::-1, ::-1], 4: shown[::-1], 5: shown.T, 6: np.rot90(shown),
              7: shown[::-1, ::-1].T, 8: np.rot90(shown, -1)}[orientation]  # fmt: skip
    for split in ("train2017", "val2017"):
        Image.fromarray(stored.copy()).save(root / split / "1.png", exif=exif_of(orientation))
    data = open_data(root)
    (image,), (target,) = first_batch(data)
    assert image[0][target["masks"][0].bool()].min() == 1
    assert image.sum() == 48
    (image,), _ = next(iter(data.val_loader()))
    torch.testing.assert_close(image[0], torch.from_numpy(shown) / 255)


def test_missing_folders_are_named(coco_file: CocoFile) -> None:
    root = coco_file([annotation(1)]).parent.parent
    with pytest.raises(FileNotFoundError, match=r"elsewhere \(data.root and data.train_images\)"):
        open_data(root, train_images="elsewhere")
    with pytest.raises(FileNotFoundError, match=r"no annotation file .*other\.json"):
        open_data(root, val_annotations="other.json")
    with pytest.raises(ValueError, match=r"data\.root is needed"):
        DetectionData(DataConfig(), in_chans=1, mean=[0.0], std=[1.0], seed=0)


def test_categories_must_agree(coco_file: CocoFile) -> None:
    root = coco_file([annotation(1)]).parent.parent
    with pytest.raises(ValueError, match=r"instances_val2017.json are not those of the model.* \[90, 91\]"):
        open_data(root, categories={3: "kind 3", 7: "kind 7", 91: "kind 90"})
    file = root / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "another"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"differ in the ids or names of \[3\]"):
        open_data(root)


def test_evaluation_shares_every_image_among_processes(coco_file: CocoFile) -> None:
    root = coco_file([annotation(1)], images=5).parent.parent
    config = DataConfig(root=str(root), image_size=30, batch_size=2)
    seen, batches = [], []
    for rank in range(2):
        data = DetectionData(config, in_chans=1, mean=[0.0], std=[1.0], seed=0, rank=rank, world_size=2)
        loaded = list(data.val_loader())
        seen += [known["image_id"] for _, records in loaded for known in records]
        batches.append(len(loaded))
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert batches[0] == batches[1]


def test_augmentation_repeats_and_differs_between_epochs(scenes: Path) -> None:
    data = open_data(scenes, jitter=(0.5, 2.0), hflip=0.5, image_size=64, batch_size=4, num_workers=2)
    epochs = []
    for loader, epoch in ((data.train_loader(), 0), (data.train_loader(), 0), (data.train_loader(), 1)):
        loader.sampler.set_epoch(epoch)
        epochs.append(
            {t["image_id"]: image for images, targets in loader for image, t in zip(images, targets, strict=True)}
        )
    first, again, other = epochs
    assert all(torch.equal(image, again[number]) for number, image in first.items())
    assert any(image.shape != other[n].shape or not torch.equal(image, other[n]) for n, image in first.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"jitter": (2.0, 1.0)}, "two rising positive factors"),
        ({"hflip": 2.0}, "probability"),
        ({"max_pixels": 0}, "max_pixels"),
    ],
)
def test_refused_settings(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataConfig(**changes)
