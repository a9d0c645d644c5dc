"""Scenes, a small configuration and a shortly trained detector that the tests of this folder share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.tasks.detection import Config, train
from weightformer.tasks.scenes import SceneOptions, write_scenes

SMALL = {
    "model.kwargs": "{'embed_dim': 16, 'depth': 2}", "head.channels": 16, "head.fc_channels": 32, "head.num_convs": 1,
    "head.proposals": 40, "head.roi_samples": 16, "head.rpn_samples": 32, "head.detections": 20,
    "trainer.accelerator": "cpu", "trainer.log_every": 1, "data.batch_size": 4, "data.image_size": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COCO's part of a few scenes of 64 px, with crowds, empty scenes and gaps between the category ids."""
    options = SceneOptions(height=64, width=64, train=16, val=9, scale=(20, 40), objects=(1, 3), crowd=0.3, empty=0.1)
    return write_scenes(tmp_path_factory.mktemp("data") / "scenes", options) / "coco"


@pytest.fixture(scope="session")
def small_config(scenes: Path) -> Callable[..., Config]:
    """Builds the recipe ``scenes_detection`` with a small model; options as on the command line."""

    def build(**options: Any) -> Config:
        given = SMALL | {"data.root": scenes} | {key.replace("__", "."): value for key, value in options.items()}
        argv = [f"--{key}={value}" for key, value in given.items()]
        return parse_config(Config, read_yaml(recipe_path("scenes_detection")), argv)

    return build


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, small_config: Callable[..., Config]) -> Path:
    """The output folder of a short run: two epochs, after which a box here and there is found."""
    folder = tmp_path_factory.mktemp("runs") / "scenes"
    train(small_config(output=folder, trainer__epochs=2, trainer__val_every=2, head__score_threshold=0.01))
    return folder


@pytest.fixture
def coco_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes an annotation file and its images (20 x 30 px) and returns its path."""

    def write(annotations: list[dict[str, Any]], categories: list[int] = (3, 7, 90), images: int = 2) -> Path:  # type: ignore[assignment]
        folder = tmp_path / "coco"
        for split in ("train2017", "val2017"):
            (folder / split).mkdir(parents=True, exist_ok=True)
            for number in range(1, images + 1):
                pixels = np.random.default_rng(number).integers(0, 255, (20, 30), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"{number}.png")
        content = {
            "images": [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 30} for i in range(1, images + 1)],
            "annotations": annotations,
            "categories": [{"id": number, "name": f"kind {number}"} for number in categories],
        }
        (folder / "annotations").mkdir(exist_ok=True)
        for split in ("train2017", "val2017"):
            path = folder / "annotations" / f"instances_{split}.json"
            path.write_text(json.dumps(content))
        return path

    return write
