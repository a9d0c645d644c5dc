"""Latents on disk: those of the VAE, both ways round, written once however often the work is interrupted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightformer.cli import main
from weightformer.tasks.generation import latents as source
from weightformer.tasks.generation.data import DataConfig, GenerationData
from weightformer.tasks.generation.latents import LatentDataset, LatentFolder, encode_images, load_vae

SIDE = 16


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SHARD", 8)


@pytest.fixture
def encode(tmp_path: Path, vae_folder: Path, image_folder: Path) -> Any:
    def run(**kwargs: Any) -> Path:
        options = {"output": tmp_path / "latents", "root": str(image_folder), "batch_size": 3} | kwargs
        encode_images(vae=str(vae_folder), image_size=SIDE, source="folder", device="cpu", **options)
        return options["output"]

    return run


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_moments_are_those_of_the_vae(encode: Any, vae_folder: Path, image_folder: Path) -> None:
    folder = LatentFolder(encode())
    assert folder.class_names == ["seven", "three"]
    assert folder.shape == [2, SIDE // 4, SIDE // 4]
    assert folder.vae == {"name": str(vae_folder), "scaling_factor": 0.7, "shift_factor": 2.0}
    images = GenerationData(
        DataConfig(source="folder", root=str(image_folder), image_size=SIDE), seed=0, channels=3
    ).samples("train")
    pixels, labels = images.__getitems__([(0, i) for i in range(len(images))])
    assert torch.equal(folder.labels("train"), labels)
    with torch.inference_mode():
        vae = load_vae(str(vae_folder))
        expected = [vae.encode(x).latent_dist for x in (pixels, pixels.flip(-1))]
    stored = np.concatenate([np.load(folder.shard("train", i)) for i in range(0, len(images), 8)])
    for flipped, dist in enumerate(expected):
        for part, moment in enumerate((dist.mean, dist.std)):
            np.testing.assert_allclose(stored[:, flipped, part], moment.numpy(), rtol=2e-3, atol=1e-4)
    assert np.abs(stored[:, 0, 0] - stored[:, 1, 0]).max() > 0.01, "a mirrored image has other latents"


def test_latents_are_drawn_scaled_and_flipped(encode: Any) -> None:
    folder = LatentFolder(encode())
    keys = [(epoch, 5) for epoch in range(400)]
    for hflip in (0.0, 1.0):
        drawn, labels = LatentDataset(folder, "train", hflip=hflip, seed=0).__getitems__(keys)
        mean, std = np.load(folder.shard("train", 5))[5, int(hflip)].astype(np.float32)
        assert labels.unique().tolist() == [int(folder.labels("train")[5])]
        error = drawn.mean(0) - (torch.from_numpy(mean) - 2) * 0.7
        assert (error.abs() < 5 * 0.7 * torch.from_numpy(std) / 400**0.5).all()
        torch.testing.assert_close(drawn.std(0), torch.from_numpy(std) * 0.7, rtol=0.2, atol=0)
    again, _ = LatentDataset(folder, "train", hflip=1.0, seed=0).__getitems__(keys[::-1])
    assert torch.equal(again.flip(0), drawn)
    other, _ = LatentDataset(folder, "train", hflip=1.0, seed=1).__getitems__(keys)
    assert not torch.equal(other, drawn)


def test_interrupted_work_goes_on(encode: Any) -> None:
    folder = encode()
    whole = files(folder)
    kept = folder / "train" / "00000.npy"
    before = kept.stat().st_mtime_ns
    (folder / "train" / "00001.npy").unlink()
    shutil.rmtree(folder / "val")
    with pytest.raises(ValueError, match="not written yet"):
        LatentFolder(folder).labels("val")
    encode()
    assert files(folder) == whole
    assert kept.stat().st_mtime_ns == before


def test_processes_share_the_work(encode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = files(encode())
    monkeypatch.setenv("WORLD_SIZE", "2")
    counts = []
    for rank in "10":  # the first process need not be the first to come
        monkeypatch.setenv("RANK", rank)
        counts.append(len(files(encode(output=tmp_path / "shared"))))
    assert counts[0] < counts[1]
    assert files(tmp_path / "shared") == whole


def test_images_that_cannot_be_read(encode: Any, image_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(image_folder, tmp_path / "images")
    bad = sorted((tmp_path / "images" / "train" / "seven").iterdir())[2]
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=bad.name):
        encode(root=str(tmp_path / "images"))
    with pytest.warns(UserWarning, match="passed over"):
        folder = LatentFolder(encode(root=str(tmp_path / "images"), on_bad_image="skip"))
    labels = folder.labels("train")
    assert labels[2] == -1
    data = LatentDataset(folder, "train", hflip=0.0, seed=0)
    assert len(data) == len(labels) - 1
    latents, found = data.__getitems__([(0, i) for i in range(len(data))])
    assert torch.equal(found, labels[labels >= 0])
    assert latents.flatten(1).std(dim=1).min() > 0


@pytest.mark.parametrize("change", ["image_size", "images"])
def test_another_set_is_not_mixed_in(encode: Any, change: str, image_folder: Path, tmp_path: Path) -> None:
    folder = encode()
    before = files(folder)
    if change == "images":
        shutil.copytree(image_folder, tmp_path / "images")
        first = next((tmp_path / "images" / "train" / "seven").iterdir())
        first.rename(first.with_name("renamed.png"))
        with pytest.raises(ValueError, match=r"other images or settings \(source\)"):
            encode(root=str(tmp_path / "images"))
    else:
        record = json.loads((folder / "latents.json").read_text()) | {"image_size": 99}
        (folder / "latents.json").write_text(json.dumps(record))
        before = files(folder)
        with pytest.raises(ValueError, match=r"other images or settings \(image_size\)"):
            encode()
    assert files(folder) == before


def test_training_data(encode: Any) -> None:
    folder = encode()
    data = GenerationData(
        DataConfig(source="latents", root=str(folder), batch_size=4, hflip=0.5, num_workers=1), seed=0
    )
    assert (data.channels, data.size, data.has_val) == (2, [4, 4], True)
    clean, _, noise, _ = next(iter(data.train_loader()))
    assert clean.shape == noise.shape == (4, 2, 4, 4)
    with pytest.raises(ValueError, match="not those of the model"):
        GenerationData(DataConfig(source="latents", root=str(folder)), seed=0, class_names=["three", "seven"])


def test_the_command(
    tmp_path: Path, vae_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    argv = ["data", "latents", str(tmp_path / "digits"), "--source", "digits", "--vae", str(vae_folder)]
    assert main([*argv, "--image_size", "8", "--batch_size", "512", "--device", "cpu"]) == 0
    folder = LatentFolder(tmp_path / "digits")
    assert folder.shape == [2, 2, 2]
    drawn, _ = LatentDataset(folder, "train", hflip=0.0, seed=0).__getitems__([(0, i) for i in range(1024)])
    said = re.search(r"latents of 2 x 2 x 2; .*mean (-?[\d.]+), deviation ([\d.]+)", capsys.readouterr().out)
    assert said
    assert float(said[1]) == pytest.approx(drawn.mean().item(), abs=0.05)
    assert float(said[2]) == pytest.approx(drawn.std().item(), abs=0.05)
    assert main(["data", "latents", str(tmp_path / "x"), "--source", "digits", "--vae", str(tmp_path / "nowhere")]) == 2
    assert "no AutoencoderKL at" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="weightformer data latents"):
        LatentFolder(tmp_path)
    (tmp_path / "latents.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        LatentFolder(tmp_path)
