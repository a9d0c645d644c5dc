"""Train, evaluate and predict on real digits, through the command line where a user would."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

from weightformer.cli import main
from weightformer.config import parse_config
from weightformer.models.checkpoint import read_state_dict, save_weights
from weightformer.tasks.classification import Config, evaluate, read_checkpoint, train


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty digits as PNG files, and two files that are no images."""
    folder = tmp_path_factory.mktemp("digits")
    digits = load_digits()
    for i in range(20):
        pixels = (digits.images[i] * (255 / 16)).round().astype("uint8")
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(
            folder / f"{i:02d}_{digits.target[i]}.png"
        )
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "empty.jpg").touch()
    return folder


def test_outputs_of_a_run(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} >= {"config.yaml", "log.jsonl", "checkpoints", "model", "tensorboard"}
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert {"train/loss_step", "val/top1", "lr"} <= {key for record in records for key in record}
    _, names = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    assert names == [str(i) for i in range(10)]


def test_eval_repeats_the_last_evaluation(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained / "checkpoints" / "last.ckpt"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    logged = [record["val/top1"] for record in records if "val/top1" in record][-1]
    assert result["images"] == 360
    assert result["top1"] == pytest.approx(logged, abs=1e-6)
    assert 0.7 < result["top1"] <= result["top5"] <= 1


def test_eval_is_the_same_for_two_processes(trained: Path) -> None:
    """Also with a batch size that leaves the two processes different numbers of images and batches."""
    command = [sys.executable, "-m", "weightformer", "eval", str(trained / "checkpoints" / "last.ckpt"), "--json"]
    command += ["--data.batch_size", "119", "--trainer.accelerator", "cpu"]
    results = []
    for devices in ("1", "2"):
        process = [*command, "--trainer.devices", devices]
        done = subprocess.run(
            process, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert results[0]["images"] == results[1]["images"] == 360
    assert results[0]["top1"] == results[1]["top1"]
    assert results[0]["top5"] == results[1]["top5"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)


def test_exported_model_is_the_trained_one(trained: Path) -> None:
    model = timm.create_model(f"local-dir:{trained / 'model'}", pretrained=True).eval()
    content = read_state_dict(trained / "checkpoints" / "last.ckpt")
    assert all(torch.equal(v, content["state_dict"][f"model.{k}"]) for k, v in model.state_dict().items())
    data = timm.data.resolve_data_config(model=model)
    assert tuple(data["input_size"]) == (1, 16, 16)
    assert data["mean"] == pytest.approx((0.3053,), abs=1e-3)
    assert json.loads((trained / "model" / "config.json").read_text())["label_names"] == [str(i) for i in range(10)]


def test_plain_weights_are_evaluated_with_a_recipe(trained: Path, tmp_path: Path) -> None:
    config, names = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    model = timm.create_model(f"local-dir:{trained / 'model'}", pretrained=True)
    save_weights(model, tmp_path / "released.safetensors", released=True)
    parsed = parse_config(Config, config)
    assert evaluate(parsed, tmp_path / "released.safetensors") == evaluate(
        parsed, trained / "checkpoints" / "last.ckpt", names
    )


def test_evaluation_is_strict(trained: Path, tmp_path: Path) -> None:
    other = timm.create_model("weightformer_micro", in_chans=1, num_classes=3, embed_dim=32, depth=3)
    save_weights(other, tmp_path / "three.safetensors")
    config, _ = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=r"\(3, 32\), model \(10, 32\)"):
        evaluate(parse_config(Config, config), tmp_path / "three.safetensors")


def test_predict_csv_and_json(
    trained: Path, digit_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    for name in ("out.csv", "out.json"):
        assert main(["predict", checkpoint, str(digit_files), "--save", str(tmp_path / name), "--top_k", "3"]) == 1
    assert "2 image(s) could not be read" in capsys.readouterr().err
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    records = json.loads((tmp_path / "out.json").read_text())
    assert len(records) == 22
    assert len(rows) == 3 * 20 + 2
    failed = [r for r in records if "error" in r]
    assert [Path(r["path"]).name for r in failed] == ["broken.png", "empty.jpg"]
    assert all(r["path"] in r["error"] for r in failed)
    right = [r["classes"][0]["class"] == Path(r["path"]).stem[-1] for r in records if r["classes"]]
    assert sum(right) >= 14
    for record in records:
        shares = [c["probability"] for c in record["classes"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.000001
    assert {float(r["probability"]) for r in rows if r["rank"] == "1"} == {
        r["classes"][0]["probability"] for r in records if r["classes"]
    }


def test_predict_does_not_depend_on_the_batch(trained: Path, digit_files: Path, tmp_path: Path) -> None:
    checkpoint, tables = str(trained / "checkpoints" / "last.ckpt"), []
    for size in ("1", "7"):
        main(
            [
                "predict",
                checkpoint,
                str(digit_files),
                "--save",
                str(tmp_path / f"{size}.json"),
                "--data.batch_size",
                size,
            ]
        )
        tables.append(json.loads((tmp_path / f"{size}.json").read_text()))
    for one, other in zip(*tables, strict=True):
        for a, b in zip(one["classes"], other["classes"], strict=True):
            assert a["probability"] == pytest.approx(b["probability"], abs=1e-4)


def test_predict_to_the_terminal(trained: Path, digit_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(trained / "checkpoints" / "last.ckpt"), str(digit_files / "00_0.png")]) == 0
    assert "%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.ckpt", "x.png"], "no weight file at nowhere.ckpt"),
        (["{ckpt}", "nowhere.png"], "nowhere.png"),
        (["{ckpt}", "{ckpt}", "--save", "out.xlsx"], "out.xlsx"),
        (["{ckpt}", "{ckpt}", "--optim.lrr", "1"], "did you mean --optim.lr"),
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
    assert "Traceback" not in error


def test_a_weight_file_is_no_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained / "model" / "model.safetensors")]) == 2
    assert "--config" in capsys.readouterr().err


def test_a_run_continues_only_as_it_was(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    before = (folder / "checkpoints" / "last.ckpt").read_bytes()
    assert main(["train", "--config", str(folder / "config.yaml"), "--output", str(folder), "--optim.lr", "1"]) == 2
    assert "optim.lr" in capsys.readouterr().err
    assert (folder / "checkpoints" / "last.ckpt").read_bytes() == before


def test_the_result_is_that_of_the_last_weights_however_the_run_ended(tmp_path: Path) -> None:
    """Ended between two evaluations, then called again when complete; with averaged weights."""
    content = {
        "output": str(tmp_path / "run"),
        "model": {"in_chans": 1, "kwargs": {"embed_dim": 16, "depth": 2}, "mean": [0.3], "std": [0.4]},
        "data": {"source": "digits", "image_size": 8, "batch_size": 200, "crop_pct": 1.0},
        "optim": {"lr": 1e-2, "lr_batch": 0, "warmup_epochs": 0},
        "trainer": {"epochs": 3, "val_every": 2, "ema_decay": 0.9, "log_every": 1, "accelerator": "cpu"},
    }
    config = parse_config(Config, content)
    last, exported = (tmp_path / "run" / name for name in ("checkpoints/last.ckpt", "model/model.safetensors"))
    result = train(config)
    assert result == evaluate(config, last)
    before = exported.read_bytes()
    for key, value in read_state_dict(exported).items():
        assert torch.equal(value, read_state_dict(last)["state_dict"][f"model.{key}"]), key
    assert train(config) == result
    assert exported.read_bytes() == before


def test_skipped_images_are_counted_and_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (8, 8), 40 * i).save(tmp_path / split / name / f"{i}.png")
    (tmp_path / "val" / "b" / "9.png").write_bytes(b"no image")
    content = {
        "output": str(tmp_path / "run"),
        "model": {"in_chans": 1, "kwargs": {"embed_dim": 8, "depth": 2}},
        "data": {"source": "folder", "root": str(tmp_path), "image_size": 8, "batch_size": 2, "on_bad_image": "skip"},
        "trainer": {"epochs": 1, "accelerator": "cpu", "log_every": 1},
    }
    with pytest.warns(UserWarning, match=r"1 image\(s\) could not be read and were skipped: .*9\.png"):
        result = train(parse_config(Config, content))
    assert result["images"] == 6
    content["data"]["on_bad_image"] = "error"
    with pytest.raises(ValueError, match=r"9\.png"):
        evaluate(parse_config(Config, content), tmp_path / "run" / "checkpoints" / "last.ckpt")
