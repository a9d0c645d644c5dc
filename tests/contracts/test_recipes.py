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
