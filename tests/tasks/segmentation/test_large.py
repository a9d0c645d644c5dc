"""``weightformer predict --task segmentation --stream``: the labels of the whole image, written without holding it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightformer.cli import main
from weightformer.config import parse_config
from weightformer.tasks.segmentation import Config, read_checkpoint
from weightformer.tasks.segmentation.predict import iter_predictions


def test_labels_and_logits_are_those_of_the_whole_image(
    trained: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    files = [scenes / "images" / "validation" / f"{name}.png" for name in ("000", "010", "020")]
    (tmp_path / "torn.png").write_bytes(files[0].read_bytes()[:400])
    command = ["predict", checkpoint, *map(str, files), str(tmp_path / "torn.png"), "--stream", "--strip_rows", "3"]
    assert main([*command, "--save", f"{tmp_path}/{{name}}.npy", "--workspace", str(tmp_path / "work")]) == 1
    shown = capsys.readouterr()
    assert "torn.png" in shown.out
    assert "failed" in shown.out
    assert "1 image(s) failed" in shown.err
    content, names = read_checkpoint(checkpoint)
    for row in iter_predictions(parse_config(Config, content), checkpoint, names, files):
        assert row.labels is not None
        labels = np.load(tmp_path / f"{Path(row.path).name}.npy")
        assert labels.dtype == np.uint8
        assert (labels == row.labels.numpy()).all()
        assert len(np.unique(labels)) > 1
    assert main([*command[:3], "--stream", "--result", "logits", "--save", f"{tmp_path}/l.npy"]) == 0
    assert (np.load(tmp_path / "l.npy").argmax(-1) == np.load(tmp_path / "000.png.npy")).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tiles"], "--tiles is for large images: add --stream"),
        (["--stream"], "written to a .npy or .zarr path: give one with --save"),
        (["--stream", "--save", "out"], "out is none"),
        (["--stream", "--result", "classes"], "must be one of segmentation, logits"),
        (["--stream", "--memory", "much"], "'much' is no size"),
        (["--engine", "ray"], "unknown option --engine"),
    ],
)
def test_what_does_not_fit_is_refused(
    trained: Path, scenes: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(scenes / "images" / "validation" / "000.png")
    assert main(["predict", str(trained / "checkpoints" / "last.ckpt"), image, *options]) == 2
    assert sentence in capsys.readouterr().err
