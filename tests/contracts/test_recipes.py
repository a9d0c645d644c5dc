"""Every shipped recipe is a valid configuration of a model that exists, with a header that says how to run it."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import timm

from weightformer.cli import TASKS
from weightformer.config import parse_config, read_yaml, recipe_path, recipes
from weightformer.models.denoiser import DENOISERS

ROOT = Path(__file__).parents[2]


def test_the_recipes_are_there() -> None:
    named = {"digits", "fashion_mnist", "finetune", "imagenet_tiny", "imagenet_small", "imagenet_base"}
    named |= {f"coco_{head}_{size}" for head in ("mask", "cascade") for size in ("tiny", "small")} | {
        "scenes_detection"
    }
    named |= {"ade20k_upernet_tiny", "ade20k_upernet_small", "scenes_segmentation"}
    named |= {f"imagenet256_{size}_{patch}" for size in "sb" for patch in (2, 4, 8)} | {"fashion_denoiser"}
    assert set(recipes()) >= named


@pytest.fixture(params=recipes())
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


def parse(recipe: str, argv: list[str]) -> Any:
    content = read_yaml(recipe_path(recipe))
    task = importlib.import_module(TASKS[content["task"]])
    return parse_config(task.Config, content, argv, where=recipe)


def test_parses_and_names_a_model_that_exists(recipe: str) -> None:
    config = parse(recipe, [])
    assert timm.is_model(config.model.name) or config.model.name in DENOISERS
    assert config.output == f"runs/{recipe}", "recipes must not write into each other's folders"


def twins(recipe: str) -> dict[str, str]:
    """Options that turn a recipe into a model to compare with, by name, from its header."""
    return dict(re.findall(r"^#   (\w+) +(--.*)$", recipe_path(recipe).read_text(), re.MULTILINE))


def test_the_documents_compare_with_the_twins_of_the_recipe() -> None:
    assert twins("fashion_mnist").keys() == {"static", "DeiT"}
    for document in ("README.md", "docs/classification.md", "docs/reproducing.md"):
        text = " ".join((ROOT / document).read_text().replace("\\\n", " ").split())
        for options in twins("fashion_mnist").values():
            assert options in text, f"{document} does not give {options}"


def test_header_gives_a_command_that_is_accepted_and_a_result(recipe: str) -> None:
    header = re.match(r"(#.*\n)+", recipe_path(recipe).read_text())
    assert header
    command = re.search(r"Command: (?:torchrun .*-m )?weightformer train --config (\w+)(.*)", header[0])
    assert command, header[0]
    assert command[1] == recipe
    parse(recipe, shlex.split(command[2]))
    for twin in twins(recipe).values():
        parse(recipe, shlex.split(twin))
    assert re.search(r"[Rr]esult: \S", header[0]), "the header must give the result reached, or say `not run here`"


def value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


COCO = {
    "data.image_size": 1024, "data.jitter": (0.1, 2.0), "data.hflip": 0.5, "model.kwargs": {"drop_path_rate": 0.1},
    "head.strides": [4, 8, 16, 32], "head.channels": 256, "head.fc_channels": 1024, "head.num_convs": 4,
    "head.window": 0, "optim.lr": 1e-4, "optim.warmup_lr": 1e-7, "optim.min_lr": 0, "optim.schedule": "linear",
    "optim.betas": (0.9, 0.999), "optim.weight_decay": 0.1, "optim.clip_norm": 0, "trainer.precision": "16-mixed",
}  # fmt: skip
ADE20K = {
    "data.reduce_zero_label": True, "data.crop_size": 512, "data.short_side": 512, "data.scale": (0.5, 2.0),
    "data.cat_max_ratio": 0.75, "data.hflip": 0.5, "data.photometric": True, "infer.mode": "slide",
    "infer.window": 512, "infer.stride": 341, "head.dropout": 0.1, "head.norm": "sync_batch", "head.aux_channels": 256,
    "head.aux_weight": 0.4, "optim.lr": 6e-5, "optim.warmup_lr": 6e-11, "optim.min_lr": 0, "optim.schedule": "linear",
    "optim.weight_decay": 0.01, "optim.clip_norm": 0, "trainer.precision": "32-true",
}  # fmt: skip


def check_run(config: Any, images: int, *, batch: int, steps: int, warmup: int, layer_decay: float) -> None:
    """A run of so many steps of a global batch, which the learning rate is given for."""
    per_epoch = images // batch
    assert config.data.batch_size * config.trainer.devices == config.optim.lr_batch == batch
    assert per_epoch * config.trainer.epochs == pytest.approx(steps, rel=0.5 * per_epoch / steps)
    assert round(config.optim.warmup_epochs * per_epoch) == pytest.approx(warmup, abs=1)
    assert config.optim.layer_decay == layer_decay


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("head", ["mask", "cascade"])
def test_settings_of_coco(head: str, size: str) -> None:
    """Vim's text and detector (arXiv 2401.09417), on the 118,287 images of 2017; both schedules, and DeiT's decay."""
    recipe = f"coco_{head}_{size}"
    config = parse(recipe, [])
    assert {name: value(config, name) for name in COCO} == COCO
    assert (config.head.kind, config.model.name) == (head, f"weightformer_{size}")
    check_run(config, 118_287, batch=64, steps=380_000, warmup=250, layer_decay=0.78)
    deit = parse(recipe, shlex.split(twins(recipe)["DeiT"]))
    assert (deit.model.name, deit.head.window, deit.optim.layer_decay) == (f"deit_{size}_patch16_224", 14, 0.7)
    stem, theirs = config.optim.layer_decay**17, deit.optim.layer_decay**12
    assert stem == pytest.approx(theirs, rel=0.1)
    header = " ".join(recipe_path(recipe).read_text().replace("\n# ", " ").split())
    assert "its code 184,375 steps (--trainer.epochs 100), the rate falling by ten at 89 and 96 %" in header
    assert ("45.0 and mask AP 38.3" in header) == (recipe == "coco_cascade_tiny"), "the paper reports that one"


@pytest.mark.parametrize(
    ("size", "channels", "rate", "decay"), [("tiny", 192, (2e-4, 0.1), 0.92), ("small", 384, (1e-4, 0.05), 0.95)]
)
def test_settings_of_ade20k(size: str, channels: int, rate: tuple[float, float], decay: float) -> None:
    """Vim's text and its code (arXiv 2401.09417), on ADE20K's 20,210 images."""
    recipe = f"ade20k_upernet_{size}"
    config = parse(recipe, [])
    assert {name: value(config, name) for name in ADE20K} == ADE20K
    assert (config.head.channels, config.model.name) == (channels, f"weightformer_{size}")
    check_run(config, 20_210, batch=16, steps=160_000, warmup=1500, layer_decay=1.0)
    code = parse(recipe, shlex.split(twins(recipe)["code"]))
    check_run(code, 20_210, batch=32, steps=60_000, warmup=1500, layer_decay=decay)
    assert (code.optim.lr, code.optim.weight_decay) == rate
