"""Configurations: types, ranges, the nearest key, and 1,000 damaged files that must all be refused in one sentence."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightformer.config import parse_config, read_yaml, recipe_path, recipes
from weightformer.tasks.classification.config import ClassificationConfig


def load(path: Path, *argv: str) -> ClassificationConfig:
    return parse_config(ClassificationConfig, read_yaml(path), argv, where=str(path))


def test_yaml_then_options_on_top() -> None:
    config = load(recipe_path("digits"), "--optim.lr", "0.25", "--model.kwargs.depth", "3", "--data.pad_crop=0")
    assert (config.optim.lr, config.model.kwargs["depth"], config.data.pad_crop) == (0.25, 3, 0)
    assert config.model.in_chans == load(recipe_path("digits")).model.in_chans == 1


def test_a_configuration_survives_its_dictionary() -> None:
    config = load(recipe_path("imagenet_tiny"))
    content = yaml.safe_load(yaml.safe_dump(dataclasses.asdict(config)))
    assert parse_config(ClassificationConfig, content) == config


@pytest.mark.parametrize(
    ("content", "argv", "sentence"),
    [
        ({"optim": {"lrr": 1}}, [], "unknown key 'optim.lrr'; did you mean optim.lr"),
        ({"optm": {"lr": 1}}, [], "unknown key 'optm'; did you mean optim"),
        ({}, ["--optim.lrr", "1"], "unknown option --optim.lrr; did you mean --optim.lr"),
        ({"optim": {"lr": "fast"}}, [], "optim.lr"),
        ({"optim": {"lr": -1}}, [], "optim.lr must be positive"),
        ({"optim": None}, [], "optim must hold keys and values"),
        ({"model": 3}, [], "model must hold keys and values"),
        ({"trainer": {"precision": "half"}}, [], "trainer.precision"),
        ({"trainer": {"epochs": 0}}, [], "trainer.epochs must be at least 1"),
        ({"mix": {"prob": 2}}, [], "mix.prob"),
        ({"task": "detection"}, [], "not one for task 'detection'"),
        ({3: 4}, [], "unknown key '3'"),
    ],
)
def test_what_is_wrong_is_said(content: Any, argv: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^here: ") as caught:
        parse_config(ClassificationConfig, content, argv, where="here")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b", "a: b: c", "\x00", "42", "!!python/object/apply:os.system [ls]"])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        load(path)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(FileNotFoundError, match="did you mean fashion_mnist"):
        recipe_path("fashion_mnits")


def test_a_thousand_damaged_files(tmp_path: Path) -> None:
    """Each is either a valid configuration or refused in one sentence that names the file; the file stays as it is."""
    rng = random.Random(0)
    path, outcomes = tmp_path / "mutant.yaml", {"refused": 0, "accepted": 0}
    originals = [recipe_path(name).read_bytes() for name in recipes()]
    for _ in range(1000):
        damaged = _mutate(rng, rng.choice(originals))
        path.write_bytes(damaged)
        sentence = _refusal(path)
        outcomes["refused" if sentence else "accepted"] += 1
        assert not sentence or ("mutant.yaml" in sentence and "\n" not in sentence), sentence
        assert path.read_bytes() == damaged
    assert min(outcomes.values()) > 100, outcomes


def _refusal(path: Path) -> str:
    """Why a file is refused; empty if it is accepted. Anything but a ValueError fails the test."""
    try:
        load(path)
    except ValueError as error:
        return str(error)
    return ""


def _mutate(rng: random.Random, text: bytes) -> bytes:
    kind = rng.randrange(6)
    at = rng.randrange(len(text))
    if kind == 0:  # a flipped byte
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 1:  # a lost end
        return text[:at]
    lines = text.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    if kind == 2:  # a line lost, doubled or moved
        lines.insert(rng.randrange(len(lines)), lines.pop(i))
    elif kind == 3:
        lines[i] = lines[i].replace(b": ", rng.choice([b": x", b": -", b":", b": [", b": null #", b": 1e999 #"]), 1)
    elif kind == 4:
        lines[i] = b"  " + lines[i]
    else:
        lines[i] = lines[i].replace(rng.choice([b"e", b"a", b"t"]), rng.choice([b"", b"o"]), 1)
    return b"".join(lines)


def test_a_key_that_stands_twice_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("base: &b {x: 1, y: 2}\nvariants:\n  a: {<<: *b, x: 3}\n  1: {}\n  '1': {}\n")
    assert read_yaml(path)["variants"]["a"] == {"x": 3, "y": 2}
    path.write_text("variants:\n  a: {x: 1}\n  b: {}\n  a: {x: 2}\n")
    with pytest.raises(ValueError, match=r"grid\.yaml is not valid YAML: key 'a' twice .* line 4, column 3"):
        read_yaml(path)
