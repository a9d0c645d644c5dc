"""Train, resume, score: through the command line where a user would, on real digits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from weightformer.cli import main
from weightformer.config import parse_config
from weightformer.models.checkpoint import read_state_dict
from weightformer.tasks.generation import Config, WeightFormerPipeline, evaluate, read_checkpoint, train
from weightformer.tasks.generation.run import PREDICT_ARGUMENTS

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightformer", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


def test_outputs_of_a_run(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} >= {"config.yaml", "log.jsonl", "checkpoints", "pipeline", "tensorboard"}
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    logged = {key for record in records for key in record}
    assert {"train/loss_step", "train/mse", "train/vb", "val/loss", "val/mse", "val/vb", "lr"} <= logged
    losses = [record["train/loss_step"] for record in records if "train/loss_step" in record]
    assert losses[-1] < 0.8 * losses[0]
    content, names = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    assert names == [str(i) for i in range(10)]
    assert content["task"] == "generation"


def test_averaged_weights_are_the_result(trained: Path) -> None:
    content = read_state_dict(trained / "checkpoints" / "last.ckpt")
    averaged, raw = content["state_dict"], content["current_model_state"]
    assert any(not torch.equal(value, averaged[name]) for name, value in raw.items())
    pipeline = WeightFormerPipeline.from_pretrained(trained / "pipeline")
    for name, value in pipeline.transformer.state_dict().items():
        assert torch.equal(value, averaged[f"model.{name}"]), name
    assert pipeline.config.class_names == [str(i) for i in range(10)]


def test_a_checkpoint_without_averages_is_warned_of(trained: Path, tmp_path: Path) -> None:
    content = read_state_dict(trained / "checkpoints" / "last.ckpt")
    del content["averaging_state"]
    torch.save(content, tmp_path / "bare.ckpt")
    with pytest.warns(UserWarning, match=r"bare\.ckpt holds no averaged \(EMA\) weights"):
        read_checkpoint(tmp_path / "bare.ckpt")


def kill_and_resume(folder: Path, config: Path, *options: str) -> int:
    """Kill every process of a run in its middle and start it again; the step it was killed at."""
    command = [
        sys.executable,
        "-m",
        "weightformer",
        "train",
        "--config",
        str(config),
        "--output",
        str(folder),
        *options,
    ]
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=ENVIRONMENT)
    last = folder / "checkpoints" / "last.ckpt"
    while not last.exists():
        assert process.poll() is None, folder.with_suffix(".log").read_text()
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    step = read_state_dict(last)["global_step"]
    done = run(*command[3:])
    assert done.returncode == 0, done.stderr
    return step


def test_killed_and_resumed_is_bit_identical(tmp_path: Path, tiny_run: dict[str, Any]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_run))
    straight = run("train", "--config", str(config), "--output", str(tmp_path / "straight"))
    assert straight.returncode == 0, straight.stderr
    step = kill_and_resume(tmp_path / "killed", config)
    one, other = (read_state_dict(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("straight", "killed"))
    assert 0 < step < one["global_step"] == other["global_step"]
    for weights in ("state_dict", "current_model_state"):  # averaged, raw
        assert not [k for k, v in one[weights].items() if not torch.equal(v, other[weights][k])]


def test_two_processes_train(tmp_path: Path, tiny_run: dict[str, Any]) -> None:
    """With the same samples a step as one, without parameters that a step leaves out."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_run))
    done = run(
        "train", "--config", str(config), "--output", str(tmp_path / "two"), "--trainer.devices", "2",
        "--data.batch_size", "64", "--trainer.epochs", "1", "--trainer.val_every", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_state_dict(tmp_path / "two" / "checkpoints" / "last.ckpt")["global_step"] == 1437 // 2 // 64


def test_sampling_and_scoring_may_change_on_resume(trained: Path, tiny_run: dict[str, Any]) -> None:
    config = parse_config(Config, yaml.safe_load((trained / "config.yaml").read_text()))
    config.sampling.steps, config.score.num_samples = 5, 30
    assert train(config)["samples"] == 360
    config.data.label_dropout = 0.2
    with pytest.raises(ValueError, match=r"other settings \(data\.label_dropout\)"):
        train(config)


def test_scores(trained: Path, classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    argv = ["eval", checkpoint, "--json", "--score.features", str(classifier)]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("fid", "kid", "inception_score", "precision", "recall", "accuracy", "accuracy_worst"):
        assert isinstance(result[name], float)
    assert result["fid"] > 0
    assert 1 <= result["inception_score"] <= 10
    assert result["samples"] == 20
    assert "1437 images of digits train (of 1437), 8 x 8 px" in result["reference"]
    assert "16 px" in result["features"]
    assert "guidance 2" in result["sampled"]
    assert "uint8" in result["values"]
    assert main(argv) == 0, "the second time nothing is drawn"
    assert json.loads(capsys.readouterr().out) == result
    (folder,) = (trained / "samples").glob("*-20")
    assert json.loads((folder / "scores.json").read_text()) == result


def test_scores_are_the_same_for_two_processes(ours: Path, classifier: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes((ours / "checkpoints" / "last.ckpt").read_bytes())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "weightformer", "eval", str(checkpoint), "--json"]
    command += ["--score.features", str(classifier), "--score.num_samples", "21"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout.splitlines()[-1])
    content, names = read_checkpoint(checkpoint)
    options = ["--score.features", str(classifier), "--score.num_samples", "21"]
    one = evaluate(parse_config(Config, content, options), ours / "checkpoints" / "last.ckpt", names)
    assert one["samples"] == two["samples"] == 21
    assert one["fid"] == pytest.approx(two["fid"], rel=0.01)


def test_a_weight_file_is_scored_with_its_recipe(ours: Path, classifier: Path, tiny_run: dict[str, Any]) -> None:
    weights = ours / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"
    config = parse_config(Config, tiny_run, ["--score.features", str(classifier)])
    one = evaluate(config, weights)
    content, names = read_checkpoint(ours / "checkpoints" / "last.ckpt")
    other = evaluate(
        parse_config(Config, content, ["--score.features", str(classifier)]), ours / "checkpoints/last.ckpt", names
    )
    assert one["fid"] == other["fid"]


def test_without_validation_images(tmp_path: Path, image_folder: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "train").symlink_to(image_folder / "train")
    content = {
        "output": str(tmp_path / "run"),
        "model": {"kwargs": {"hidden_size": 16, "depth": 2}},
        "data": {"source": "folder", "root": str(tmp_path / "images"), "image_size": 8, "batch_size": 8},
        "optim": {"warmup_epochs": 0},
        "trainer": {"epochs": 1, "accelerator": "cpu", "log_every": 1, "ema_decay": 0.9},
    }
    config = parse_config(Config, content)
    assert 0.5 < train(config)["train_loss"] < 2
    exported = tmp_path / "run" / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"
    before = exported.read_bytes()
    assert train(config) == {}
    assert exported.read_bytes() == before, "averaged weights again"


def test_latents_from_training_to_images(
    tmp_path: Path, vae_folder: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data", "latents", str(tmp_path / "latents"), "--root", str(image_folder), "--vae", str(vae_folder)]
    assert main([*argv, "--image_size", "16", "--device", "cpu"]) == 0
    content = {
        "task": "generation",
        "output": str(tmp_path / "run"),
        "model": {"kwargs": {"hidden_size": 16, "depth": 2, "patch_size": 2}},
        "data": {"source": "latents", "root": str(tmp_path / "latents"), "batch_size": 8, "hflip": 0.5},
        "optim": {"warmup_epochs": 0},
        "trainer": {"epochs": 1, "accelerator": "cpu", "log_every": 1, "ema_decay": 0.9},
        "sampling": {"scheduler": "ddpm", "steps": 3, "guidance": 2.0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "--config", str(tmp_path / "config.yaml")]) == 0
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["sample", checkpoint, "--classes", "three", "--grid", "1x2", "--save", str(tmp_path / "a")]) == 0
    from PIL import Image

    assert Image.open(tmp_path / "a" / "000000.png").size == (16, 16)
    assert Image.open(tmp_path / "a" / "000000.png").mode == "RGB"
    pipeline = WeightFormerPipeline.from_pretrained(tmp_path / "run" / "pipeline")
    assert pipeline.vae.config.scaling_factor == 0.7
    capsys.readouterr()
    assert main(["eval", checkpoint, "--score.num_samples", "2", "--score.features", "x"]) == 2
    assert "x" in capsys.readouterr().err


def test_a_vae_that_scales_otherwise_is_refused(trained: Path, vae_folder: Path) -> None:
    from weightformer.tasks.generation.module import GenerationModule

    config = parse_config(Config, {"model": {"kwargs": {"hidden_size": 16, "depth": 2}}})
    vae = {"name": str(vae_folder), "scaling_factor": 0.5, "shift_factor": 0.0}
    module = GenerationModule(config, ["a", "b"], channels=2, size=[4, 4], vae=vae)
    with pytest.raises(ValueError, match=r"scaling_factor 0\.7; the latents of this run were made with 0\.5"):
        module.pipeline()


def test_a_generator_predicts_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from weightformer.tasks.generation import predict

    assert PREDICT_ARGUMENTS == []
    with pytest.raises(ValueError, match="weightformer sample"):
        predict(None, "x.ckpt", [], [])


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_no_verb_runs_code(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch hostile_marker",)

    monkeypatch.chdir(tmp_path)
    torch.save(
        {"state_dict": Hostile(), "hyper_parameters": {"config": {}, "class_names": [], "samples": {}}}, "a.ckpt"
    )
    assert main([verb, "a.ckpt"]) == 2
    assert not Path("hostile_marker").exists()


def test_a_classifiers_checkpoint_is_refused(classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(classifier)]) == 2
    assert "is a checkpoint of another task: it stores no samples" in capsys.readouterr().err
