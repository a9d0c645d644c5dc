"""Scores against slow or closed forms, and what must not be scored silently."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightformer.config import parse_config
from weightformer.tasks import classification
from weightformer.tasks.classification.sources import load_digits
from weightformer.tasks.generation.metrics import (
    MeanLosses,
    classifier_features,
    extract,
    frechet_distance,
    inception_features,
    precision_recall,
    score,
    spread,
)


def normal(count: int, dim: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def test_a_set_is_at_no_distance_from_itself() -> None:
    x = normal(200)
    scores = score(x, x, normal(200, 10), seed=0)
    assert scores["fid"] < 1e-3
    assert scores["kid"] < 0.01
    assert scores["precision"] == scores["recall"] == 1
    assert not any(math.isnan(value) for value in scores.values())


def test_fid_of_gaussians_is_that_of_the_formula() -> None:
    """Two halves of one set, and one of twice the spread a step away: |m|^2 + trace of (std difference)^2."""
    x, y = normal(5000), normal(5000, seed=1)
    assert frechet_distance(x, y) < 0.05
    assert frechet_distance(x, 2 * y + 3) == pytest.approx(8 * (3**2 + (2 - 1) ** 2), rel=0.03)


def test_few_images_are_warned_of() -> None:
    x, y = normal(64, 256), normal(64, 256, seed=1)
    with pytest.warns(UserWarning, match="64 images are fewer than the 256 features"):
        few = frechet_distance(x, y)
    assert few > 100, "the reason for the warning: both sets are of one distribution"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frechet_distance(normal(300, 256), normal(300, 256, seed=1))


def test_scores_repeat_and_leave_random_numbers_alone() -> None:
    x, y = normal(1010), normal(300, seed=1)
    state = torch.get_rng_state()
    first, again, other = (score(x, y, y, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first["kid"] != other["kid"]
    assert torch.equal(state, torch.get_rng_state())


def test_inception_score_counts_classes() -> None:
    """Sure of one of ten classes each time: ten; of the same one always: one."""
    sure = 50.0 * torch.eye(10).repeat(100, 1)
    x = normal(100)
    assert score(x, x, sure, seed=0)["inception_score"] == pytest.approx(10, abs=0.5)
    assert score(x, x, sure[:1].repeat(1000, 1), seed=0)["inception_score"] == pytest.approx(1)


def test_precision_and_recall_equal_a_loop() -> None:
    real, fake = normal(40, 2), 0.7 * normal(30, 2, seed=1)

    def share(points: Tensor, manifold: Tensor) -> float:
        inside = 0
        for point in points:
            for i, centre in enumerate(manifold):
                others = torch.cat((manifold[:i], manifold[i + 1 :]))
                radius = sorted((others - centre).norm(dim=1).tolist())[2]
                if (point - centre).norm() <= radius:
                    inside += 1
                    break
        return inside / len(points)

    precision, recall = precision_recall(real, fake)
    assert precision == pytest.approx(share(fake, real))
    assert recall == pytest.approx(share(real, fake))
    assert 0 < recall < precision <= 1
    assert precision_recall(real, fake + 100) == (0, 0)


def test_a_narrow_generator_is_precise_and_forgets() -> None:
    precision, recall = precision_recall(normal(1000, 4), 0.2 * normal(1000, 4, seed=1))
    assert precision > 0.9
    assert recall < 0.2
    assert precision_recall(normal(1000, 4), normal(1000, 4, seed=1), limit=50) != (precision, recall)


def test_spread() -> None:
    assert spread(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert spread(0, 5).tolist() == []


def test_a_classifier_sees_images_as_it_does_in_evaluation(classifier: Path) -> None:
    images, labels = load_digits(train=False)
    features = classifier_features(classifier)
    found, logits = extract(features, images.split(100))
    content, names = classification.read_checkpoint(classifier)
    expected = classification.evaluate(parse_config(classification.Config, content), classifier, names)
    assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(expected["top1"], abs=1e-9)
    assert found.shape == (360, 16)
    assert features.class_names == names
    assert "16 px" in features.description
    assert str(classifier) in features.description


def test_only_bytes_are_scored(classifier: Path) -> None:
    features = classifier_features(classifier)
    for images in (torch.zeros(1, 1, 8, 8), -torch.ones(1, 1, 8, 8)):
        with pytest.raises(ValueError, match=r"uint8 images from 0 to 255, not of torch\.float32"):
            extract(features, [images])
    with pytest.raises(ValueError, match=r"of 1 channel\(s\), the samples have 3"):
        extract(features, [torch.zeros(1, 3, 8, 8, dtype=torch.uint8)])


def test_inception_takes_weights_by_path(tmp_path: Path) -> None:
    """The real network, untrained: nobody brings its weights here."""
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")

    class Untrained(inception.FeatureExtractorInceptionV3):  # type: ignore[misc, name-defined]
        def load_state_dict(self, *_: Any, **__: Any) -> None:
            """Stay as initialised."""

    torch.save({}, tmp_path / "empty.pth")
    network = Untrained("inception-v3-compat", ["2048"], str(tmp_path / "empty.pth"))
    torch.save(network.state_dict(), tmp_path / "inception.pth")
    features = inception_features(tmp_path / "inception.pth")
    images = torch.randint(256, (2, 1, 20, 20), dtype=torch.uint8)
    found, logits = extract(features, [images])
    assert found.shape == (2, 2048)
    assert logits.shape == (2, 1008)
    grey, _ = extract(features, [images.expand(-1, 3, -1, -1)])
    assert torch.equal(grey, found)
    stripes = torch.zeros(1, 1, 598, 598, dtype=torch.uint8)
    stripes[..., 1::2] = 255
    black = torch.zeros(1, 1, 299, 299, dtype=torch.uint8)
    without = extract(features, [black])[0]  # an antialiased one would be grey
    torch.testing.assert_close(extract(features, [stripes])[0], without, rtol=1e-3, atol=0)
    assert "without antialiasing" in features.description


def test_inception_weights_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        inception_features(tmp_path / "nowhere.pth")
    (tmp_path / "bad.pth").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"bad\.pth"):
        inception_features(tmp_path / "bad.pth")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"could not be read .*score\.features CHECKPOINT"):
        inception_features(tmp_path / "other.pth")


class Hostile:
    """Makes a marker file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile_marker",)


def test_no_code_is_run_from_inception_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Hostile()}, "hostile.pth")
    with pytest.raises(ValueError, match="system"):
        inception_features("hostile.pth")
    assert not Path("hostile_marker").exists()


def test_mean_losses_weigh_samples_not_batches() -> None:
    metric = MeanLosses()
    metric.update({"loss": torch.tensor([1.0, 2.0]), "mse": torch.tensor([1.0, 1.0])})
    metric.update({"loss": torch.tensor([6.0]), "mse": torch.tensor([4.0])})
    metric.update({"loss": torch.zeros(0), "mse": torch.zeros(0)})
    values = {k: float(v) for k, v in metric.compute().items()}
    assert values == {"loss": 3.0, "mse": 2.0, "vb": 0.0, "samples": 3.0}
