"""One set of images, however many processes draw it and however often they are stopped."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weightformer.cli import main
from weightformer.tasks.generation import read_checkpoint
from weightformer.tasks.generation.sample import build_pipeline, parse_classes, parse_grid


@pytest.fixture
def checkpoint(trained: Path) -> str:
    return str(trained / "checkpoints" / "last.ckpt")


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("0*.png"))}


def sample(checkpoint: str, folder: Path, *options: str) -> Path:
    assert main(["sample", checkpoint, "--classes", "3,7", "--grid", "4x3", "--save", str(folder), *options]) == 0
    return folder


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Up to rounding: a product's last bits depend on how many samples it is taken of."""
    assert a.keys() == b.keys()
    for name, image in a.items():
        assert np.abs(image - b[name]).max() <= 1, name


def test_what_is_written(checkpoint: str, tmp_path: Path) -> None:
    folder = sample(checkpoint, tmp_path / "a")
    images = pictures(folder)
    assert list(images) == [f"{i:06d}.png" for i in range(12)]
    assert all(image.shape == (8, 8) for image in images.values())
    assert len({image.tobytes() for image in images.values()}) == 12
    rows = list(csv.DictReader((folder / "samples.csv").open()))
    assert [row["class"] for row in rows] == ["3"] * 6 + ["7"] * 6
    assert [row["label"] for row in rows] == ["3"] * 6 + ["7"] * 6
    grid = Image.open(folder / "grid.png")
    assert grid.height > 4 * 64 - 1, "small images are enlarged"
    assert grid.width > 3 * 64
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["classes"] == ["3", "7"]
    assert settings["guidance"] == 2.0
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_two_processes_draw_the_same_set(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pictures(sample(checkpoint, tmp_path / "whole"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    shares = []
    for rank in "201":
        monkeypatch.setenv("RANK", rank)
        before = set(pictures(tmp_path / "shared")) if (tmp_path / "shared").exists() else set()
        shares.append(set(pictures(sample(checkpoint, tmp_path / "shared", "--sampling.batch_size", "3"))) - before)
    assert [len(share) for share in shares] == [4, 4, 4]
    assert_same(pictures(tmp_path / "shared"), whole)
    assert (tmp_path / "shared" / "grid.png").is_file()


def test_finished_images_are_not_drawn_again(checkpoint: str, tmp_path: Path) -> None:
    folder = sample(checkpoint, tmp_path / "a")
    whole = pictures(folder)
    times = {name: (folder / name).stat().st_mtime_ns for name in whole}
    for name in ("000002.png", "000011.png", "grid.png"):
        (folder / name).unlink()
    sample(checkpoint, folder)
    assert_same(pictures(folder), whole)
    changed = {name for name in whole if (folder / name).stat().st_mtime_ns != times[name]}
    assert changed == {"000002.png", "000011.png"}
    assert (folder / "grid.png").is_file()


def test_another_set_goes_elsewhere(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sample(checkpoint, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for option, name in ((["--guidance", "3"], "guidance"), (["--seed", "1"], "seed"), (["--classes", "3"], "classes")):
        assert main(["sample", checkpoint, "--classes", "3,7", "--grid", "4x3", "--save", str(folder), *option]) == 2
        assert f"other settings ({name})" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_seed_guidance_steps_and_scheduler_change_the_images(checkpoint: str, tmp_path: Path) -> None:
    base = pictures(sample(checkpoint, tmp_path / "base"))
    options = [["--seed", "1"], ["--guidance", "1"], ["--sampling.steps", "6"], ["--sampling.scheduler", "ddim"]]
    for i, option in enumerate([*options, ["--sampling.scheduler", "ddpm"]]):
        other = pictures(sample(checkpoint, tmp_path / str(i), *option))
        assert any(np.abs(image - base[name]).max() > 1 for name, image in other.items()), option


def test_defaults_show_every_class(checkpoint: str, trained: Path) -> None:
    assert main(["sample", checkpoint, "--num", "20"]) == 0
    rows = list(csv.DictReader((trained / "samples" / "samples.csv").open()))
    assert [int(row["label"]) for row in rows] == [i // 2 for i in range(20)]
    assert (trained / "samples" / "grid.png").is_file()


def test_classes_by_name_and_number(checkpoint: str) -> None:
    from weightformer.config import parse_config
    from weightformer.tasks.generation import Config

    content, _ = read_checkpoint(checkpoint)
    names = ["Ankle boot", "Bag", "bag", "Coat, Jacket", "T-shirt", "5", "g", "h", "i", "j"]
    pipeline = build_pipeline(parse_config(Config, content | {"model": content["model"]}), checkpoint)
    pipeline.register_to_config(class_names=names)
    assert parse_classes("", pipeline) == list(range(10))
    assert parse_classes("ankle BOOT, jacket", pipeline) == [0, 3]
    assert parse_classes("Bag,bag", pipeline) == [1, 2], "letter case counts where it alone tells names apart"
    assert parse_classes("5,3", pipeline) == [5, 3], "a name goes before a number"
    for text, sentence in (("BAG", "'BAG'"), ("boot", "Ankle boot"), ("10", "out of range"), ("3,,4", "no class ''")):
        with pytest.raises(ValueError, match=sentence):
            parse_classes(text, pipeline)


def test_numbers_of_images(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", checkpoint, "--num", "-3", "--save", str(tmp_path / "a")]) == 2
    assert "--num must be positive, got -3" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    folder = sample(checkpoint, tmp_path / "b", "--num", "3")  # fewer than the grid shows
    assert len(pictures(folder)) == 3
    assert (folder / "grid.png").is_file()


def test_grid_sizes() -> None:
    assert parse_grid("8x8") == (8, 8)
    assert parse_grid("2x10") == (2, 10)
    for text in ("8", "0x8", "8X8", "8x", "x8", "-1x2"):
        with pytest.raises(ValueError, match="rows x columns"):
            parse_grid(text)


def test_a_classifier_cannot_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tmp_path / "nowhere.ckpt")]) == 2
    assert "nowhere.ckpt" in capsys.readouterr().err
    assert main(["sample", "--help"]) == 0
    assert "--guidance" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
