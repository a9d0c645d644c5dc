"""``weightformer bench --stream`` on small images: real processes, a table that adds up, cells instead of crashes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from weightformer.bench import large
from weightformer.bench.large import LargeConfig, measure_large, plot
from weightformer.cli import main
from weightformer.streaming.mosaic import FASHION_MNIST

pytest.importorskip("tifffile")
pytest.importorskip("skimage")
pytestmark = [
    pytest.mark.skipif(not FASHION_MNIST.exists(), reason="Fashion-MNIST is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    options = ["--sizes", '["96x160"]', "--mosaics", str(folder), "--output", str(folder / "out")]
    forms = ["--forms", '["untiled", "streamed-disk", "deit-explicit"]']
    assert main(["bench", "--stream", *options, *forms]) == 0
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "out" / "large_images.csv", newline="") as file:
        return {row["form"]: row for row in csv.DictReader(file)}


def test_the_table(folder: Path) -> None:
    rows = rows_of(folder)
    assert set(rows) == {"untiled", "streamed-disk", "deit-explicit"}
    for row in rows.values():
        assert (row["height"], row["width"], row["status"]) == ("96", "160", "ok")
        assert 0 < float(row["cpu_s"]) < 60
        assert 0 <= float(row["peak_mb"]) < 500
        assert row["runs"] == "1"
    assert float(rows["streamed-disk"]["difference"]) < 1e-5
    assert float(rows["streamed-disk"]["disk_mb"]) == pytest.approx(2 * 6 * 10 * 192 * 4 / 1e6, abs=0.05)
    assert rows["deit-explicit"]["difference"] == ""
    assert (folder / "out" / "large_images.svg").read_text().count("<svg") == 1
    assert "streamed-disk: status ok" in (folder / "out" / "large_images.log").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["mosaic-96x160.tif", "out"]


def test_what_is_there_is_not_measured_again(folder: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(large, "_run", fail)
    config = LargeConfig(["96x160"], ["untiled", "streamed-disk"], mosaics=str(folder), output=str(folder / "out"))
    assert len(measure_large(config)) == 3
    config.fresh = True
    with pytest.raises(AssertionError, match="measured again"):
        measure_large(config)


def test_what_would_take_too_long_or_does_not_fit_is_a_cell(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    table = tmp_path / "large_images.csv"
    base = rows_of(folder)["deit-explicit"] | {"cpu_s": "1.0"}
    large._write_table(table, [base])
    config = LargeConfig(["192x320"], ["deit-explicit"], mosaics=str(tmp_path), output=str(tmp_path), limit=10)
    assert measure_large(config)[1]["status"] == "skipped: about 16 s"  # four times the pixels, squared
    monkeypatch.setattr(large, "write_mosaic", lambda *_: None)
    monkeypatch.setattr(large, "_run", lambda *_: {"status": "out of memory"})
    config.limit = 20
    rows = measure_large(config)
    assert [row["status"] for row in rows] == ["ok", "out of memory"]
    large.show(rows)
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "end"), [("import torch; torch.empty(2**50)", "memory"), ("raise KeyError(7)", "7")])
def test_how_a_process_may_end(tmp_path: Path, monkeypatch, code: str, end: str) -> None:
    """A lack of memory is a cell, every other failure is an error with its last words."""
    original = subprocess.Popen
    monkeypatch.setattr(large.subprocess, "Popen", lambda _, **kw: original([sys.executable, "-c", code], **kw))
    case = large._Case("untiled", "mosaic.tif", 16, False, 1, str(tmp_path / "notes"))
    if end == "memory":
        assert large._run(case, tmp_path / "log")["status"] == "out of memory"
    else:
        with pytest.raises(RuntimeError, match="KeyError: 7"):
            large._run(case, tmp_path / "log")


def test_a_killed_run_adds_up(folder: Path, tmp_path: Path) -> None:
    """Killed in the middle and run again, its times and its number of runs are those of both."""
    notes = tmp_path / "notes"
    case = large._Case("streamed-disk", str(folder / "mosaic-96x160.tif"), 1, False, 1, str(notes))
    before = {"cpu_s": 100.0, "wall_s": 200.0, "peak_mb": 5000.0, "mapped_mb": 0.0, "runs": 1.0}
    Path(f"{notes}.json").write_text(json.dumps(before))
    command = [sys.executable, "-m", "weightformer.bench.large", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["runs"], row["peak_mb"]) == ("2", "5000.0")
    assert 100 < float(row["cpu_s"]) < 160
    assert list(tmp_path.iterdir()) == []


def test_the_peak_sees_what_was_freed_again() -> None:
    usage = large._Usage({})
    block = bytearray(50_000_000)
    block[::4096] = bytes(len(block[::4096]))
    del block
    time.sleep(0.01)
    assert 45 < usage.now()["peak_mb"] < 80


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"forms": ["vit"]}, "unknown form 'vit'"),
        ({"sizes": ["100"]}, "HEIGHTxWIDTH"),
        ({"sizes": ["8x100"]}, "16 at least"),
        ({"strip_rows": 0}, "must be at least 1"),
    ],
)
def test_wrong_options(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LargeConfig(**options)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row to draw"):
        plot(tmp_path / "absent.csv", tmp_path / "a.svg")
