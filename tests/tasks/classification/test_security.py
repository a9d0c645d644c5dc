"""A file that asks to run code is refused by every verb that reads one, and nothing is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from weightformer.cli import main
from weightformer.tasks.classification import read_checkpoint
from weightformer.tasks.classification.module import ClassificationModule


class Hostile:
    """Makes a marker file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile_marker",)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hostile checkpoint at the place a run would resume from, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": Hostile(), "hyper_parameters": {"config": {}, "class_names": []}}, path)
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    return path


SMALL = ["--model.kwargs", "{'embed_dim': 16, 'depth': 2}", "--trainer.accelerator", "cpu", "--data.image_size", "16"]


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "{file}"],
        ["eval", "{file}", "--config", "digits", *SMALL],
        ["predict", "{file}", "image.png"],
        ["train", "--config", "digits", "--output", "run", *SMALL],
        ["train", "--config", "digits", "--output", "other", "--model.weights", "{file}", *SMALL],
    ],
    ids=["eval", "eval-weights", "predict", "resume", "fine-tune"],
)
def test_no_verb_runs_code(hostile: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = hostile.read_bytes()
    assert main([a.replace("{file}", str(hostile)) for a in argv]) == 2
    error = capsys.readouterr().err
    assert "last.ckpt was refused" in error
    assert "system" in error
    assert not Path("hostile_marker").exists()
    assert hostile.read_bytes() == before


def test_hyper_parameters_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys by which other tools name something to call are unknown keys here."""
    for key in ("_target_", "_instantiator", "class_path"):
        stored = {"config": {key: "os.system", "model": {"name": "weightformer_micro"}}, "class_names": ["a"]}
        torch.save({"state_dict": {}, "hyper_parameters": stored}, tmp_path / "file.ckpt")
        assert main(["eval", str(tmp_path / "file.ckpt")]) == 2
        assert f"unknown key '{key}'" in capsys.readouterr().err


def test_our_checkpoint_is_plain_data(trained: Path) -> None:
    path = trained / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    module = ClassificationModule.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert module.class_names == content["hyper_parameters"]["class_names"]
    stored = content["state_dict"]
    assert all(torch.equal(v, stored[k]) for k, v in module.state_dict().items())


def test_missing_averaged_weights_are_named(trained: Path, tmp_path: Path) -> None:
    content = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    content["hyper_parameters"]["config"]["trainer"]["ema_decay"] = 0.99
    torch.save(content, tmp_path / "raw.ckpt")
    with pytest.warns(UserWarning, match=r"raw\.ckpt holds no averaged \(EMA\) weights"):
        read_checkpoint(tmp_path / "raw.ckpt")
