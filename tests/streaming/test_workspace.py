"""Tokens on disk: the same bits as in memory, resumed after any kind of end, and errors that name the file."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from weightformer.streaming import WorkspaceError, stream
from weightformer.streaming.workspace import FileRows, as_bytes


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_the_tokens_live_does_not_change_a_bit(tmp_path: Path, model) -> None:
    image = torch.randn(3, 150, 90)
    expected = stream(model, image, output="features", progress=False)
    on_disk = stream(model, image, output="features", progress=False, workspace=tmp_path / "w")
    assert (on_disk == expected).all()
    assert list((tmp_path / "w").iterdir()) == []


def test_the_memory_budget_decides(tmp_path: Path, model, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    image = torch.randn(3, 40, 48)  # 10 x 12 tokens of 32 float32 numbers
    for memory, used in ((15359, True), (15360, False), ("15.36kB", False), ("14KiB", True), (None, False)):
        seen: list[bool] = []
        stream(model, image, memory=memory, progress=lambda _: seen.append(any(tmp_path.iterdir())))  # noqa: B023
        assert any(seen) == used, memory
        assert list(tmp_path.iterdir()) == []


def test_a_model_without_dynamic_blocks_needs_no_workspace(tmp_path: Path, lively) -> None:
    stream(lively(dynamic_every=0), torch.randn(3, 40, 48), progress=False, workspace=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("500 MB", 500_000_000), ("1e9", 10**9), (7, 7), ("0.5k", 500), ("1 TB", 10**12)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert as_bytes(text) == size


# Each run is a process of its own, forked before torch starts any thread, so that all share one import.
SHARES = (0.15, 0.45, 0.55, 0.8)
SCRIPT = """
import json, os, shutil, signal, sys
import torch
from weightformer.models import WeightFormer
from weightformer.streaming import stream

def run(workspace, share):
    seen = []

    def report(done):
        seen.append(done)
        if done > share:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = WeightFormer(embed_dim=32, depth=8, patch_size=4, num_classes=7)
    image = torch.randn(3, 150, 90)
    logits = stream(model, image, workspace=workspace, progress=report, strip_rows=4)
    with open(f"{workspace}.json", "w") as file:
        json.dump([seen[0], logits.tolist()], file)

def forked(workspace, share):
    child = os.fork()
    if child == 0:
        run(workspace, share)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert forked("whole", 2) == 0
for share in map(float, sys.argv[1:]):
    assert forked("killed", share) == -signal.SIGKILL
    shutil.copytree("killed", f"killed-at-{share}")
    assert forked(f"killed-at-{share}", 2) == 0
"""


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, SHARES)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    begun, logits = zip(
        *(
            json.loads((tmp_path / f"{name}.json").read_text())
            for name in ("whole", *map("killed-at-{}".format, SHARES))
        ),
        strict=True,
    )
    assert all(each == logits[0] for each in logits)
    # The first kill falls into the first pass; each later one resumes further on, within a pass of where it fell.
    assert begun[:2] == (0, 0)
    assert list(begun[1:]) == sorted(set(begun))
    assert all(share - 0.3 < start <= share for share, start in zip(SHARES[1:], begun[2:], strict=True))


def interrupted(model, image: torch.Tensor, workspace: Path, share: float, **kwargs) -> None:
    def stop(done: float) -> None:
        if done > share:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(model, image, workspace=workspace, progress=stop, **kwargs)


def test_a_workspace_of_another_run_is_refused(tmp_path: Path, model, lively) -> None:
    image = torch.randn(3, 150, 90)
    interrupted(model, image, tmp_path, 0.7)
    other_model, other_image = lively(), image.clone()
    with torch.no_grad():
        other_model.head.bias[0] += 1
    other_image[2, 149, 89] += 1
    for args, kwargs, changed in (
        ((other_model, image), {}, "model"),
        ((model, other_image), {}, "image"),
        ((model, image), {"strip_rows": 8}, "strip_rows"),
    ):
        with pytest.raises(ValueError, match=f"unfinished run with another {changed}; delete the folder"):
            stream(*args, workspace=tmp_path, progress=False, **kwargs)
    seen: list[float] = []
    assert (
        stream(model, image, workspace=tmp_path, progress=seen.append) == stream(model, image, progress=False)
    ).all()
    assert seen[0] > 0.3
    assert list(tmp_path.iterdir()) == []


def test_dense_outputs_resume_too(tmp_path: Path, model) -> None:
    image = torch.randn(3, 150, 90)
    interrupted(model, image, tmp_path / "w", 0.95, output="features", out=tmp_path / "f.npy")
    stream(model, image, workspace=tmp_path / "w", output="features", out=tmp_path / "f.npy", progress=False)
    expected = stream(model, image, output="features", progress=False)
    assert (np.load(tmp_path / "f.npy") == expected[0].numpy()).all()


def test_two_runs_cannot_share_a_workspace(tmp_path: Path, model) -> None:
    image = torch.randn(3, 40, 48)

    def again(_: float) -> None:
        with pytest.raises(ValueError, match="is in use by another run"):
            stream(model, image, workspace=tmp_path, progress=False)

    stream(model, image, workspace=tmp_path, progress=again)


def test_a_disk_too_small_is_found_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    with pytest.raises(WorkspaceError, match=rf"{path} needs 8000.00 GB more .* disk has \d+"):
        FileRows(path, (10**9, 1000), torch.float64)
    assert not path.exists()


def test_a_disk_that_fills_up(tmp_path: Path, model) -> None:
    image = torch.randn(3, 400, 400)
    workspace = tmp_path / "w"
    with largest_file(100_000), pytest.raises(WorkspaceError, match=r"tokens-0\.bin needs .* choose a folder"):
        stream(model, image, workspace=workspace, progress=False)
    rows = FileRows(tmp_path / "rows.bin", (10, 1000), torch.float32)
    with largest_file(20_000), pytest.raises(WorkspaceError, match=r"rows\.bin: rows 4-8 could not be written"):
        rows.write(4, torch.ones(4, 1000))
    expected = stream(model, image, progress=False)
    assert (stream(model, image, workspace=workspace, progress=False) == expected).all()


def test_a_full_disk_late_in_the_run_leaves_it_resumable(tmp_path: Path, model) -> None:
    image = torch.randn(3, 400, 400)
    kwargs = {"workspace": tmp_path / "w", "output": "features", "out": tmp_path / "f.npy"}
    with largest_file(1_280_000), pytest.raises(WorkspaceError, match=r"f\.npy needs .* more for 100 rows"):
        stream(model, image, progress=False, **kwargs)
    seen: list[float] = []
    stream(model, image, progress=seen.append, **kwargs)
    assert seen[0] > 0.5
    expected = stream(model, image, output="features", progress=False)
    assert (np.load(tmp_path / "f.npy") == expected[0].numpy()).all()


def test_tokens_cut_short(tmp_path: Path) -> None:
    rows = FileRows(tmp_path / "rows.bin", (10, 8), torch.bfloat16)
    rows.write(0, torch.arange(80).view(10, 8))
    assert (rows.read(3, 5) == torch.arange(24, 40).view(2, 8)).all()
    with open(tmp_path / "rows.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(WorkspaceError, match=r"rows\.bin: rows 5-8 are cut short"):
        rows.read(5, 8)
