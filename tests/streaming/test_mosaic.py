"""The mosaic is a tiled TIFF of real pictures, tile by tile the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightformer.cli import main
from weightformer.streaming import open_source
from weightformer.streaming.mosaic import FASHION_MNIST, TILE, write_mosaic

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("skimage")
needs_fashion = pytest.mark.skipif(not FASHION_MNIST.exists(), reason="Fashion-MNIST is not installed")


@needs_fashion
def test_tiles_depend_on_seed_and_place_only(tmp_path: Path) -> None:
    path = write_mosaic(tmp_path / "a.tif", 700, 1100)
    with tifffile.TiffFile(path) as tiff:
        assert tiff.is_bigtiff
        assert tiff.pages.first.is_tiled
    source = open_source(path)
    assert (source.height, source.width, source.channels, source.tile) == (700, 1100, 3, (TILE, TILE))
    pixels = source.read(0, 700, 0, 1100)
    wider = open_source(write_mosaic(tmp_path / "b.tif", 300, 1300)).read(0, 300, 0, 1100)
    assert (pixels[:, :300] == wider).all()
    other = open_source(write_mosaic(tmp_path / "c.tif", 300, 1100, seed=1)).read(0, 300, 0, 1100)
    assert (pixels[:, :300] != other).float().mean() > 0.5


@needs_fashion
def test_both_kinds_of_pictures_appear_whole(tmp_path: Path) -> None:
    from skimage import data

    pixels = tifffile.imread(write_mosaic(tmp_path / "a.tif", 4 * TILE, 4 * TILE))
    tiles = pixels.reshape(4, TILE, 4, TILE, 3).swapaxes(1, 2).reshape(16, TILE, TILE, 3)
    sheets = [(tile[:2] == 0).all() for tile in tiles]  # a sheet has a black edge of two pixels
    assert 2 <= sum(sheets) <= 14
    astronaut = data.astronaut()
    views = np.lib.stride_tricks.sliding_window_view(astronaut[..., 0], (1, TILE))[:, :, 0]
    rows = {row.tobytes() for row in views.reshape(-1, TILE)} | {row[::-1].tobytes() for row in views.reshape(-1, TILE)}
    assert any(tile[100, :, 0].tobytes() in rows for tile in tiles)


@needs_fashion
def test_a_killed_run_leaves_no_half_image(tmp_path: Path, monkeypatch) -> None:
    def stop(row: int, *_: object) -> None:
        raise KeyboardInterrupt

    write_mosaic(tmp_path / "a.tif", 300, 300)
    before = (tmp_path / "a.tif").read_bytes()
    monkeypatch.setattr("weightformer.streaming.mosaic.mosaic_tile", stop)
    with pytest.raises(KeyboardInterrupt):
        write_mosaic(tmp_path / "a.tif", 500, 500)
    assert (tmp_path / "a.tif").read_bytes() == before


@needs_fashion
def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Fashion-MNIST at"):
        write_mosaic(tmp_path / "a.tif", 10, 10, fashion_mnist=tmp_path)
    with pytest.raises(ValueError, match="not 0 x 10"):
        write_mosaic(tmp_path / "a.tif", 0, 10)


@needs_fashion
def test_the_command_writes_what_the_function_writes(tmp_path: Path) -> None:
    assert main(["data", "mosaic", str(tmp_path / "a.tif"), "--size", "300x200", "--seed", "3"]) == 0
    written = open_source(tmp_path / "a.tif")
    assert (written.height, written.width) == (200, 300)
    expected = open_source(write_mosaic(tmp_path / "b.tif", 200, 300, seed=3))
    assert (written.read(0, 200, 0, 300) == expected.read(0, 200, 0, 300)).all()
