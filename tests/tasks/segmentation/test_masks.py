"""Labels by ADE20K's rule and without it, and masks that break the rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification.images import ImageReadError
from weightformer.tasks.segmentation.masks import (
    class_names_file,
    is_binary,
    read_class_names,
    read_values,
    to_file_values,
    to_labels,
)

MAX = 10**8


def write(path: Path, values: object, mode: str | None = None) -> Path:
    Image.fromarray(np.array(values, dtype=np.uint16 if mode == "I;16" else np.uint8)).save(path)
    return path


def labels(values: list[int], num_classes: int, reduce_zero_label: bool) -> list[int]:
    return to_labels(np.array([values]), num_classes, reduce_zero_label=reduce_zero_label, path="m.png")[0].tolist()


def test_labels_by_the_rule_of_ade20k() -> None:
    assert labels([0, 1, 150, 255], 150, True) == [255, 0, 149, 255]
    assert labels([0, 1, 149, 255], 150, False) == [0, 1, 149, 255]


@pytest.mark.parametrize(
    ("values", "reduce_zero_label", "sentence"),
    [
        ([0, 151], True, r"m\.png holds 151: with 150 classes .* true, 1\.\.150 name a class and 255 and 0 are not"),
        ([0, 150], False, r"m\.png holds 150: with 150 classes .* false, 0\.\.149 name a class and 255 is not counted"),
        ([*range(151, 170)], True, r"151, 152, .*160, \.\.\. \(19 values\)"),
        ([0, 70_000], True, "70000"),
        ([-1, 3], False, "-1"),
    ],
)
def test_values_that_name_no_class_are_listed(values: list[int], reduce_zero_label: bool, sentence: str) -> None:
    with pytest.raises(ImageReadError, match=sentence):
        labels(values, 150, reduce_zero_label)


@pytest.mark.parametrize("reduce_zero_label", [True, False])
def test_predictions_are_written_as_masks_are_read(reduce_zero_label: bool) -> None:
    predicted = torch.arange(150, dtype=torch.uint8).view(10, 15)
    values = to_file_values(predicted, reduce_zero_label=reduce_zero_label)
    again = to_labels(values.astype(np.int64), 150, reduce_zero_label=reduce_zero_label, path="")
    assert torch.equal(again, predicted)
    assert values.min() == int(reduce_zero_label)


def test_kinds_of_files(tmp_path: Path) -> None:
    values = [[0, 3], [7, 255]]
    files = [write(tmp_path / "grey.png", values), write(tmp_path / "wide.png", values, "I;16")]
    palette = Image.fromarray(np.array(values, np.uint8))
    palette.putpalette(np.random.default_rng(0).integers(0, 256, 768, np.uint8).tobytes())
    palette.save(tmp_path / "palette.png")
    assert Image.open(tmp_path / "palette.png").mode == "P"
    for path in [*files, tmp_path / "palette.png"]:
        assert read_values(path, MAX).tolist() == values, path.name
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bits.png")
    assert read_values(tmp_path / "bits.png", MAX).tolist() == [[1, 0]]


def test_masks_are_turned_upright(tmp_path: Path) -> None:
    mask = Image.fromarray(np.array([[1, 2, 3]], np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    mask.save(tmp_path / "turned.png", exif=exif)
    assert read_values(tmp_path / "turned.png", MAX).tolist() == [[1], [2], [3]]


def test_colour_images_and_damaged_files_are_named(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "colours.png")
    with pytest.raises(ImageReadError, match=r"colours\.png is a colour image \(mode RGB\)"):
        read_values(tmp_path / "colours.png", MAX)
    path = write(tmp_path / "half.png", np.random.default_rng(0).integers(0, 9, (64, 64)))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ImageReadError, match=r"half\.png"):
        read_values(path, MAX)
    with pytest.raises(ImageReadError, match=r"large\.png: it has 400 pixels, more than data\.max_pixels"):
        read_values(write(tmp_path / "large.png", np.zeros((20, 20))), 399)


def test_black_and_white_is_told_from_class_numbers() -> None:
    assert is_binary(np.array([[0, 255]]))
    for values in ([0], [255], [0, 1], [0, 1, 255]):
        assert not is_binary(np.array([values]))


def test_names_of_classes(tmp_path: Path) -> None:
    ade = tmp_path / "objectInfo150.txt"
    ade.write_text(
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.15\t11664\t1172\t1\twall\n2\t0.1\t6046\t612\t1\tbuilding, edifice\n"
        "3\t0.1\t1\t1\t0\tscreen, silver screen\n4\t0.1\t1\t1\t0\tscreen, CRT screen\n"
    )
    assert class_names_file(tmp_path) == ade
    assert read_class_names(ade) == ["wall", "building", "screen 3", "screen 4"]
    (tmp_path / "classes.txt").write_text("road\n\nsky \n")
    assert read_class_names(class_names_file(tmp_path)) == ["road", "sky"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "it is empty"), ("a\nb\na\n", "twice: a"), ("\n".join(map(str, range(255))), "255 classes.*at most 254")],
)
def test_unusable_names(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_class_names(tmp_path / "classes.txt")
    with pytest.raises(FileNotFoundError, match=r"names no classes: give classes\.txt"):
        class_names_file(tmp_path / "nowhere")
