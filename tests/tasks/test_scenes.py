"""Fashion scenes: exact masks, both formats in agreement, the same scenes from the same seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from weightformer.cli import main
from weightformer.tasks.scenes import CATEGORIES, SceneOptions, encode_rle, mask_polygons, write_scenes

OPTIONS = ["--train", "30", "--val", "8", "--size", "96", "160", "--crowd", "0.3", "--empty", "0.1"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    assert main(["data", "fashion-scenes", str(folder), *OPTIONS]) == 0
    return folder


def annotations(folder: Path, split: str = "train") -> dict[str, Any]:
    return json.loads((folder / "coco" / "annotations" / f"instances_{split}2017.json").read_text())


def decode(segmentation: Any, height: int, width: int) -> np.ndarray:
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width)))


def test_outlines_and_run_lengths_are_exact() -> None:
    rng = np.random.default_rng(0)
    kinds = {"holes": 0, "parts": 0}
    for _ in range(600):
        height, width = (int(side) for side in rng.integers(1, 12, 2))
        mask = rng.random((height, width)) < rng.choice([0.1, 0.4, 0.7, 0.95])
        rle = coco_mask.frPyObjects(encode_rle(mask), height, width)
        np.testing.assert_array_equal(coco_mask.decode(rle), mask)
        polygons = mask_polygons(mask)
        kinds["holes"] += polygons is None
        if polygons:
            kinds["parts"] += len(polygons) > 1
            np.testing.assert_array_equal(decode(polygons, height, width), mask)
    assert min(kinds.values()) > 50
    ring = np.pad(np.zeros((1, 1), bool), 1, constant_values=True)
    assert mask_polygons(ring) is None
    assert mask_polygons(~ring) == [[1, 1, 2, 1, 2, 2, 1, 2]]


def test_both_formats_tell_the_same(scenes: Path) -> None:
    content = annotations(scenes)
    labels = {category["id"]: i + 2 for i, category in enumerate(CATEGORIES)}
    kinds = {"crowd": 0, "rle": 0, "parts": 0}
    for image in content["images"]:
        assert (image["height"], image["width"]) == (96, 160)
        picture = Image.open(scenes / "coco" / "train2017" / image["file_name"])
        assert (picture.mode, picture.size) == ("L", (160, 96))
        semantic = np.array(Image.open(scenes / "ade20k" / "annotations" / "training" / image["file_name"]))
        expected = np.ones_like(semantic)
        for a in (a for a in content["annotations"] if a["image_id"] == image["id"]):
            is_rle = isinstance(a["segmentation"], dict)
            mask = decode([a["segmentation"]] if is_rle else a["segmentation"], 96, 160).astype(bool)
            assert (expected[mask] == 1).all(), "objects share no pixel"
            expected[mask] = 0 if a["iscrowd"] else labels[a["category_id"]]
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box = [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]]
            assert (a["bbox"], a["area"]) == (box, mask.sum())
            kinds["crowd"] += a["iscrowd"]
            kinds["rle"] += is_rle and not a["iscrowd"]
            kinds["parts"] += not is_rle and len(a["segmentation"]) > 1
        np.testing.assert_array_equal(semantic, expected)
    assert min(kinds.values()) > 0, kinds
    with_objects = {a["image_id"] for a in content["annotations"]}
    assert 0 < len(with_objects) < len(content["images"]), "some scene must be empty"
    numbers = [category["id"] for category in content["categories"]]
    assert numbers != sorted(numbers)
    assert max(numbers) > len(numbers)


def test_layouts(scenes: Path) -> None:
    ade = scenes / "ade20k"
    for split, count in (("training", 30), ("validation", 8)):
        names = [sorted(p.name for p in (ade / kind / split).iterdir()) for kind in ("images", "annotations")]
        assert names[0] == names[1]
        assert len(names[0]) == count
    rows = (ade / "objectInfo150.txt").read_text().splitlines()
    assert [row.split("\t")[-1] for row in rows] == ["Name", "backdrop", *(c["name"] for c in CATEGORIES)]


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_seed_and_options_decide_every_byte(tmp_path: Path) -> None:
    def written(name: str, **changes: Any) -> dict[str, str]:
        return digest(write_scenes(tmp_path / name, SceneOptions(**{"train": 3, "val": 2, **changes})))

    first = written("a")
    assert written("b") == first
    assert written("more", train=4)["coco/train2017/000000000003.png"] == first["coco/train2017/000000000003.png"]
    for changes in (
        {"seed": 1},
        {"objects": (5, 5)},
        {"scale": (40, 60)},
        {"rotate": 0.0},
        {"empty": 1.0},
        {"crowd": 1.0},
    ):
        other = written(str(changes), **changes)
        assert other["coco/annotations/instances_train2017.json"] != first["coco/annotations/instances_train2017.json"]
    assert not set(first.values()) & {v for k, v in written("c", seed=2).items() if k.endswith(".png")}


def test_validation_uses_other_photographs(tmp_path: Path) -> None:
    """Scene i of both splits draws the same random numbers only if the split enters the seed."""
    folder = write_scenes(
        tmp_path / "s", SceneOptions(train=2, val=2, rotate=0.0, scale=(28, 28), objects=(1, 1), empty=0.0)
    )
    from weightformer.tasks.classification.sources import load_fashion_mnist

    for split, train in (("train", True), ("val", False)):
        sources = load_fashion_mnist(None, train=train)[0][:, 0].numpy()
        found = 0
        for a in annotations(folder, split)["annotations"]:
            if a["iscrowd"]:
                continue
            x, y, w, h = a["bbox"]
            picture = np.array(Image.open(folder / "coco" / f"{split}2017" / f"{a['image_id']:012d}.png"))
            mask = decode(a["segmentation"], 128, 128).astype(bool)[y : y + h, x : x + w]
            item = np.where(mask, picture[y : y + h, x : x + w], 0)
            for flipped in (item, item[:, ::-1]):
                for top in range(29 - h):
                    for left in range(29 - w):
                        patch, inside = sources[:, top : top + h, left : left + w], flipped > 0
                        found += int((patch[:, inside] == flipped[inside]).all(1).any())
        assert found >= 1, split


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "32"], "no room for items of 64 px"),
        (["--objects", "5", "2"], "two rising counts"),
        (["--crowd", "1.5"], "share in"),
        (["--train", "0"], "at least 1 scene"),
        (["--source", "nowhere"], "nowhere"),
        (["--size", "1", "2", "3"], "--size takes a side"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert main(["data", "fashion-scenes", str(tmp_path / "out"), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_is_written_once_and_never_overwritten(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digest(scenes)
    assert main(["data", "fashion-scenes", str(scenes), *OPTIONS]) == 0
    assert main(["data", "fashion-scenes", str(scenes), *OPTIONS, "--seed", "1"]) == 2
    assert "does not hold these scenes" in capsys.readouterr().err
    assert digest(scenes) == before
