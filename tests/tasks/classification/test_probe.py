"""The probe: every combination equally often, and no sum of local evidence, so no static twin, tells the label."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightformer.cli import main
from weightformer.models import WeightFormer
from weightformer.tasks.classification import probe, sources
from weightformer.tasks.classification.data import DataConfig, ImageData

pytestmark = pytest.mark.skipif(
    not sources._DEBIAN_FASHION.exists(), reason="Debian's dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="module")
def canvases() -> tuple[Tensor, Tensor]:
    return probe.load_probe(None, train=False)


def places(images: Tensor) -> list[Tensor]:
    """Cue, A and B (N, 28, 28)."""
    return [images[:, 0, :, left : left + 28] for left in (112, 0, 224)]


def test_three_items_on_black_and_nothing_else(canvases: tuple[Tensor, Tensor]) -> None:
    images, labels = canvases
    assert images.shape == (1920, 1, 28, 252)
    assert labels.bincount().tolist() == [480] * 4
    items = places(images)
    assert sum(int(item.long().sum()) for item in items) == int(images.long().sum())
    assert all(item.flatten(1).any(1).all() for item in items)
    shown = {row.numpy().tobytes() for item in items for row in item}
    assert len(shown) == 3 * 1920, "an item is shown twice"
    assert torch.equal(probe.load_probe(None, train=False)[0], images)


def test_the_label_is_the_item_that_the_cue_names(canvases: tuple[Tensor, Tensor]) -> None:
    images, labels = canvases
    known, classes = sources.load_fashion_mnist(None, train=False)
    label_of = {image.numpy().tobytes(): label for image, label in zip(known[:, 0], classes.tolist(), strict=True)}
    cue, a, b = ([label_of[item.numpy().tobytes()] for item in place] for place in places(images))
    expected = [first if sign == 3 else second for sign, first, second in zip(cue, a, b, strict=True)]
    assert [[1, 2, 8, 9][label] for label in labels] == expected
    counts = {key: list(zip(cue, a, b, strict=True)).count(key) for key in set(zip(cue, a, b, strict=True))}
    assert len(counts) == 24
    assert set(counts.values()) == {80}
    assert all(first != second for _, first, second in counts)


def test_splits_share_no_item() -> None:
    train = {row.numpy().tobytes() for items in probe._compose(None, train=True)[3] for row in items}
    test = {row.numpy().tobytes() for items in probe._compose(None, train=False)[3] for row in items}
    assert len(train) >= 3 * 7200 - 2  # Fashion-MNIST has a few duplicates of its own
    assert len(train & test) <= 2


# What can be reached


def one_hot(combinations: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((len(combinations), 2 + 4 + 4))
    for row, (cue, a, b) in zip(rows, combinations, strict=True):
        row[[cue, 2 + a, 6 + b]] = 1
    return rows, np.array([a if cue == 0 else b for cue, a, b in combinations])


def test_the_best_sum_of_local_terms_is_right_half_the_time() -> None:
    from sklearn.linear_model import LogisticRegression

    rows, labels = one_hot(probe._COMBINATIONS)
    probabilities = LogisticRegression(C=100, tol=1e-8, max_iter=5000).fit(rows, labels).predict_proba(rows)
    right = probabilities[np.arange(24), labels]
    assert right == pytest.approx(np.full(24, probe.LOCAL), abs=0.01)


def test_no_sum_of_local_terms_exceeds_the_bound() -> None:
    rows, labels = one_hot(probe._COMBINATIONS)
    random = np.random.default_rng(0)
    best = 0.0
    for _ in range(3000):
        table = random.normal(size=(10, 4)) + 3 * np.concatenate([np.zeros((2, 4)), np.eye(4), np.eye(4)])
        best = max(best, float(((rows @ table).argmax(1) == labels).mean()))
    assert 0.5 < best <= probe.LOCAL_BOUND


def test_the_ceiling_is_high() -> None:
    assert 0.97 < probe.ceiling() < 1


def second_difference(model: nn.Module, images: Tensor) -> float:
    """Of the logits in cue and A, relative to them: zero for a sum of local terms."""
    items = [item[:2] for item in places(images)]
    four = torch.zeros(4, 1, 28, 252, dtype=torch.float64)
    for canvas, (cue, a) in zip(four, itertools.product(range(2), range(2)), strict=True):
        for left, item in zip(probe._PLACES, (items[0][cue], items[1][a], items[2][0]), strict=True):
            canvas[0, :, left : left + 28] = item.double() / 255
    with torch.no_grad():
        logits = model(four)
    return float((logits[0] - logits[1] - logits[2] + logits[3]).norm() / logits.norm())


@pytest.mark.parametrize(("depth", "every", "is_sum"), [(6, 0, True), (9, 0, False), (6, 6, False)])
def test_a_static_twin_of_six_blocks_is_a_sum_of_local_terms(
    depth: int, every: int, is_sum: bool, canvases: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    model = WeightFormer(1, 4, patch_size=7, embed_dim=8, depth=depth, dynamic_every=every).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    difference = second_difference(model.eval(), canvases[0])
    assert difference < 1e-13 if is_sum else difference > 1e-10


# As a data source


def test_it_is_a_data_source(canvases: tuple[Tensor, Tensor]) -> None:
    config = DataConfig(
        source="probe", root=str(sources._DEBIAN_FASHION), image_size=probe.SIZE, crop_pct=1.0, batch_size=4
    )
    data = ImageData(config, in_chans=1, mean=[0.0], std=[1.0], seed=0)
    assert data.class_names == ["Trouser", "Pullover", "Bag", "Ankle boot"]
    images, labels = next(iter(data.val_loader()))
    torch.testing.assert_close(images, canvases[0][:4] / 255)
    assert torch.equal(labels, canvases[1][:4])


def test_the_command_writes_canvases_and_says_what_can_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "probe", str(tmp_path / "out"), "--num", "3"]) == 0
    text = capsys.readouterr().out
    assert "25.00%" in text
    assert "50.00%" in text
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
