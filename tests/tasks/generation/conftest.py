"""What the tests of this folder share: a tiny autoencoder, image files, and short runs of both denoisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.tasks import classification
from weightformer.tasks.generation import Config, train

TWIN: dict[str, Any] = {"name": "dit", "kwargs": {"patch_size": 2, "hidden_size": 32, "depth": 2, "num_heads": 2}}


@pytest.fixture(scope="session")
def tiny_run() -> dict[str, Any]:
    """A configuration's content: two dozen steps of a three-block denoiser on the digits, averaged and evaluated."""
    return {
        "task": "generation",
        "model": {"name": "denoiser_micro", "kwargs": {"patch_size": 2, "hidden_size": 32, "depth": 3}},
        "data": {"source": "digits", "image_size": 8, "batch_size": 128},
        "optim": {"lr": 3e-3, "min_lr": 3e-3, "lr_batch": 0, "warmup_epochs": 0, "weight_decay": 0.0, "clip_norm": 1.0},
        "trainer": {
            "epochs": 3, "val_every": 2, "checkpoint_every": 2, "ema_decay": 0.9, "log_every": 1, "accelerator": "cpu",
        },
        "sampling": {"scheduler": "dpm++", "steps": 4, "guidance": 2.0, "batch_size": 8},
        "score": {"num_samples": 20},
    }  # fmt: skip


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory, tiny_run: dict[str, Any]) -> Path:
    """The output folder of `tiny_run`."""
    folder = tmp_path_factory.mktemp("runs") / "weightformer"
    train(parse_config(Config, tiny_run | {"output": str(folder)}))
    return folder


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory, tiny_run: dict[str, Any]) -> Path:
    """That of its twin."""
    folder = tmp_path_factory.mktemp("runs") / "dit"
    train(parse_config(Config, tiny_run | {"output": str(folder), "model": TWIN}))
    return folder


@pytest.fixture(params=["ours", "twin"])
def trained(request: pytest.FixtureRequest) -> Path:
    """Either."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a classifier of digits at 16 px, to score with."""
    folder = tmp_path_factory.mktemp("classifier")
    options = {
        "output": folder, "data.image_size": 16, "model.kwargs": "{'embed_dim': 16, 'depth': 2}",
        "trainer.epochs": 4, "trainer.val_every": 4, "trainer.accelerator": "cpu", "optim.lr": 5e-3,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    classification.train(parse_config(classification.Config, read_yaml(recipe_path("digits")), argv))
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained AutoencoderKL of two channels at a quarter of the side, with a scaling factor of its own."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=2, block_out_channels=(4, 4, 4), norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1,
        scaling_factor=0.7, shift_factor=2.0, sample_size=16,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty digits of two classes as colour files: train/<class>/ and val/<class>/."""
    folder, digits = tmp_path_factory.mktemp("images"), load_digits()
    for split, rows in (("train", slice(0, 150)), ("val", slice(150, 200))):
        for name, wanted in (("three", 3), ("seven", 7)):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in (digits.target[rows] == wanted).nonzero()[0]:
                pixels = (digits.images[rows][i] * (255 / 16)).round().astype("uint8")
                Image.fromarray(pixels).convert("RGB").resize((20, 16)).save(place / f"{i:03d}.png")
    return folder
