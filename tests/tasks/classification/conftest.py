"""A trained classifier that the tests of this folder share: two minutes of nobody's time, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.tasks.classification import Config, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a short run of the digits recipe with a small model."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    options = {
        "output": folder, "data.image_size": 16, "model.kwargs": "{'embed_dim': 32, 'depth': 3}",
        "trainer.epochs": 8, "trainer.val_every": 8, "trainer.accelerator": "cpu", "optim.lr": 5e-3,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    train(parse_config(Config, read_yaml(recipe_path("digits")), argv))
    return folder
