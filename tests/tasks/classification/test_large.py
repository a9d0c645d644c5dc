"""``weightformer predict --stream``: images at their own resolution, on real digits, as a user runs it."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from weightformer.cli import main
from weightformer.config import parse_config
from weightformer.tasks.classification import Config, read_checkpoint
from weightformer.tasks.classification.predict import load_model

tifffile = pytest.importorskip("tifffile")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sheets of digits as tiled TIFFs of different sizes, and one cut in half."""
    folder = tmp_path_factory.mktemp("sheets")
    digits = (load_digits().images * (255 / 16)).astype("uint8")
    for name, rows, cols in (("small.tif", 6, 9), ("wide.tif", 7, 31), ("deep/large.tif", 40, 23)):
        pixels = digits[: rows * cols].reshape(rows, cols, 8, 8).swapaxes(1, 2).reshape(rows * 8, cols * 8)
        (folder / name).parent.mkdir(exist_ok=True)
        tifffile.imwrite(folder / name, pixels, tile=(32, 32), compression="zlib")
    whole = (folder / "deep" / "large.tif").read_bytes()
    (folder / "torn.tif").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture(scope="module")
def checkpoint(trained: Path) -> str:
    return str(trained / "checkpoints" / "last.ckpt")


def untiled(checkpoint: str, path: Path) -> tuple[Tensor, Tensor]:
    """Logits and features of the whole image in one forward pass."""
    content, names = read_checkpoint(checkpoint)
    model = load_model(parse_config(Config, content), checkpoint, names)
    mean, std = (model.pretrained_cfg[key][0] for key in ("mean", "std"))
    image = torch.from_numpy(tifffile.imread(path)).float().div(255).sub(mean).div(std)
    with torch.inference_mode():
        return model(image[None, None]), model.forward_features(image[None, None])


def test_classes_are_those_of_the_untiled_model(checkpoint: str, sheets: Path, tmp_path: Path, capsys) -> None:
    command = ["predict", checkpoint, str(sheets), "--stream", "--top_k", "2"]
    assert main([*command, "--save", str(tmp_path / "found.csv")]) == 1
    assert "1 image(s) failed" in capsys.readouterr().err
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == [
        *("large.tif",) * 2, *("small.tif",) * 2, "torn.tif", *("wide.tif",) * 2
    ]  # fmt: skip
    for first in rows[::2][:2]:
        probabilities = untiled(checkpoint, Path(first["path"]))[0].softmax(1)[0]
        assert int(first["class"]) == probabilities.argmax()
        assert float(first["probability"]) == pytest.approx(probabilities.max().item(), abs=2e-6)
    assert "torn.tif: rows" in rows[4]["error"]
    assert "truncated" in rows[4]["error"]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "100%" in shown.err


def test_logits_and_pooled_features(checkpoint: str, sheets: Path, tmp_path: Path) -> None:
    files = [str(sheets / name) for name in ("small.tif", "torn.tif", "wide.tif")]
    assert main(["predict", checkpoint, *files, "--stream", "--result", "logits", "--save", f"{tmp_path}/l.csv"]) == 1
    with open(tmp_path / "l.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = untiled(checkpoint, sheets / "small.tif")[0][0]
    assert [float(rows[0][str(digit)]) for digit in range(10)] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
    assert rows[1]["0"] == ""
    assert "truncated" in rows[1]["error"]
    assert main(["predict", checkpoint, *files, "--stream", "--result", "pooled", "--save", f"{tmp_path}/p.json"]) == 1
    records = json.loads((tmp_path / "p.json").read_text())
    expected = untiled(checkpoint, sheets / "wide.tif")[1].mean((1, 2))[0]
    assert records[2]["values"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
    assert records[1]["values"] == []


def test_dense_features_to_npy_and_zarr(checkpoint: str, sheets: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folders, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **kwargs: folders.append(make(**kwargs)) or folders[-1])
    command = ["predict", checkpoint, "--stream", "--result", "features", "--strip_rows", "3"]
    assert main([*command, "--memory", "1GiB", str(sheets), "--save", f"{tmp_path}/{{name}}.npy"]) == 1
    assert not folders
    command += ["--memory", "0"]
    assert main([*command, str(sheets), "--save", f"{tmp_path}/{{name}}.npy"]) == 1
    assert len(folders) == 4  # tokens on disk, for the torn image too
    assert "failed" in capsys.readouterr().out
    expected = untiled(checkpoint, sheets / "deep" / "large.tif")[1]
    got = np.load(tmp_path / "deep" / "large.tif.npy")
    assert np.abs(got - expected[0].numpy()).max() < 1e-4
    zarr = pytest.importorskip("zarr")
    assert main([*command, str(sheets / "small.tif"), "--save", f"{tmp_path}/one.zarr"]) == 0
    stored = zarr.open(str(tmp_path / "one.zarr"), mode="r")[:]
    assert np.abs(stored - untiled(checkpoint, sheets / "small.tif")[1][0].numpy()).max() < 1e-4


def test_a_folder_of_tiles_is_one_image(checkpoint: str, sheets: Path, tmp_path: Path) -> None:
    from PIL import Image

    pixels = tifffile.imread(sheets / "small.tif")
    (tmp_path / "slide").mkdir()
    for row in range(2):
        Image.fromarray(pixels[row * 24 : row * 24 + 24]).save(tmp_path / "slide" / f"t_{row}_0.png")
    command = ["predict", checkpoint, "--stream", "--result", "logits"]
    assert main([*command, "--tiles", str(tmp_path / "slide"), "--save", f"{tmp_path}/tiles.csv"]) == 0
    assert main([*command, str(sheets / "small.tif"), "--save", f"{tmp_path}/whole.csv"]) == 0
    tiles, whole = ((tmp_path / f"{name}.csv").read_text().splitlines()[1].split(",") for name in ("tiles", "whole"))
    assert tiles[1:] == whole[1:]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--memory", "1GiB"], "--memory is for large images: add --stream"),
        (["--tiles"], "--tiles is for large images: add --stream"),
        (["--stream", "--memory", "much"], "'much' is no size"),
        (["--stream", "--result", "heat"], "must be one of classes, logits"),
        (["--stream", "--result", "logits"], "written to a .csv or .json path: give one with --save"),
        (["--stream", "--result", "features", "--save", "x.csv"], "written to a .npy or .zarr path"),
        (["--stream", "--result", "features", "--save", "x.npy"], "names one file for 4 images"),
        (["--address", "auto"], "--address is for --engine ray"),
        (["--engine", "ray"], "give their folder with --save"),
        (["--stream", "--strip_rows", "0", "--result", "classes"], "strip_rows must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    checkpoint: str, sheets: Path, options: list[str], sentence: str, capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["predict", checkpoint, str(sheets), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error


# Each run is a process of its own, forked after one import: killed and resumed, and shared by two processes.
SCRIPT = """
import os, signal, sys
from weightformer.cli import main
from weightformer.streaming.progress import Job

def command(save, *options):
    return ["predict", sys.argv[1], sys.argv[2], "--stream", "--result", "logits", "--save", save, *options]

def killed():
    listen = Job.image
    def image(self, name, pixels):
        inner = listen(self, name, pixels)
        def hear(share):
            if name == "small.tif" and share > 0.6:
                os.kill(os.getpid(), signal.SIGKILL)
            inner(share)
        return hear
    Job.image = image
    main(command("killed.csv", "--workspace", "work", "--strip_rows", "4"))

def resumed():
    with open("resumed.err", "w") as sys.stderr:
        main(command("resumed.csv", "--workspace", "work", "--strip_rows", "4"))

def whole():
    main(command("whole.csv", "--strip_rows", "4"))

def shared(rank):
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": sys.argv[3]}
    main(command("shared.csv", "--strip_rows", "4"))

def run(*targets):
    children = []
    for target in targets:
        child = os.fork()
        if child == 0:
            try:
                target()
            finally:
                os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

assert run(killed) == [-signal.SIGKILL]
assert run(resumed) == run(whole) == [0]
assert run(lambda: shared(0), lambda: shared(1)) == [0, 0]
"""


def test_a_killed_job_resumes_and_two_processes_share_one(checkpoint: str, sheets: Path, tmp_path: Path) -> None:
    import socket

    shutil.copytree(sheets, tmp_path / "sheets")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, checkpoint, "sheets", port],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = (tmp_path / "whole.csv").read_text()
    assert len(whole.splitlines()) == 5
    assert len((tmp_path / "killed.csv").read_text().splitlines()) == 2  # the first image was finished
    assert (tmp_path / "resumed.csv").read_text() == whole  # the same bits, hence the same digits
    rows, expected = ([line.split(",") for line in text.splitlines()] for text in (
        (tmp_path / "shared.csv").read_text(), whole
    ))  # fmt: skip
    assert [row[0] for row in rows] == [row[0] for row in expected]
    for row, other in zip(rows[1:], expected[1:], strict=True):
        if "torn" not in row[0]:
            assert [float(x) for x in row[1:11]] == pytest.approx([float(x) for x in other[1:11]], rel=1e-4)
    assert "truncated" in rows[3][-1]
    assert done.stderr.count("block 1 measured: sent") == 3  # by the first process, for each image that is whole
