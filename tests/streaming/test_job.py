"""Many images in one job: failures by name, and a killed job that goes on where it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.streaming import find_sources, stream, stream_files
from weightformer.streaming.progress import Job


@pytest.fixture
def images(tmp_path: Path, photograph: np.ndarray) -> dict[str, Path]:
    """Three crops of a photograph, and a file cut in half."""
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    for name, side in (("a.png", 40), ("c.png", 61), ("deep/a.png", 100)):
        Image.fromarray(photograph[:side, : 2 * side]).save(folder / name)
    (folder / "b.png").write_bytes((folder / "c.png").read_bytes()[:2000])
    return find_sources([folder])


def test_a_failed_image_is_reported_and_the_job_goes_on(model, images: dict[str, Path]) -> None:
    results = list(stream_files(model, images, progress=False))
    assert [result.name for result in results] == ["a.png", "b.png", "c.png", "deep/a.png"]
    for result in results:
        if result.name == "b.png":
            assert result.value is None
            assert "b.png: rows 0-61, columns 0-122 could not be read" in result.error
        else:
            assert result.error == ""
            assert (result.value == stream(model, result.path, progress=False)).all()


def test_faults_of_the_program_are_not_swallowed(model, images: dict[str, Path], monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("weightformer.streaming.run.embedded", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(stream_files(model, images, progress=False))


def test_an_image_that_exceeds_memory_is_one_that_failed(model, images: dict[str, Path], monkeypatch) -> None:
    def broken(*_: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("weightformer.streaming.run.embedded", broken)
    assert all("allocate" in result.error for result in stream_files(model, images, progress=False))


def test_dense_outputs_are_named_after_their_images(model, images: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out" / "{name}.npy"
    for result in stream_files(model, images, output="features", out=out, progress=False):
        if not result.error:
            assert result.value == tmp_path / "out" / f"{result.name}.npy"
            expected = stream(model, result.path, output="features", progress=False)
            assert (np.load(result.value)[None] == expected.numpy()).all()
    for kwargs, message in (
        ({"memory": "lots"}, "no size"),
        ({"strip_rows": 0}, "strip_rows"),
        ({"output": "x"}, "'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            next(stream_files(model, images, progress=False, **kwargs))
    with pytest.raises(ValueError, match="names one file for 4 images"):
        next(stream_files(model, images, output="features", out=tmp_path / "f.npy", progress=False))


def test_a_stopped_job_goes_on_and_leaves_nothing(model, images: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    workspace = tmp_path / "work"
    heard: list[tuple[str, float]] = []
    listen, stop = Job.image, "c.png"

    def image(self: Job, name: str, pixels: float):
        inner = listen(self, name, pixels)

        def hear(share: float) -> None:
            heard.append((name, share))
            if name == stop and share > 0.7:
                raise KeyboardInterrupt
            inner(share)

        return hear

    monkeypatch.setattr(Job, "image", image)
    with pytest.raises(KeyboardInterrupt):
        list(stream_files(model, images, workspace=workspace, progress=False))
    heard.clear()
    stop = ""
    results = list(stream_files(model, images, workspace=workspace, progress=False))
    assert [share for name, share in heard if name == "a.png"] == [1.0]  # kept, not computed anew
    assert next(share for name, share in heard if name == "c.png") > 0.3  # resumed
    for result in results:
        assert result.error or (result.value == stream(model, result.path, progress=False)).all()
    assert list(workspace.iterdir())  # one image failed: the others are not to be computed again
    Image.open(images["a.png"]).save(images["b.png"])
    heard.clear()
    assert not any(result.error for result in stream_files(model, images, workspace=workspace, progress=False))
    assert [share for name, share in heard if name != "b.png"] == [1.0, 1.0, 1.0]
    assert list(workspace.iterdir()) == []


def test_what_is_kept_belongs_to_its_image_and_setting(model, lively, images: dict[str, Path], tmp_path: Path) -> None:
    kwargs = {"workspace": tmp_path / "work", "progress": False}
    first = {result.name: result.value for result in stream_files(model, images, **kwargs)}
    other = lively()
    with torch.no_grad():
        other.head.bias += 1
    for result in stream_files(other, images, **kwargs):
        assert result.error or not torch.equal(result.value, first[result.name])
    pooled = {result.name: result.value for result in stream_files(model, images, output="pooled", **kwargs)}
    assert pooled["a.png"].shape == (1, 32)


def test_progress_is_weighted_by_pixels_and_leaves_failures_out() -> None:
    shown: list[tuple[str, float, float, float]] = []
    job = Job(100.0, lambda *state: shown.append(state))
    first = job.image("a", 60.0)
    first(0.5)  # found finished when the run began
    first(1.0)
    job.image("b", 10.0)(0.0)
    job.without("b", 10.0)
    job.image("c", 30.0)(0.0)
    assert shown == [
        ("a", 30.0, 30.0, 100.0),
        ("a", 60.0, 30.0, 100.0),
        ("b", 60.0, 30.0, 100.0),
        ("b", 60.0, 30.0, 90.0),
        ("c", 60.0, 30.0, 90.0),
    ]
