"""Noise, time steps and dropped labels are functions of (seed, epoch, index); images and latents are framed right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from weightformer.tasks.generation.data import DataConfig, GenerationData
from weightformer.training.loader import ResumableLoader


def digits(**kwargs: Any) -> GenerationData:
    options = {"seed": 3} | {k: kwargs.pop(k) for k in ("seed", "rank", "world_size") if k in kwargs}
    return GenerationData(DataConfig(**{"image_size": 8, "batch_size": 100} | kwargs), **options)


def epoch_of(loader: ResumableLoader, epoch: int = 0) -> list[Tensor]:
    """Every column of an epoch, batches joined."""
    loader.sampler.set_epoch(epoch)
    return [torch.cat(column) for column in zip(*loader, strict=True)]


def by_noise(columns: list[Tensor]) -> dict[bytes, list[Tensor]]:
    """Samples under their noise, which no two share."""
    return {row[2].numpy().tobytes(): list(row) for row in zip(*columns, strict=True)}


def test_what_a_sample_gets_depends_on_its_place_alone() -> None:
    """The same for another batch size, worker processes and two processes that share the epoch."""
    whole = by_noise(epoch_of(digits(batch_size=479).train_loader()))
    assert len(whole) == 1437
    parts = [digits(batch_size=100, rank=rank, world_size=2, num_workers=rank).train_loader() for rank in (0, 1)]
    found = 0
    for part in parts:
        for key, row in by_noise(epoch_of(part)).items():
            assert all(torch.equal(a, b) for a, b in zip(row, whole[key], strict=True))
            found += 1
    assert found == 1400


def test_it_changes_with_epoch_and_seed() -> None:
    loader = digits().train_loader()
    first, second, again = (by_noise(epoch_of(loader, epoch)) for epoch in (0, 1, 0))
    assert first.keys() == again.keys()
    assert first.keys().isdisjoint(second)
    assert first.keys().isdisjoint(by_noise(epoch_of(digits(seed=4).train_loader())))


def test_validation_is_the_same_in_every_epoch_and_drops_no_label() -> None:
    loader = digits(label_dropout=0.5).val_loader()
    assert loader
    first, second = epoch_of(loader, 0), epoch_of(loader, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[1].max() == 9
    assert not by_noise(first).keys() & by_noise(epoch_of(digits().train_loader())).keys()


def test_a_resumed_epoch_is_exact() -> None:
    loader = digits(label_dropout=0.5).train_loader()
    loader.sampler.set_epoch(2)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    resumed = digits(label_dropout=0.5).train_loader()
    resumed.load_state_dict(loader.state_dict())
    for ours, theirs in zip(list(resumed), list(batches), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_labels_are_dropped_as_often_as_asked(share: float) -> None:
    labels = epoch_of(digits(label_dropout=share).train_loader())[1]
    assert (labels == 10).double().mean().item() == pytest.approx(share, abs=0.04)
    assert ((labels >= 0) & (labels <= 10)).all()


def test_steps_cover_the_schedule_evenly_and_noise_is_normal() -> None:
    clean, _, noise, steps = epoch_of(digits().train_loader())
    assert steps.min() < 10
    assert steps.max() > 989
    assert steps.double().mean().item() == pytest.approx(499.5, abs=35)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert clean.min() == -1
    assert clean.max() == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of wide images whose middle square is white and whose left end is red."""
    for name in ("ant", "bee"):
        (tmp_path / "train" / name).mkdir(parents=True)
        image = Image.new("RGB", (32, 16), "black")
        image.paste("white", (8, 0, 24, 16))
        image.paste("red", (0, 0, 8, 16))
        for i in range(2):
            image.save(tmp_path / "train" / name / f"{i}.png")
    return tmp_path


def test_images_are_cropped_not_squashed(folder: Path) -> None:
    data = GenerationData(DataConfig(source="folder", root=str(folder), image_size=8, batch_size=4), seed=0)
    clean, labels, _, _ = next(iter(data.train_loader()))
    assert clean.shape == (4, 3, 8, 8)
    assert clean[..., 1:-1].min() > 0.99, "the middle square alone is left"
    assert data.class_names == ["ant", "bee"]
    assert set(labels.tolist()) <= {0, 1, 2}
    assert data.val_loader() is None


def test_half_of_the_images_are_flipped(folder: Path) -> None:
    path = next((folder / "train").rglob("*.png"))
    Image.new("L", (16, 16)).save(path)
    image = Image.open(path)
    image.paste(255, (0, 0, 8, 16))
    for path in (folder / "train").rglob("*.png"):
        image.save(path)
    config = DataConfig(source="folder", root=str(folder), image_size=16, batch_size=4, hflip=0.5)
    loader = GenerationData(config, seed=0).train_loader()
    left = torch.cat([epoch_of(loader, epoch)[0][:, 0, 0, 0] for epoch in range(20)])
    assert set(left.tolist()) == {-1.0, 1.0}
    assert 0.25 < (left > 0).double().mean() < 0.75


def test_a_bad_image_is_named_or_skipped(folder: Path) -> None:
    bad = folder / "train" / "bee" / "1.png"
    bad.write_bytes(b"no image")
    config = {"source": "folder", "root": str(folder), "image_size": 8, "batch_size": 4}
    with pytest.raises(ValueError, match=r"bee/1\.png"):
        list(GenerationData(DataConfig(**config), seed=0).train_loader())
    data = GenerationData(DataConfig(**config, on_bad_image="skip"), seed=0)
    with pytest.warns(UserWarning, match="passed over"):
        (batch,) = data.train_loader()
    assert [len(column) for column in batch] == [4, 4, 4, 4]
    assert data.skipped == [str(bad)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"label_dropout": 1.5}, "data.label_dropout is a probability"),
        ({"hflip": -0.1}, "data.hflip is a probability"),
        ({"source": "latents"}, "data.root is needed"),
        ({"source": "folder"}, "data.root is needed"),
        ({"image_size": 0}, "data.image_size must be at least 1"),
        ({"source": "latents", "root": "x", "batch_size": 0}, "data.batch_size must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataConfig(**options)


def test_classes_of_a_model_must_be_those_of_the_data() -> None:
    with pytest.raises(ValueError, match="missing eleven"):
        GenerationData(DataConfig(), seed=0, class_names=[*map(str, range(10)), "eleven"])
