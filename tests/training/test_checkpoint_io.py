"""Checkpoints appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from weightformer.training.checkpoint_io import AtomicCheckpointIO


class Unsaveable:
    def __reduce__(self) -> None:
        raise OSError("No space left on device")


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile_marker",)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1, "weights": torch.arange(3)}, path)
    with pytest.raises(OSError, match="No space"):
        io.save_checkpoint({"step": 2, "weights": Unsaveable()}, path)
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
    assert io.load_checkpoint(path)["step"] == 1


def test_reading_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.ckpt")
    with pytest.raises(ValueError, match=r"hostile\.ckpt was refused.*system"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "hostile.ckpt", weights_only=False)
    assert not (tmp_path / "hostile_marker").exists()
