"""The three sources: folders of every kind, damaged Fashion-MNIST files, and the digits."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification import sources
from weightformer.tasks.classification.sources import (
    class_folders,
    load_digits,
    load_fashion_mnist,
    scan_classes,
    split_folders,
)


def make_images(folder: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (4, 4), i).save(folder / name / f"{i}.png")
    return folder


# Folders


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_splits_are_found_by_name(name: str, tmp_path: Path) -> None:
    for split in ("train", name):
        (tmp_path / split).mkdir()
    assert split_folders(tmp_path) == {"train": tmp_path / "train", "val": tmp_path / name}


def test_either_split_may_be_missing_but_not_both(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.root .* holds no train/ or val/ folder"):
        split_folders(tmp_path)
    (tmp_path / "test").mkdir()
    (tmp_path / "val").mkdir()
    assert split_folders(tmp_path) == {"val": tmp_path / "val"}


def test_classes_are_the_visible_folders_in_plain_order(tmp_path: Path) -> None:
    make_images(tmp_path, {"1": 1, "2": 1, "10": 1, "b": 1, "A": 1, ".ipynb_checkpoints": 1})
    (tmp_path / "labels.txt").touch()
    assert class_folders(tmp_path) == ["1", "10", "2", "A", "b"]


def test_a_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    make_images(tmp_path, {".hidden": 1})
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"holds no class folders; expected .*/<class>/<image>"):
        class_folders(tmp_path)


def test_labels_follow_the_given_class_names(tmp_path: Path) -> None:
    make_images(tmp_path, {"a": 2, "b": 1, "c": 3})
    (tmp_path / "b" / "deep").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "b" / "deep" / "x.png")
    (tmp_path / "b" / ".x.png").touch()
    paths, labels = scan_classes(tmp_path, ["c", "a", "b"], allow_empty=False)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2]
    names = [os.path.relpath(path, tmp_path) for path in paths]
    assert names == ["c/0.png", "c/1.png", "c/2.png", "a/0.png", "a/1.png", "b/0.png", "b/deep/x.png"]


def test_an_empty_class_is_an_error_in_training_and_a_warning_in_evaluation(tmp_path: Path) -> None:
    make_images(tmp_path, {"a": 1, "b": 0, "c": 1})
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"class folder .*b holds no images; add some, or remove"):
        scan_classes(tmp_path, ["a", "b", "c"], allow_empty=False)
    with pytest.warns(UserWarning, match=r"class folder .*b holds no images"):
        _, labels = scan_classes(tmp_path, ["a", "b", "c"], allow_empty=True)
    assert labels.tolist() == [0, 2]  # c keeps its label


@pytest.mark.filterwarnings("ignore:class folder")
def test_a_split_without_any_image_is_an_error(tmp_path: Path) -> None:
    make_images(tmp_path, {"a": 0})
    with pytest.raises(ValueError, match="no images below"):
        scan_classes(tmp_path, ["a"], allow_empty=True)


# Digits


def test_digits_are_split_once_and_for_all() -> None:
    (train, _), (test, test_labels) = load_digits(train=True), load_digits(train=False)
    assert train.shape == (1437, 1, 8, 8)
    assert test.shape == (360, 1, 8, 8)
    assert train.dtype == test.dtype == torch.uint8
    assert (train.min(), train.max()) == (0, 255)  # 0..16 in the original
    assert set(train.unique().tolist()) == {round(v * 255 / 16) for v in range(17)}
    assert (test[:2].sum().item(), test_labels[:8].tolist()) == (9402, [7, 6, 3, 7, 7, 3, 2, 8])
    assert test_labels.bincount().min() >= 35
    both = {row.numpy().tobytes() for row in train} & {row.numpy().tobytes() for row in test}
    assert len(both) == 0
    again, _ = load_digits(train=False)
    assert torch.equal(again, test)


# Fashion-MNIST


def write_idx(path: Path, array: np.ndarray) -> None:
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def make_fashion(folder: Path, suffix: str = ".gz", count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split in ("train", "t10k"):
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", rng.integers(0, 256, (count, 28, 28), np.uint8))
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", np.arange(count, dtype=np.uint8) % 10)
    return folder


@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_fashion_files_are_read_from_a_given_folder(below: str, suffix: str, tmp_path: Path) -> None:
    make_fashion(tmp_path / below, suffix)
    images, labels = load_fashion_mnist(tmp_path, train=False)
    rng = np.random.default_rng(0)
    rng.integers(0, 256, (6, 28, 28), np.uint8)
    assert np.array_equal(images[:, 0].numpy(), rng.integers(0, 256, (6, 28, 28), np.uint8))
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert labels.dtype == torch.int64


def test_a_given_folder_is_the_only_place_looked_in(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.root .* holds no Fashion-MNIST"):
        load_fashion_mnist(tmp_path, train=True)


def test_missing_and_damaged_fashion_files_are_named(tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"

    def refused(content: bytes) -> str:
        (make_fashion(tmp_path) / name).write_bytes(content)
        with pytest.raises(ValueError, match="is damaged") as caught:
            load_fashion_mnist(tmp_path, train=True)
        return str(caught.value)

    whole = (make_fashion(tmp_path) / name).read_bytes()
    raw = gzip.decompress(whole)
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0xFF
    contents = [
        b"",
        b"<html>not found</html>",
        whole[: len(whole) // 2],
        bytes(flipped),
        whole[:10] + b"\xff" + whole[11:],  # no such block type
        gzip.compress(raw[:-1]),
        gzip.compress(raw + b"\0"),
        gzip.compress(b"\0\0\x0d\x03" + raw[4:]),
        gzip.compress(raw[:3]),
        gzip.compress(raw[:9]),
    ]
    for content in contents:
        assert name in refused(content)
    (make_fashion(tmp_path) / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks train-labels-idx1-ubyte\.gz"):
        load_fashion_mnist(tmp_path, train=True)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    labels = make_fashion(tmp_path) / "train-labels-idx1-ubyte.gz"
    for wrong in (np.zeros(5, np.uint8), np.full(6, 10, np.uint8), np.zeros((6, 1), np.uint8)):
        write_idx(labels, wrong)
        with pytest.raises(ValueError, match="does not hold Fashion-MNIST"):
            load_fashion_mnist(tmp_path, train=True)


def test_without_files_or_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DEBIAN_FASHION", tmp_path / "nowhere")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(FileNotFoundError, match=r"data\.root, or apt-get install dataset-fashion-mnist"):
        load_fashion_mnist(None, train=True)
    assert list((tmp_path / "hub" / "datasets").iterdir()) == []  # no half of a download


def test_an_earlier_download_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DEBIAN_FASHION", tmp_path / "nowhere")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    make_fashion(tmp_path / "hub" / "datasets" / "FashionMNIST" / "raw")
    assert len(load_fashion_mnist(None, train=True)[0]) == 6


@pytest.mark.skipif(not sources._DEBIAN_FASHION.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist() -> None:
    train, labels = load_fashion_mnist(None, train=True)
    test, test_labels = load_fashion_mnist(None, train=False)
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert labels.bincount().tolist() == [6000] * 10
    assert test_labels.bincount().tolist() == [1000] * 10
    assert labels[:5].tolist() == [9, 0, 0, 3, 0]
    values = train.float() / 255
    assert values.mean() == pytest.approx(0.2860, abs=5e-5)  # what the recipes normalise with
    assert values.std() == pytest.approx(0.3530, abs=5e-5)
