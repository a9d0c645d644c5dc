"""Small scenes of real handwritten digits in ADE20K's layout, and a model trained on them, once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from weightformer.config import parse_config
from weightformer.tasks.segmentation import Config, train

CLASSES = ["backdrop", "zero", "one", "four"]


def write_scene(
    root: Path, split: str, name: str, digits: Any, rng: np.random.Generator, size: tuple[int, int]
) -> None:
    """Digits of three kinds, 24 px each, on a dark canvas; the mask's top row is not counted."""
    height, width = size
    canvas, mask = rng.integers(0, 40, size, dtype=np.uint8), np.ones(size, np.uint8)
    for top in range(0, height - 23, 24):
        for left in range(0, width - 23, 24):
            item = rng.choice(np.flatnonzero(np.isin(digits.target, (0, 1, 4))))
            pixels = Image.fromarray((digits.images[item] * (255 / 16)).astype(np.uint8)).resize((24, 24))
            inside = np.asarray(pixels) > 80
            canvas[top : top + 24, left : left + 24][inside] = np.asarray(pixels)[inside]
            mask[top : top + 24, left : left + 24][inside] = {0: 2, 1: 3, 4: 4}[int(digits.target[item])]
    mask[0] = 0
    for folder, array in (("images", canvas), ("annotations", mask)):
        path = root / folder / split / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training scenes, and 21 to validate on of three sizes, no multiples of anything."""
    root = tmp_path_factory.mktemp("data") / "digit_scenes"
    digits, rng = load_digits(), np.random.default_rng(0)
    for i in range(120):
        write_scene(root, "training", f"{i:03d}", digits, rng, (48, 48))
    for i in range(21):
        write_scene(root, "validation", f"{i:03d}", digits, rng, [(48, 48), (51, 74), (74, 51)][i // 10])
    names = [f"{i}\t0\t0\t0\t0\t{name}, said so" for i, name in enumerate(CLASSES, 1)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *names]) + "\n")
    return root


@pytest.fixture(scope="session")
def content(scenes: Path) -> Callable[..., dict[str, Any]]:
    """A small run's configuration as a mapping; dotted names change it."""

    def build(output: Path, **changes: Any) -> dict[str, Any]:
        content: dict[str, Any] = {
            "task": "segmentation",
            "output": str(output),
            "model": {"in_chans": 1, "kwargs": {"embed_dim": 16, "depth": 4, "drop_path_rate": 0.1},
                      "mean": [0.2], "std": [0.3]},
            "head": {"channels": 16, "aux_channels": 16},
            "data": {"root": str(scenes), "crop_size": 48, "batch_size": 8, "val_batch_size": 4, "short_side": 0,
                     "scale": [0.8, 1.25], "hflip": 0.0, "cat_max_ratio": 0.95},
            "infer": {"window": 48, "stride": 32},
            "optim": {"lr": 1e-2, "lr_batch": 0, "warmup_epochs": 0.5, "schedule": "linear"},
            "trainer": {"epochs": 1, "accelerator": "cpu", "log_every": 1},
        }  # fmt: skip
        for name, value in changes.items():
            section, key = name.split("__")
            content[section][key] = value
        return content

    return build


@pytest.fixture(scope="session")
def trained(content: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run long enough to tell the digits apart."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(parse_config(Config, content(folder, trainer__epochs=16, trainer__val_every=16)))
    return folder
