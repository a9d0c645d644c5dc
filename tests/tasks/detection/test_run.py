"""Train, resume, evaluate and predict on real scenes, through the command line where a user would."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from kills import run_killed
from weightformer.cli import main
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.models.checkpoint import read_state_dict, save_weights
from weightformer.tasks.detection import Config, evaluate, predict, read_checkpoint, train
from weightformer.tasks.detection.coco import CocoSet, decode_mask
from weightformer.tasks.detection.metrics import coco_metrics
from weightformer.tasks.detection.module import DetectionModule


def checkpoint(folder: Path) -> str:
    return str(folder / "checkpoints" / "last.ckpt")


def test_outputs_of_a_run(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} >= {"config.yaml", "log.jsonl", "checkpoints", "tensorboard"}
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    keys = {key for record in records for key in record}
    assert keys >= {"train/loss_step", "train/loss_mask", "val/box_ap", "val/mask_ap75", "val/box_ap_small", "lr"}
    losses = [record["train/loss_step"] for record in records if "train/loss_step" in record]
    assert losses[-1] < losses[0]
    config, categories = read_checkpoint(checkpoint(trained))
    assert config["task"] == "detection"
    assert list(categories) == [1, 3, 4, 7, 8, 11, 13, 21, 27, 90]
    assert categories[90] == "Shirt"


def test_eval_repeats_the_last_evaluation(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", checkpoint(trained), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    logged = [record for record in records if "val/box_ap" in record][-1]
    for name, value in result.items():
        assert value == pytest.approx(logged[f"val/{name}"], abs=1e-6), name


def test_eval_is_the_same_for_two_processes(trained: Path) -> None:
    """Nine images, in batches of two: uneven shares, and an empty batch."""
    command = [sys.executable, "-m", "weightformer", "eval", checkpoint(trained), "--json", "--data.batch_size", "2"]
    results = []
    for devices in ("1", "2"):
        done = subprocess.run(
            [*command, "--trainer.devices", devices],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert results[0] == pytest.approx(results[1], abs=1e-9)
    assert results[0]["box_ap50"] > 0


def test_a_stopped_run_ends_where_it_would_have(
    trained: Path, small_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Stopped in the second epoch and started again, its weights are those of the run that was not."""
    config = small_config(
        output=tmp_path / "run", trainer__epochs=2, trainer__val_every=2, head__score_threshold=0.01,
        trainer__checkpoint_every=5,
    )  # fmt: skip
    from weightformer.tasks.detection.module import DetectionModule

    original, steps = DetectionModule.training_step, 0

    def stop(self: DetectionModule, batch: object, batch_idx: int) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise KeyboardInterrupt
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DetectionModule, "training_step", stop)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(config)
    train(config)
    ours, whole = (read_state_dict(checkpoint(folder))["state_dict"] for folder in (tmp_path / "run", trained))
    assert ours.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0, msg=name)


def test_two_processes_train_without_flags(small_config: Callable[..., Config], tmp_path: Path) -> None:
    """DDP raises at the second step if a parameter had no gradient in the first."""
    command = [sys.executable, "-m", "weightformer", "train", "--config", "scenes_detection", "--output", str(tmp_path)]
    config = small_config()
    options = {
        "data.root": config.data.root, "data.image_size": 32, "data.batch_size": 4, "trainer.devices": 2,
        "trainer.epochs": 1, "trainer.accelerator": "cpu", "model.kwargs": "{embed_dim: 16, depth: 2}",
        "head.kind": "cascade", "head.channels": 16, "head.proposals": 20,
    }  # fmt: skip
    done = subprocess.run(
        [*command, *(f"--{key}={value}" for key, value in options.items())],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "box_ap" in done.stdout


BACKBONES = {
    "weightformer_tiny": {"embed_dim": 16, "depth": 2},
    "deit_tiny_patch16_224": {"embed_dim": 16, "depth": 4, "num_heads": 2},
    "convnext_atto": {"dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "pvt_v2_b0": {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("head", ["mask", "cascade"])
@pytest.mark.parametrize("name", BACKBONES)
def test_any_backbone_in_the_recipes(coco_file: Callable[..., Path], tmp_path: Path, head: str, name: str) -> None:
    """A step of training, an evaluation and a prediction under COCO's recipes, optimiser, jitter and all."""
    outline = [4, 5, 12, 5, 12, 11, 4, 11]
    root = coco_file(
        [{"id": 1, "image_id": 1, "category_id": 7, "bbox": [4, 5, 8, 6], "segmentation": [outline]}]
    ).parent.parent
    options = {
        "output": tmp_path / "run", "data.root": root, "model.name": name, "model.kwargs": BACKBONES[name],
        "data.image_size": 96, "data.batch_size": 2, "data.num_workers": 0, "trainer.devices": 1, "trainer.epochs": 1,
        "trainer.precision": "32-true", "trainer.accelerator": "cpu", "head.channels": 16, "head.fc_channels": 32,
        "head.proposals": 30, "head.score_threshold": 0.01, "head.window": 3 * name.startswith("deit"),
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    config = parse_config(Config, read_yaml(recipe_path(f"coco_{head}_tiny")), argv)
    assert 0 <= train(config)["box_ap"] <= 1
    weights, save = checkpoint(tmp_path / "run"), tmp_path / "found.json"
    assert main(["predict", weights, str(root / "val2017"), "--save", str(save)]) == 0
    assert {record["category_id"] for record in json.loads(save.read_text())} <= {3, 7, 90}


def test_a_killed_run_goes_on(small_config: Callable[..., Config], trained: Path, tmp_path: Path) -> None:
    """SIGKILL amid the second epoch; the same command then ends on the weights of the run that was not killed."""
    config = small_config(output=tmp_path / "run", trainer__epochs=2, trainer__val_every=2,
                          trainer__checkpoint_every=5, head__score_threshold=0.01)  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    command = ["train", "--config", str(tmp_path / "config.yaml")]
    run_killed(DetectionModule, 7, command)
    assert not (tmp_path / "run" / "log.jsonl").read_text().count("val/box_ap")
    assert main(command) == 0
    assert (tmp_path / "run" / "log.jsonl").read_text().count('"step": 0,') == 1, "it began anew"
    ours, whole = (read_state_dict(checkpoint(folder))["state_dict"] for folder in (tmp_path / "run", trained))
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("released", [False, True])
def test_backbone_weights_load_with_one_line(
    small_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str], released: bool
) -> None:
    start = timm.create_model("weightformer_micro", num_classes=7, in_chans=1, embed_dim=16, depth=2)
    save_weights(start, tmp_path / "start.safetensors", released=released)
    from weightformer.tasks.detection.module import DetectionModule

    module = DetectionModule(small_config(model__weights=tmp_path / "start.safetensors"), {1: "a"})
    for name, value in module.model.trunk.body.state_dict().items():
        torch.testing.assert_close(value, start.state_dict()[name])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "start.safetensors" in line
    assert "head for 7 classes was dropped" in line


def test_predict_writes_coco_results_and_pictures(trained: Path, scenes: Path, tmp_path: Path) -> None:
    """Files named as COCO names them give results that COCO's evaluation takes, and score what eval scores."""
    weights = checkpoint(trained)
    save, pictures = tmp_path / "found.json", tmp_path / "pictures"
    arguments = ["--save", str(save), "--pictures", str(pictures), "--threshold", "0.02"]
    assert main(["predict", weights, str(scenes / "val2017"), *arguments]) == 0
    results = json.loads(save.read_text())
    coco = CocoSet(scenes / "annotations" / "instances_val2017.json", scenes / "val2017")
    assert {record["category_id"] for record in results} <= set(coco.categories)
    assert max(record["category_id"] for record in results) > 10, "ids are the file's own"
    for record in results[:20]:
        assert decode_mask(record["segmentation"], 64, 64).shape == (64, 64)
        assert Path(record["file_name"]).stem == f"{record['image_id']:012d}"
    config, categories = read_checkpoint(weights)
    assert coco_metrics(coco.ground_truth(), results) == pytest.approx(
        evaluate(parse_config(Config, config), weights, categories), abs=1e-6
    )
    names = sorted(path.name for path in pictures.iterdir())
    assert names == [f"{i:012d}.png" for i in range(1, 10)]
    drawn = [np.asarray(Image.open(pictures / name)) for name in names]
    assert {picture.shape for picture in drawn} == {(512, 512, 3)}
    assert any((picture.std(2) > 20).any() for picture in drawn), "colours on grey images"


def test_predict_odd_files(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unreadable, rotated, tiny, long and coloured images in one folder: all but the first are answered."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"not an image")
    noise = np.random.default_rng(0).integers(0, 255, (40, 90, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise).save(folder / "rotated.jpg", exif=exif)
    Image.fromarray(noise[:3, :2]).save(folder / "tiny.png")
    Image.fromarray(noise[:4]).save(folder / "long.png")
    (folder / "sub").mkdir()
    Image.fromarray(noise).save(folder / "sub" / "tiny.png")
    save = tmp_path / "found.json"
    pictures = tmp_path / "pictures"
    assert main(["predict", checkpoint(trained), str(folder), "--save", str(save), "--pictures", str(pictures)]) == 1
    error = capsys.readouterr().err
    assert "broken.png" in error
    assert "1 image(s) could not be read" in error
    for record in json.loads(save.read_text()):
        name = Path(record["file_name"])
        with Image.open(name) as image:
            width, height = image.size[::-1] if name.stem == "rotated" else image.size
        assert record["segmentation"]["size"] == [height, width], "results are those of the upright image"
        x, y, w, h = record["bbox"]
        assert x >= -1e-3
        assert y >= -1e-3
        assert x + w <= width + 1e-3
        assert y + h <= height + 1e-3
    assert sorted(path.name for path in pictures.iterdir()) == ["long.png", "rotated.png", "tiny.png", "tiny_2.png"]
    with Image.open(pictures / "rotated.png") as picture:
        assert picture.width < picture.height
    assert main(["predict", checkpoint(trained), str(folder)]) == 1
    assert "unreadable" in capsys.readouterr().out


def test_predict_finds_nothing(trained: Path, scenes: Path, tmp_path: Path) -> None:
    config, categories = read_checkpoint(checkpoint(trained))
    strict = parse_config(Config, config, ["--head.score_threshold", "1.0"])
    assert evaluate(strict, checkpoint(trained), categories)["box_ap"] == 0.0
    assert predict(strict, checkpoint(trained), categories, [scenes / "val2017"], save=tmp_path / "none.json") == 0
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_too_many_pixels_name_the_setting(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("1", (15_000, 15_000)).save(tmp_path / "huge.png")
    save = tmp_path / "found.json"
    assert main(["predict", checkpoint(trained), str(tmp_path / "huge.png"), "--save", str(save)]) == 1
    error = capsys.readouterr().err
    assert "huge.png" in error
    assert "data.max_pixels" in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{ckpt}", "{ckpt}", "--save", "out.csv"], "out.csv"),
        (["{ckpt}", "{ckpt}", "--threshold", "2"], "score in"),
        (["{ckpt}", "nowhere.png"], "nowhere.png"),
        (["nowhere.ckpt", "x.png", "--threshold", "0.2"], "no weight file at nowhere.ckpt"),
        (["{ckpt}", "{ckpt}", "--head.kin", "mask"], "did you mean --head.kind"),
        (["{ckpt}", "{ckpt}", "--top_k", "3"], "--top_k"),
    ],
)
def test_predict_refuses_in_one_sentence(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["predict", *(a.format(ckpt=checkpoint(trained)) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error


def test_a_hostile_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "marker"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    torch.save({"state_dict": {}, "hyper_parameters": Hostile()}, tmp_path / "evil.ckpt")
    for verb in (["eval"], ["predict"]):
        images = [str(tmp_path)] if verb == ["predict"] else []
        assert main([*verb, str(tmp_path / "evil.ckpt"), *images, "--task", "detection"]) == 2
    assert main(["train", "--config", "scenes_detection", "--output", str(tmp_path / "run"),
                 "--data.root", str(tmp_path), "--model.weights", str(tmp_path / "evil.ckpt")]) == 2  # fmt: skip
    assert not marker.exists()
    assert "refused" in capsys.readouterr().err


def test_a_run_continues_only_as_it_was(trained: Path, small_config: Callable[..., Config], tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(ValueError, match=r"other settings \(output, head.roi_samples"):
        train(small_config(output=tmp_path / "run", head__roi_samples=17, trainer__epochs=2, trainer__val_every=2,
                           head__score_threshold=0.01))  # fmt: skip


def test_classification_checkpoints_are_no_detectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {"config": {"task": "classification"}, "class_names": ["a", "b"]}
    torch.save({"state_dict": {}, "hyper_parameters": stored}, tmp_path / "classifier.ckpt")
    assert main(["eval", str(tmp_path / "classifier.ckpt"), "--task", "detection"]) == 2
    assert "a checkpoint of another task: it stores no category_ids" in capsys.readouterr().err
