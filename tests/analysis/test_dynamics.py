"""The report on dynamics reads what runs recorded, in the worst layer, and finds the first warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightformer.analysis.dynamics import dynamics_table, read_dynamics
from weightformer.analysis.figures import dynamics_figure


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("\n".join(json.dumps({"time": 0, "cpu": 0, **record}) for record in records))
    return folder


def record(step: int, grad: float = 1.0, **values: float) -> dict[str, Any]:
    """Of two layers, the second with twice the ratio and half the rank."""
    content = {"dynamics/all/grad": grad, "dynamics/blocks.0/grad": 1e3}
    for name, value in values.items():
        content[f"dynamics/a/{name}"] = value
        content[f"dynamics/b/{name}"] = value / 2 if name == "rank" else 2 * value
    return {"step": step, **content}


def test_the_worst_layer_and_the_later_record_count(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run",
        {"event": "start"},
        record(0, ratio=1.0, rank=8.0),
        {"step": 4, "train/loss_step": 2.0},
        record(5, ratio=9.0, rank=9.0),
        {"event": "start"},
        record(5, ratio=2.0, rank=6.0),
        {"step": 9, "train/loss_step": 1.23456},
    )
    report = read_dynamics(folder)
    assert report["ratio"] == [(0, 2.0), (5, 4.0)]
    assert report["rank"] == [(0, 4.0), (5, 3.0)]
    assert report["grad"] == [(0, 1.0), (5, 1.0)]
    assert report["saturation"] == []
    assert report["loss"] == [(4, 2.0), (9, 1.235)]
    assert report["warning"] is None


def test_the_first_warning(tmp_path: Path) -> None:
    calm = [record(step, ratio=1.0, rank=8.0) for step in range(6)]
    folder = write(tmp_path / "run", *calm, record(6, grad=100.0, ratio=1.0, rank=8.0), record(7, ratio=50.0, rank=8.0))
    step, sentence = read_dynamics(folder)["warning"]
    assert step == 6
    assert sentence.startswith("grad of all is 100")


def test_a_run_without_records(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no log\.jsonl"):
        read_dynamics(tmp_path)
    with pytest.raises(ValueError, match="train with --dynamics_every STEPS"):
        read_dynamics(write(tmp_path / "run", {"step": 1, "train/loss_step": 1.0}))


def test_table_and_figure(tmp_path: Path) -> None:
    calm = read_dynamics(write(tmp_path / "calm", record(0, ratio=1.0, rank=8.0, saturation=0.25)))
    wild = read_dynamics(write(tmp_path / "wild", record(3, ratio=30.0, rank=4.0, saturation=0.25)))
    rows = [
        {"variant": "a", "top1": 0.9, "dynamics": calm},
        {"variant": "a", "top1": 0.8, "dynamics": wild},
        {"variant": "b", "diverged": "the loss became nan", "dynamics": calm},
    ]
    lines = dynamics_table(rows).splitlines()
    assert lines[2] == "| a | 90.00%, 80.00% | 60 | 0.5 | 2 | 1 | step 3: ratio of a is 30, above 20 (1 of 2 seeds) |"
    assert lines[3] == "| b | diverged | 2 | 0.5 | 4 | 1 | none |"
    dynamics_figure({"a": calm, "b": wild}, tmp_path / "figure.svg")
    first = (tmp_path / "figure.svg").read_bytes()
    dynamics_figure({"a": calm, "b": wild}, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_bytes() == first
