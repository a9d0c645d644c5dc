"""``weightformer predict --engine ray``: the same predictions through a local cluster, in Parquet files."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import tifffile
from sklearn.datasets import load_digits

from weightformer.cli import main
from weightformer.streaming import find_sources
from weightformer.tasks.classification import cluster
from weightformer.tasks.classification.predict import Prediction

pytest.importorskip("ray.data")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sheets of digits, one of them cut in half."""
    folder = tmp_path_factory.mktemp("sheets")
    digits = (load_digits().images * (255 / 16)).astype("uint8")
    for name, rows, cols in (("a.tif", 6, 9), ("b.tif", 20, 21), ("c.tif", 4, 13)):
        pixels = digits[: rows * cols].reshape(rows, cols, 8, 8).swapaxes(1, 2).reshape(rows * 8, cols * 8)
        tifffile.imwrite(folder / name, pixels, tile=(32, 32), compression="zlib")
    whole = (folder / "b.tif").read_bytes()
    (folder / "b.tif").write_bytes(whole[: len(whole) // 2])
    return folder


def read(folder: Path) -> dict[str, dict[str, Any]]:
    rows = parquet.read_table(sorted(folder.glob("*.parquet"))).to_pylist()
    assert len({row["path"] for row in rows}) == len(rows)
    return {Path(row["path"]).name: row for row in rows}


def test_the_same_as_without_a_cluster_and_failures_by_name(
    trained: Path, sheets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    images = shutil.copytree(sheets, tmp_path / "images")
    command = ["predict", checkpoint, str(images), "--stream", "--top_k", "3"]
    folder = tmp_path / "found"
    assert main([*command, "--engine", "ray", "--save", str(folder)]) == 1
    assert "1 image(s) failed" in capsys.readouterr().err
    assert main([*command, "--save", str(tmp_path / "found.csv")]) == 1
    with open(tmp_path / "found.csv", newline="") as file:
        expected = list(csv.DictReader(file))
    found = read(folder)
    for name in ("a.tif", "c.tif"):
        rows = [row for row in expected if row["path"].endswith(name)]
        assert found[name]["classes"] == [row["class"] for row in rows]
        assert found[name]["probabilities"] == pytest.approx([float(row["probability"]) for row in rows], abs=2e-6)
        assert not found[name]["error"]
    assert "b.tif: rows" in found["b.tif"]["error"]
    assert found["b.tif"]["classes"] == []

    # Run again, it takes up what failed and nothing else; another model or setting is refused.
    shutil.copy(images / "a.tif", images / "b.tif")
    before = found["c.tif"]
    assert cluster._finished(folder) == {str((images / name).resolve()) for name in ("a.tif", "c.tif")}
    assert main([*command, "--engine", "ray", "--save", str(folder)]) == 0
    found = read(folder)
    assert found["b.tif"]["probabilities"] == found["a.tif"]["probabilities"]
    assert found["c.tif"] == before
    assert main([*command[:-1], "2", "--engine", "ray", "--save", str(folder)]) == 2
    assert "holds predictions of another model or with other options" in capsys.readouterr().err


def test_what_a_worker_makes_of_its_images(trained: Path, sheets: Path, tmp_path: Path) -> None:
    """Dense features and resized images go through the same worker; here without a cluster around it."""
    from weightformer.config import parse_config
    from weightformer.tasks.classification import Config, LargeOptions, read_checkpoint

    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    content, names = read_checkpoint(checkpoint)
    config = parse_config(Config, content)
    found = find_sources([sheets])
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.table({"name": list(found), "path": [str(path) for path in found.values()]})
    large = LargeOptions(result="features", save=f"{tmp_path}/{{name}}.npy")
    rows = cluster._Worker(config, checkpoint, names, large, 5)(batch).to_pylist()
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert rows[0]["saved"] == f"{tmp_path}/a.tif.npy"
    assert (tmp_path / "a.tif.npy").exists()
    plain = cluster._Worker(config, checkpoint, names, None, 2)(batch).to_pylist()
    assert [len(row["classes"]) for row in plain] == [2, 0, 2]
    assert plain[1]["error"]


def test_half_written_files_count_for_nothing(tmp_path: Path) -> None:
    rows = [Prediction("a", [("x", 0.5)]), Prediction("b", error="torn")]
    parquet.write_table(cluster._table(rows), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-20])
    assert cluster._finished(tmp_path) == {"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["finished.parquet"]
    assert cluster._finished(tmp_path) == {"a"}
