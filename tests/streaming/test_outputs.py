"""Dense outputs in files equal those in memory, row for row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weightformer.streaming import WorkspaceError, stream


def test_npy(tmp_path: Path, model) -> None:
    image = torch.randn(3, 50, 70)
    expected = stream(model, image, output="features", progress=False, strip_rows=3)
    path = stream(model, image, output="features", out=str(tmp_path / "deep" / "f.npy"), progress=False, strip_rows=3)
    assert path == tmp_path / "deep" / "f.npy"
    mapped = np.load(path, mmap_mode="r")
    assert mapped.dtype == np.float32
    assert (mapped[None] == expected.numpy()).all()
    stream(model, image[:, :30], output=model.head, out=path, progress=False)  # a smaller result replaces it whole
    assert np.load(path).shape == (8, 18, 7)
    assert path.stat().st_size == 128 + 8 * 18 * 7 * 4


def test_zarr(tmp_path: Path, model) -> None:
    zarr = pytest.importorskip("zarr")
    image = torch.randn(3, 50, 70)
    expected = stream(model, image, output="features", progress=False)
    path = stream(model, image, output="features", out=tmp_path / "f.zarr", progress=False)
    array = zarr.open(str(path), mode="r")
    assert array.shape == (13, 18, 32)
    assert (array[:] == expected[0].numpy()).all()


def test_bfloat16_is_written_as_float32_and_classes_as_integers(tmp_path: Path, lively) -> None:
    half = lively().bfloat16()
    image = torch.randn(3, 50, 70)
    stream(half, image, output="features", out=tmp_path / "f.npy", progress=False)
    expected = stream(half, image, output="features", progress=False)
    assert (np.load(tmp_path / "f.npy") == expected[0].float().numpy()).all()
    stream(
        half, image, output=lambda x: half.head(x).argmax(-1).to(torch.uint8), out=tmp_path / "c.npy", progress=False
    )
    assert np.load(tmp_path / "c.npy").dtype == np.uint8
    assert np.load(tmp_path / "c.npy").shape == (13, 18)


def test_a_failing_zarr_store_names_the_rows(tmp_path: Path, model) -> None:
    pytest.importorskip("zarr")
    path = tmp_path / "f.zarr"

    def clobber(share: float) -> None:
        if (path / "c").is_dir():
            for chunk in sorted((path / "c").rglob("*"), reverse=True):
                chunk.unlink() if chunk.is_file() else chunk.rmdir()
            (path / "c").rmdir()
            (path / "c").write_text("in the way")

    with pytest.raises(WorkspaceError, match=r"f\.zarr: rows \d+-\d+ could not be written"):
        stream(model, torch.randn(3, 50, 70), output="features", out=path, progress=clobber, strip_rows=3)
