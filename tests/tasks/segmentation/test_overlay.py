"""Colours that can be told apart, laid where the labels are, and a legend of what is there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from weightformer.tasks.segmentation.overlay import draw_overlay, palette, share_text

NAMES = ["sky", "road", "a class with a long name"]


@pytest.mark.parametrize("count", [1, 2, 11, 150, 254])
def test_every_class_has_its_own_colour(count: int) -> None:
    colors = palette(count)
    assert colors.shape == (count, 3)
    assert len({tuple(color) for color in colors.tolist()}) == count
    assert np.array_equal(colors, palette(254)[:count]), "a class keeps its colour in any set"


def test_neighbours_are_far_apart() -> None:
    colors = palette(20).astype(int)
    assert min(np.abs(a - b).sum() for a, b in itertools.pairwise(colors)) > 120


def test_colours_lie_where_the_labels_are() -> None:
    image = Image.new("L", (300, 200), 100)
    labels = np.full((200, 300), 255, np.uint8)
    labels[:, :150] = 1
    picture = np.asarray(draw_overlay(image, labels, NAMES)).astype(int)[:200, : 300 * 1]
    assert np.abs(picture[:, :150] - (palette(3)[1].astype(int) + 100) / 2).max() <= 1
    assert (picture[:, 150:300] == 100).all()


def test_small_pictures_are_enlarged_and_the_legend_is_beside_them() -> None:
    labels = np.zeros((28, 20), np.uint8)
    labels[0] = 2
    picture = draw_overlay(Image.new("L", (20, 28)), labels, NAMES)
    assert picture.height == 28 * 16
    assert picture.width > 20 * 16 + 100
    legend = np.asarray(picture)[:, 20 * 16 :]
    shown = {tuple(color) for color in legend.reshape(-1, 3).tolist()}
    colors = [tuple(color) for color in palette(3).tolist()]
    assert [color in shown for color in colors] == [True, False, True]


def test_a_legend_longer_than_the_picture_and_an_empty_one() -> None:
    names = [f"class {i}" for i in range(100)]
    labels = np.arange(100, dtype=np.uint8).reshape(10, 10)
    assert draw_overlay(Image.new("RGB", (10, 10)), labels, names).height > 100 * 20
    assert draw_overlay(Image.new("RGB", (10, 10)), np.full((10, 10), 255, np.uint8), names).height == 450


def test_shares() -> None:
    assert [share_text(share) for share in (1.0, 0.1234, 0.001, 0.0009)] == ["100.0%", "12.3%", "0.1%", "< 0.1%"]
