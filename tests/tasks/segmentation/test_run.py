"""Train, evaluate and predict on scenes of real digits, through the command line where a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from kills import run_killed
from weightformer.cli import main
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.models.checkpoint import read_state_dict
from weightformer.tasks.segmentation import Config, evaluate, read_checkpoint, train
from weightformer.tasks.segmentation.masks import read_values, to_labels
from weightformer.tasks.segmentation.module import SegmentationModule

NAMES = ["backdrop", "zero", "one", "four"]


def test_outputs_of_a_run(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} >= {"config.yaml", "log.jsonl", "checkpoints", "model.safetensors"}
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert {"train/loss_step", "val/miou", "lr"} <= {key for record in records for key in record}
    losses = [record["train/loss_step"] for record in records if "train/loss_step" in record]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    config, names = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    assert names == NAMES
    assert config["task"] == "segmentation"
    weights = read_state_dict(trained / "model.safetensors")
    content = read_state_dict(trained / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.equal(value, content[f"model.{key}"]) for key, value in weights.items())


def test_it_learned_to_tell_the_digits_apart(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained / "checkpoints" / "last.ckpt"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images"] == 21
    assert list(result["iou"]) == NAMES
    assert result["miou"] == pytest.approx(np.mean(list(result["iou"].values())))
    assert result["miou"] > 0.6
    assert min(result["iou"].values()) > 0.4
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert result["miou"] == pytest.approx([r["val/miou"] for r in records if "val/miou" in r][-1], abs=1e-6)


def test_eval_prints_classes_below_the_means(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained / "checkpoints" / "last.ckpt")]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"miou 0\.\d{4}  mean_accuracy 0\.\d{4}  accuracy 0\.\d{4}  images 21", first)
    assert [line.split()[0] for line in rest] == ["iou", *NAMES]


def test_windows_and_batches_in_evaluation(trained: Path) -> None:
    content, names = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    checkpoint = trained / "checkpoints" / "last.ckpt"
    whole = evaluate(parse_config(Config, content), checkpoint, names)
    alone = evaluate(parse_config(Config, content, ["--data.val_batch_size", "1"]), checkpoint, names)
    assert alone["miou"] == pytest.approx(whole["miou"], abs=1e-3)
    slide = evaluate(parse_config(Config, content, ["--infer.mode", "slide"]), checkpoint, names)
    assert slide["miou"] != whole["miou"]
    assert slide["miou"] > 0.5


def test_two_processes_train_and_count_as_one_does(tmp_path: Path, content: Callable[..., dict[str, Any]]) -> None:
    """A parameter outside of the loss would stop the second step; the masks of 21 images are counted once each."""
    settings = content(tmp_path / "run", trainer__devices=2, data__batch_size=16, head__norm="group")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "weightformer", "train", "--config", str(tmp_path / "config.yaml")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "images 21" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    counted = next(record for record in records if "val/miou" in record)
    settings["trainer"]["devices"] = 1
    alone = evaluate(parse_config(Config, settings), tmp_path / "run" / "checkpoints" / "last.ckpt")
    for name in ("miou", "mean_accuracy", "accuracy"):
        assert counted[f"val/{name}"] == pytest.approx(alone[name], rel=1e-6), name


def test_a_run_stopped_and_resumed_is_bit_identical(
    tmp_path: Path, content: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> Any:
        settings = content(folder, trainer__epochs=2, trainer__checkpoint_every=4, trainer__ema_decay=0.9)
        return parse_config(Config, settings)

    class Stop(Exception):  # noqa: N818 - no error
        pass

    straight = train(run(tmp_path / "straight"))
    step, calls = SegmentationModule.training_step, []

    def stop_at_twenty(self: Any, batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) == 20:
            raise Stop
        return step(self, batch, batch_idx)

    monkeypatch.setattr(SegmentationModule, "training_step", stop_at_twenty)
    with pytest.raises(Stop):
        train(run(tmp_path / "stopped"))
    monkeypatch.undo()
    assert 0 < read_state_dict(tmp_path / "stopped" / "checkpoints" / "last.ckpt")["global_step"] < 20
    assert train(run(tmp_path / "stopped")) == straight
    contents = [read_state_dict(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("straight", "stopped")]
    for key, value in contents[0]["state_dict"].items():
        assert torch.equal(value, contents[1]["state_dict"][key]), key


BACKBONES = {
    "weightformer_tiny": {"embed_dim": 16, "depth": 4},
    "deit_tiny_patch16_224": {"embed_dim": 16, "depth": 4, "num_heads": 2},
    "convnext_atto": {"dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "pvt_v2_b0": {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("name", BACKBONES)
def test_any_backbone_in_the_recipe(scenes: Path, tmp_path: Path, name: str) -> None:
    """Steps of training, an evaluation and a prediction under ADE20K's recipe, with the layer decay of Vim's code."""
    root = tmp_path / "scenes"
    for split, count in (("training", 6), ("validation", 2)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
            for path in sorted((scenes / kind / split).iterdir())[-count:]:
                shutil.copy(path, root / kind / split)
    shutil.copy(scenes / "objectInfo150.txt", root)
    options = {
        "output": tmp_path / "run", "data.root": root, "model.name": name, "model.kwargs": BACKBONES[name],
        "data.short_side": 64, "data.crop_size": 64, "data.batch_size": 2, "data.num_workers": 0, "infer.window": 64,
        "infer.stride": 43, "trainer.devices": 1, "trainer.epochs": 1, "trainer.accelerator": "cpu",
        "head.channels": 16, "head.aux_channels": 16, "optim.layer_decay": 0.92,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    config = parse_config(Config, read_yaml(recipe_path("ade20k_upernet_tiny")), argv)
    assert train(config)["images"] == 2
    weights, image = tmp_path / "run" / "checkpoints" / "last.ckpt", root / "images" / "validation" / "020.png"
    assert main(["predict", str(weights), str(image), "--save", str(tmp_path / "out")]) == 0
    assert Image.open(tmp_path / "out" / "masks" / "020.png").size == Image.open(image).size


def test_a_killed_run_goes_on(tmp_path: Path, content: Callable[..., dict[str, Any]]) -> None:
    """SIGKILL amid the epoch; the same command then ends on the weights of a run that was not killed."""
    settings = {name: content(tmp_path / name, trainer__checkpoint_every=4) for name in ("killed", "whole")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings["killed"]))
    command = ["train", "--config", str(tmp_path / "config.yaml")]
    run_killed(SegmentationModule, 11, command)
    assert main(command) == 0
    assert (tmp_path / "killed" / "log.jsonl").read_text().count('"step": 0,') == 1, "it began anew"
    train(parse_config(Config, settings["whole"]))
    ours, whole = (read_state_dict(tmp_path / n / "checkpoints" / "last.ckpt")["state_dict"] for n in settings)
    for key, value in whole.items():
        assert torch.equal(value, ours[key]), key


@pytest.fixture
def photos(scenes: Path, tmp_path: Path) -> Path:
    """Images of several sizes and kinds, and two files that are none."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for i in (0, 12):
        image = Image.open(scenes / "images" / "validation" / f"{i:03d}.png")
        image.save(folder / f"{i:03d}.png")
    image.convert("RGB").save(folder / "012.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(folder / "more" / "012.png", exif=exif)
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "empty.jpg").touch()
    return folder


def test_predict_writes_masks_and_overlays(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["predict", str(trained / "checkpoints" / "last.ckpt"), str(photos), "--save", str(out)]) == 1
    error = capsys.readouterr().err
    assert "2 image(s) could not be read" in error
    written = {str(path.relative_to(out)) for path in out.rglob("*.png")}
    names = ("000.png", "012.jpg.png", "012.png.png", "more/012.png")
    assert written == {f"{kind}/{name}" for kind in ("masks", "overlays") for name in names}
    for name, source in (("000.png", "000.png"), ("012.png.png", "012.png")):
        mask = Image.open(out / "masks" / name)
        assert mask.mode == "P"
        assert mask.size == Image.open(photos / source).size
    upright, turned = (read_values(out / "masks" / name, 10**6) for name in ("012.png.png", "more/012.png"))
    assert np.array_equal(upright, turned)
    assert Image.open(out / "overlays" / "000.png").width > 448


def test_predicted_masks_are_read_back_as_the_data_set_s_own(trained: Path, scenes: Path, tmp_path: Path) -> None:
    """Counting the files written by predict gives the mIoU of eval, so the values' offset is the data set's."""
    checkpoint = trained / "checkpoints" / "last.ckpt"
    assert main(["predict", str(checkpoint), str(scenes / "images" / "validation"), "--save", str(tmp_path)]) == 0
    union, right = np.zeros(4), np.zeros(4)
    for path in sorted((scenes / "annotations" / "validation").iterdir()):
        truth, found = (
            to_labels(read_values(file, 10**6), 4, reduce_zero_label=True, path=file).numpy()
            for file in (path, tmp_path / "masks" / path.name)
        )
        assert truth.shape == found.shape
        assert found.max() < 4
        for label in range(4):
            a, b = (truth == label), (found == label) & (truth != 255)
            right[label] += (a & b).sum()
            union[label] += (a | b).sum()
    content, names = read_checkpoint(checkpoint)
    assert (right / union).mean() == pytest.approx(
        evaluate(parse_config(Config, content), checkpoint, names)["miou"], abs=1e-3
    )


def test_predict_to_the_terminal(trained: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(trained / "checkpoints" / "last.ckpt"), str(photos / "000.png")]) == 0
    output = capsys.readouterr().out
    assert "48 x 48" in output
    assert "backdrop" in output


def test_large_images_name_the_setting_and_go_through_windows(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (700, 900), 30).save(tmp_path / "large.png")
    words = [
        "predict",
        str(trained / "checkpoints" / "last.ckpt"),
        str(tmp_path / "large.png"),
        "--save",
        str(tmp_path),
    ]
    assert main([*words, "--data.max_pixels", "600000"]) == 1
    assert re.search(r"large\.png.*more than data\.max_pixels", " ".join(capsys.readouterr().err.split()))
    assert main([*words, "--infer.mode", "slide", "--infer.window", "256", "--infer.stride", "200"]) == 0
    assert Image.open(tmp_path / "masks" / "large.png").size == (700, 900)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.ckpt", "x.png"], "no weight file at nowhere.ckpt"),
        (["{ckpt}", "nowhere.png"], "nowhere.png"),
        (["{ckpt}", "{ckpt}", "--save", "out.csv"], "folder"),
        (["{ckpt}", "{ckpt}", "--infer.windows", "1"], "did you mean --infer.window"),
    ],
)
def test_predict_refuses_in_one_sentence(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    arguments = [a.format(ckpt=trained / "checkpoints" / "last.ckpt") for a in arguments]
    assert main(["predict", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error


def test_weights_with_a_configuration(trained: Path) -> None:
    done = main(["eval", str(trained / "model.safetensors"), "--config", str(trained / "config.yaml"), "--json"])
    assert done == 0


def test_evaluation_is_strict(trained: Path, tmp_path: Path, content: Callable[..., dict[str, Any]]) -> None:
    config = parse_config(Config, content(tmp_path, head__channels=32))
    with pytest.raises(ValueError, match=r"does not fit the model .*decode_head"):
        evaluate(config, trained / "checkpoints" / "last.ckpt")


def test_batch_norm_on_one_image_a_process_says_what_to_do(
    tmp_path: Path, content: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size 2 or more, or head\.norm: group"):
        train(parse_config(Config, content(tmp_path / "batch", data__batch_size=1)))
    config = parse_config(Config, content(tmp_path / "group", data__batch_size=1, head__norm="group"))
    assert train(config)["images"] == 21
