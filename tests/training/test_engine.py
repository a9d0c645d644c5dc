"""Runs that are killed with SIGKILL end bit-identical to runs that are not; folders and logs are safe."""

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
from lightning.pytorch.utilities import rank_zero_only

from weightformer.training.engine import claim_output, last_checkpoint, seed_step


def start(folder: Path, config: Path, processes: int = 1) -> subprocess.Popen[bytes]:
    """The command line, in a process group of its own so that all ranks can be killed at once."""
    command = [sys.executable, "-m", "weightformer", "train", "--config", str(config), "--output", str(folder)]
    if processes > 1:
        command += ["--trainer.devices", str(processes), "--trainer.accelerator", "cpu"]
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def finish(folder: Path, config: Path, processes: int = 1) -> dict[str, Any]:
    process = start(folder, config, processes)
    assert process.wait(timeout=600) == 0, folder.with_suffix(".log").read_text()
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def kill_after(folder: Path, config: Path, checkpoints: int, processes: int = 1) -> None:
    """SIGKILL every process once ``checkpoints`` checkpoints were written, a random moment later."""
    process = start(folder, config, processes)
    last, seen, written = folder / "checkpoints" / "last.ckpt", 0, 0.0
    while seen < checkpoints:
        assert process.poll() is None, folder.with_suffix(".log").read_text()
        if last.exists() and last.stat().st_mtime_ns != written:
            seen, written = seen + 1, last.stat().st_mtime_ns
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, tiny_run: dict[str, Any], processes: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_run))
    straight = finish(tmp_path / "straight", config, processes)
    kill_after(tmp_path / "killed", config, random.randint(1, 4), processes)
    killed_at = torch.load(tmp_path / "killed" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    resumed = finish(tmp_path / "killed", config, processes)

    assert 0 < killed_at < straight["global_step"], "the run was over before it was killed"
    assert resumed["global_step"] == straight["global_step"]
    for weights in ("state_dict", "current_model_state"):  # averaged, raw
        assert straight[weights].keys() == resumed[weights].keys()
        different = [k for k, v in straight[weights].items() if not torch.equal(v, resumed[weights][k])]
        assert not different, f"killed at step {killed_at}: {weights} differs in {different[:3]}"
    moments = [run["optimizer_states"][0]["state"][0]["exp_avg_sq"] for run in (straight, resumed)]
    assert torch.equal(*moments)
    steps = [json.loads(line).get("step") for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert steps.count(None) == 2, "one start and one resumption are marked in the log"
    averaged, raw = straight["state_dict"], straight["current_model_state"]
    assert any(not torch.equal(v, averaged[k]) for k, v in raw.items()), "averaging changed nothing"


def test_another_configuration_does_not_touch_a_run(tmp_path: Path) -> None:
    folder = claim_output(tmp_path / "run", {"optim": {"lr": 1.0}, "trainer": {"log_every": 1}})
    before = (folder / "config.yaml").read_text()
    claim_output(folder, {"optim": {"lr": 1.0}, "trainer": {"log_every": 5}})
    with pytest.raises(ValueError, match=r"other settings \(optim.lr\)"):
        claim_output(folder, {"optim": {"lr": 2.0}, "trainer": {"log_every": 1}})
    assert "lr: 1.0" in before
    assert "lr: 1.0" in (folder / "config.yaml").read_text()


def test_a_record_of_the_configuration_is_written_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a record would lock the run out of its own folder."""
    claim_output(tmp_path, {"seed": 0})
    before = (tmp_path / "config.yaml").stat().st_mtime_ns
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("written again"))
    claim_output(tmp_path, {"seed": 0})
    assert (tmp_path / "config.yaml").stat().st_mtime_ns == before
    monkeypatch.setattr(os, "replace", lambda *_: None)  # as killed before the end
    claim_output(tmp_path, {"seed": 0, "dynamics_every": 5})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 0}


def test_one_process_writes_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    claim_output(tmp_path, {"seed": 0})
    assert not list(tmp_path.iterdir())


def test_how_a_run_is_evaluated_may_change(tmp_path: Path) -> None:
    """An evaluation that needs too much memory must not cost the run."""
    before = {"data": {"val_batch_size": 8}, "infer": {"mode": "whole", "window": 512, "stride": 341}}
    after = {"data": {"val_batch_size": 1}, "infer": {"mode": "slide", "window": 256, "stride": 128}}
    claim_output(tmp_path, before)
    claim_output(tmp_path, after)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == after


def test_a_damaged_record_of_the_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optim: [1, 2")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        claim_output(tmp_path, {"optim": {}})


def test_last_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoints" / "last.ckpt")


def test_seed_step_depends_on_every_argument() -> None:
    def draw(*place: int) -> float:
        seed_step(*place)
        return torch.rand(()).item()

    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({draw(*p) for p in places}) == len(places)
    assert draw(0, 1, 2, 3) == draw(0, 1, 2, 3)
