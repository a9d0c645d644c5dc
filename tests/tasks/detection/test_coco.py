"""Annotation files with every fault that COCO's own tools stumble over."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightformer.tasks.detection.coco import CocoSet, decode_mask, encode_mask
from weightformer.tasks.detection.metrics import coco_metrics
from weightformer.tasks.scenes import encode_rle

OUTLINE = [4, 5, 12, 5, 12, 11, 4, 11]
CocoFile = Callable[..., Path]


def annotation(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A sound annotation, a box of 8 x 6 px at (4, 5), with keys changed or (None) left out."""
    whole = {
        "id": number,
        "image_id": 1,
        "category_id": 7,
        "iscrowd": 0,
        "bbox": [4, 5, 8, 6],
        "area": 48,
        "segmentation": [OUTLINE],
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}


def read(path: Path) -> CocoSet:
    return CocoSet(path, path.parent.parent / "val2017")


def box_mask() -> np.ndarray:
    mask = np.zeros((20, 30), np.uint8)
    mask[5:11, 4:12] = 1
    return mask


def test_what_is_missing_is_filled_in(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(iscrowd=None, area=None, id=None)]))
    (found,) = coco.images[0].annotations
    assert (found["iscrowd"], found["area"], found["id"]) == (0, 48, 1)
    assert coco.images[1].annotations == []
    assert not coco.dropped


@pytest.mark.parametrize("area", [float("nan"), float("-inf"), -5, "large", [48], True])
def test_a_senseless_area_is_that_of_the_mask(coco_file: CocoFile, area: Any) -> None:
    coco = read(coco_file([annotation(area=area), annotation(2, area=0.25)]))
    assert [a["area"] for a in coco.images[0].annotations] == [48, 0.25]


def test_keys_that_are_null_are_missing(coco_file: CocoFile) -> None:
    path = coco_file([annotation()])
    content = json.loads(path.read_text())
    content["annotations"][0] |= {"area": None, "iscrowd": None}
    path.write_text(json.dumps(content))
    (found,) = read(path).images[0].annotations
    assert (found["iscrowd"], found["area"]) == (0, 48)


def test_an_outline_may_leave_the_image(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(segmentation=[[-10, -10, 40, -10, 40, 30, -10, 30]])]))
    assert decode_mask(coco.images[0].annotations[0]["segmentation"], 20, 30).all()


def test_ids_that_repeat_are_told_apart_in_evaluation(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(0), annotation(0, bbox=[1, 1, 2, 2]), annotation(0, image_id=2)]))
    assert [a["id"] for a in coco.ground_truth()["annotations"]] == [1, 2, 3]


def test_all_kinds_of_masks_are_equal(coco_file: CocoFile) -> None:
    mask = box_mask()
    kinds = [[OUTLINE], [OUTLINE[:], [4, 5, 8, 5, 8, 11, 4, 11]], encode_rle(mask.astype(bool)), encode_mask(mask)]
    coco = read(coco_file([annotation(i, segmentation=kind) for i, kind in enumerate(kinds)]))
    for found in coco.images[0].annotations:
        np.testing.assert_array_equal(decode_mask(found["segmentation"], 20, 30), mask)
    assert encode_mask(mask) == coco.images[0].annotations[2]["segmentation"]


BROKEN = {
    "two points": {"segmentation": [[4, 5, 8, 9]]},
    "no outline": {"segmentation": []},
    "odd outline": {"segmentation": [[4, 5, 8, 9, 1, 2, 3]]},
    "not finite": {"segmentation": [[4, 5, 8, float("nan"), 1, 2]]},
    "text": {"segmentation": "abc"},
    "words": {"segmentation": [["4", "5", "8", "9", "1", "2"]]},
    "a flat list": {"segmentation": OUTLINE},
    "three times a point": {"segmentation": [[4, 5, 4, 5, 4, 5]]},
    "a line": {"segmentation": [[4, 5, 8, 5, 12, 5]]},
    "right of the image": {"segmentation": [[30, 5, 42, 5, 42, 11]]},
    "above the image": {"segmentation": [[4, -5, 12, -5, 12, 0]]},
    # COCO's rasteriser would take gigabytes for these.
    "far off": {"segmentation": [[4, 5, 1e9, 5, 12, 11]]},
    "far off, down": {"segmentation": [[4, 5, 12, -1e12, 12, 11]]},
    "no segmentation": {"segmentation": None},
    "rle of another size": {"segmentation": {"size": [10, 10], "counts": [100]}},
    "rle that is too short": {"segmentation": {"size": [20, 30], "counts": [5, 5]}},
    "damaged compressed rle": {"segmentation": {"size": [20, 30], "counts": "U4?0"}},
    "rle of nothing": {"segmentation": {"size": [20, 30], "counts": [600]}},
    "rle without counts": {"segmentation": {"size": [20, 30]}},
    "rle of other letters": {"segmentation": {"size": [20, 30], "counts": "\u00e9\u00e9"}},
    "no width": {"bbox": [4, 5, 0, 6]},
    "no height": {"bbox": [4, 5, 8, 0]},
    "negative width": {"bbox": [4, 5, -8, 6]},
    "outside": {"bbox": [40, 5, 8, 6]},
    "three numbers": {"bbox": [4, 5, 8]},
    "infinite box": {"bbox": [4, 5, float("inf"), 6]},
    "no box": {"bbox": None},
    "box beyond all numbers": {"bbox": [4, 5, 10**400, 6]},
    "crowd or not": {"iscrowd": "0"},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_annotation_is_dropped_and_named(coco_file: CocoFile, kind: str) -> None:
    path = coco_file([annotation(5), annotation(17, **BROKEN[kind])])
    with pytest.warns(UserWarning, match=r"1 annotation\(s\) were dropped: annotation 17 of image 1: ."):
        coco = read(path)
    assert [a["id"] for a in coco.images[0].annotations] == [5]
    assert len(coco.dropped) == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no width", "has no area"),
        ("negative width", "has no area"),
        ("outside", "lies outside of the image of 20 x 30 px"),
        ("infinite box", "is not four numbers"),
        ("far off", "no outline of three points or more around a part of the image"),
        ("rle of nothing", "cover no pixel"),
        ("crowd or not", "'0' is neither 0 nor 1"),
    ],
)
def test_the_reason_is_given(coco_file: CocoFile, kind: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"annotation 17 of image 1: .*{reason}"):
        read(coco_file([annotation(5), annotation(17, **BROKEN[kind])]))


def test_broken_outlines_beside_a_sound_one_are_left_out(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(segmentation=[OUTLINE, [1, 2], [3, 4, 5, 6, 7]])]))
    assert coco.images[0].annotations[0]["segmentation"] == [OUTLINE]


def test_boxes_are_clipped_to_the_image(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(bbox=[-4, 15.5, 12, 10])]))
    assert coco.images[0].annotations[0]["bbox"] == [0, 15.5, 8, 4.5]


def test_categories_are_sorted_whatever_their_order_and_gaps(coco_file: CocoFile) -> None:
    coco = read(coco_file([annotation(category_id=90)], categories=[90, 3, 7]))
    assert list(coco.categories) == [3, 7, 90]
    assert list(read(coco_file([annotation(category_id=0)], categories=[1, 0])).categories) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"category_id": 5}, "annotation 1 of image 1 has category 5.* categories are 3, 7, 90"),
        ({"image_id": 12}, "annotation 1 is for image 12"),
        ({"category_id": None}, "annotation 1 has no 'category_id'"),
        ({"category_id": "7"}, "annotation 1 has '7' as its 'category_id', which is no whole number"),
        ({"image_id": [1]}, r"annotation 1 has \[1\] as its 'image_id', which is no whole number"),
    ],
)
def test_what_cannot_be_mended_is_an_error_with_the_ids(
    coco_file: CocoFile, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(coco_file([annotation(**changes)]))


def test_files_that_are_none(coco_file: CocoFile, tmp_path: Path) -> None:
    path = coco_file([])
    sound = json.loads(path.read_text())
    for change, sentence in (
        ({"images": []}, "images are missing"),
        ({"categories": [{"id": 1}, {"id": 1}]}, "share an id"),
        ({"annotations": {}}, "must hold lists of images, annotations, categories"),
        ({"images": [{"id": 1, "height": 3, "width": 3}]}, "image 1 has no 'file_name'"),
        ({"images": [{"id": 1, "height": 0, "width": 3, "file_name": "x"}]}, "image 1 has a size of 0 x 3"),
        ({"images": [{"id": 1, "height": "a", "width": 3, "file_name": "x"}]}, "image 1 has 'a' as its 'height'"),
        ({"images": [{"id": 1, "height": 3, "width": 3, "file_name": None}]}, "image 1 has no 'file_name'"),
        ({"images": [{"id": "a.jpg", "height": 3, "width": 3, "file_name": "x"}]}, "an image has 'a.jpg' as its 'id'"),
        ({"categories": [{"id": 1.5, "name": "x"}]}, "a category has 1.5 as its 'id', which is no whole number"),
        (
            {"annotations": [annotation(segmentation=None)]},
            r"none of its 1 annotation\(s\) can be used: .*annotation 1",
        ),
    ):
        path.write_text(json.dumps(sound | change))
        with pytest.raises(ValueError, match=sentence):
            read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read(path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        CocoSet(tmp_path / "nowhere.json", tmp_path)


def test_random_masks_survive() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        mask = (rng.random(rng.integers(1, 70, 2)) < rng.random()).astype(np.uint8)
        rle = encode_mask(mask)
        np.testing.assert_array_equal(decode_mask(json.loads(json.dumps(rle)), *mask.shape), mask)


def test_everything_broken_still_evaluates(coco_file: CocoFile) -> None:
    """P40's file: what is left of it scores 1.0 against itself, and nothing in it stops the evaluation."""
    annotations = [annotation(i, **changes) for i, changes in enumerate(BROKEN.values())]
    annotations += [annotation(90, iscrowd=None), annotation(91, image_id=2, category_id=3, area=None)]
    crowd = encode_rle(np.ones((20, 30), bool))
    annotations.append(annotation(92, iscrowd=1, bbox=[0, 0, 30, 20], segmentation=crowd))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coco = read(coco_file(annotations))
    truth = coco.ground_truth()
    before = copy.deepcopy(truth)
    results = [
        {**a, "score": 1.0, "segmentation": encode_mask(decode_mask(a["segmentation"], 20, 30))}
        for a in truth["annotations"]
        if not a["iscrowd"]
    ]
    # The crowd swallows what lies in it: a second box there is neither right nor wrong.
    results.append({**results[0], "bbox": [20, 10, 5, 5], "score": 0.9})
    values = coco_metrics(truth, results)
    assert values["box_ap"] == values["mask_ap"] == pytest.approx(1.0)
    assert truth == before
