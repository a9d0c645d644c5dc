"""Image files of every kind that turns up in real folders, written here with PIL and read back."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification.images import ImageReadError, find_images, own_pixel_limit, read_image

LIMIT = 10**6


def read(path: Path, in_chans: int = 3, max_pixels: int = LIMIT) -> np.ndarray:
    image = read_image(path, in_chans, max_pixels)
    assert isinstance(image, Image.Image)
    assert image.mode == {1: "L", 3: "RGB"}[in_chans]
    return np.asarray(image)


def noise(*shape: int, dtype: type = np.uint8, high: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def save(path: Path, array: np.ndarray, **options: object) -> Path:
    Image.fromarray(array).save(path, **options)
    return path


# Modes


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp", ".ppm"])
def test_rgb_is_read_as_it_is(suffix: str, tmp_path: Path) -> None:
    array = noise(20, 30, 3)
    options = {"lossless": True} if suffix == ".webp" else {}
    assert np.array_equal(read(save(tmp_path / f"a{suffix}", array, **options)), array)


def test_grey_and_rgb_follow_in_chans(tmp_path: Path) -> None:
    grey = noise(20, 30)
    path = save(tmp_path / "grey.png", grey)
    assert np.array_equal(read(path, 1), grey)
    assert np.array_equal(read(path, 3), np.repeat(grey[..., None], 3, 2))
    copy = save(tmp_path / "copy.png", np.repeat(grey[..., None], 3, 2))
    assert np.array_equal(read(copy, 1), grey)  # the RGB copy of a grey image is that grey image


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_16_bit_grey_is_scaled_by_its_full_range(suffix: str, tmp_path: Path) -> None:
    array = np.array([[0, 257, 32896, 65535], [128, 129, 65278, 65406]], np.uint16)
    path = save(tmp_path / f"a{suffix}", array)
    expected = [[0, 1, 128, 255], [0, 1, 254, 254]]
    assert read(path, 1).tolist() == expected
    assert read(path, 3)[..., 2].tolist() == expected


def test_float_grey_is_taken_in_0_to_1_only(tmp_path: Path) -> None:
    assert read(save(tmp_path / "a.tif", np.array([[0, 0.5, 1]], np.float32)), 1).tolist() == [[0, 128, 255]]
    for value in (1.5, -0.1, np.nan):
        path = save(tmp_path / "bad.tif", np.array([[0, value]], np.float32))
        with pytest.raises(ImageReadError, match=r"bad\.tif: its grey values .* outside of 0\.\.1"):
            read(path, 1)


def test_32_bit_integers_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", np.array([[0, 70000]], np.int32))
    with pytest.raises(ImageReadError, match=r"a\.tif: its grey values 0\.\.70000 are outside of 0\.\.65535"):
        read(path)


def test_cmyk_is_converted(tmp_path: Path) -> None:
    colours = [(255, 0, 0), (255, 255, 255), (0, 0, 0), (20, 200, 90)]
    for i, colour in enumerate(colours):
        Image.new("RGB", (16, 16), colour).convert("CMYK").save(tmp_path / f"{i}.jpg", quality=100)
        assert np.abs(read(tmp_path / f"{i}.jpg").astype(int) - colour).max() <= 4
    assert np.abs(read(tmp_path / "0.jpg", 1).astype(int) - 76).max() <= 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparency_is_laid_on_white(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1))
    image.putdata([(10, 10, 10, 255), (10, 10, 10, 0), (10, 10, 10, 51 if mode != "P" else 255)])
    path = tmp_path / ("a.tif" if mode == "PA" else "a.png")
    if mode == "P":
        image = image.convert("RGB").convert("P")
        image.putdata([0, 1, 0])
        image.putpalette([10, 10, 10, 10, 10, 10])
        image.save(path, transparency=1)
    else:
        image.convert(mode).save(path)
    expected = [10, 255, 206 if mode != "P" else 10]  # 0.2 * 10 + 0.8 * 255
    assert read(path, 1).tolist() == [expected]
    assert read(path, 3)[0, :, 1].tolist() == expected


def test_palette_without_transparency(tmp_path: Path) -> None:
    array = noise(8, 8, 3) // 128 * 255
    Image.fromarray(array).quantize(8).save(tmp_path / "a.gif")
    assert np.array_equal(read(tmp_path / "a.gif"), array)


def test_two_levels_become_black_and_white(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 255, 0]], np.uint8)).convert("1").save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", 1).tolist() == [[0, 255, 0]]


def test_an_animation_gives_its_first_picture(tmp_path: Path) -> None:
    frames = [Image.new("L", (4, 4), value) for value in (0, 255)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read(tmp_path / "a.gif", 1).max() == 0


# Orientation


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int, suffix: str, tmp_path: Path) -> None:
    upright = np.zeros((20, 40), np.uint8)
    upright[:10, :20] = 255
    upright[:10, 20:] = 160
    upright[10:, :20] = 80
    # What each tag says of the stored rows and columns, from the EXIF standard's table.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"a{suffix}", np.ascontiguousarray(stored), exif=exif)
    result = read(path, 1).astype(int)
    assert result.shape == (20, 40)
    assert np.abs(result - upright)[2:8, 4:16].max() < 20
    assert np.abs(result - upright)[2:8, 24:36].max() < 20
    assert np.abs(result - upright)[12:18, 4:16].max() < 20
    assert np.abs(result - upright)[12:18, 24:36].max() < 20


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_cost_the_image(tmp_path: Path) -> None:
    array = noise(8, 8)
    for i, exif in enumerate(
        [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff\1\1"]
    ):
        path = save(tmp_path / f"{i}.png", array, exif=exif)
        assert np.array_equal(read(path, 1), array)


# More channels


@pytest.mark.parametrize("channels", [2, 4, 13])
@pytest.mark.parametrize("suffix", [".npy", ".tif"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", ">u2"])
def test_other_channel_counts_in_either_layout(channels: int, suffix: str, dtype: str, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    white = {"uint8": 255, "uint16": 65535, ">u2": 65535, "float32": 1}[dtype]
    array = (np.random.default_rng(0).random((5, 6, channels)) * white).astype(dtype)
    expected = torch.from_numpy(array.astype(np.float32) / white).permute(2, 0, 1)
    for layout in (array, array.transpose(2, 0, 1)):
        path = tmp_path / f"a{suffix}"
        if suffix == ".npy":
            np.save(path, layout)
        else:
            planar = "contig" if layout is array else "separate"
            tifffile.imwrite(path, layout, photometric="minisblack", planarconfig=planar)
        image = read_image(path, channels, LIMIT)
        assert isinstance(image, torch.Tensor)
        torch.testing.assert_close(image, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_arrays_of_1_and_3_channels_are_images_too(in_chans: int, tmp_path: Path) -> None:
    array = noise(5, 6, in_chans)
    np.save(tmp_path / "a.npy", array.astype(np.float32) / 255)
    assert np.array_equal(read(tmp_path / "a.npy", in_chans).reshape(array.shape), array)
    np.save(tmp_path / "grey.npy", array[..., 0].astype(np.uint16) * 257)
    assert np.array_equal(read(tmp_path / "grey.npy", 1), array[..., 0])
    np.save(tmp_path / "large.npy", array.astype(np.float32))
    with pytest.raises(ImageReadError, match=r"large\.npy: its values \d\.\.2\d\d are outside"):
        read(tmp_path / "large.npy", in_chans)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 6, 3), np.uint8), r"its shape \(5, 6, 3\) has no axis of 4 channels"),
        (np.zeros((1, 4, 5, 6), np.uint8), r"its shape \(1, 4, 5, 6\)"),
        (np.zeros((4, 5, 6), np.int64), "its values are int64"),
        (np.zeros((4, 5, 6), np.complex64), "its values are complex64"),
        (np.full((4, 5, 6), np.inf, np.float32), "not finite"),
        (np.zeros((4, 1001, 1000), np.uint8), r"1,001,000 pixels, more than data\.max_pixels \(1,000,000\)"),
        (np.array([None, {}]), "Python objects"),
    ],
)
def test_arrays_that_are_no_images_are_named(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ImageReadError, match=rf"a\.npy: .*{message}"):
        read_image(tmp_path / "a.npy", 4, LIMIT)


def test_other_channel_counts_need_a_format_that_has_them(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(5, 5, 3))
    with pytest.raises(ImageReadError, match=r"a\.png: .*\.npy or \.tif"):
        read_image(path, 4, LIMIT)


# Faults


def damaged(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / {"half jpeg": "a.jpg", "half png": "a.png"}.get(kind, "a.jpg")
    if kind == "text":
        path.write_text("this is no image\n" * 50)
    elif kind == "empty":
        path.touch()
    elif kind == "html":
        path.write_text("<html>404 not found</html>")
    elif kind == "bad checksum":
        path = save(tmp_path / "a.png", noise(40, 40, 3))
        content = bytearray(path.read_bytes())
        content[60:70] = b"0123456789"
        path.write_bytes(content)
    elif kind == "bad header":
        header = struct.pack(">IIBBBBB", 8, 8, 77, 2, 0, 0, 0)
        chunk = b"IHDR" + header
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)))
    elif kind in ("half jpeg", "half png", "half tif", "half npy"):
        path = tmp_path / f"a.{kind.split()[1].replace('jpeg', 'jpg')}"
        if kind == "half npy":
            np.save(path, noise(40, 40, 3))
        else:
            save(path, noise(40, 40, 3))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        raise AssertionError(kind)
    return path


KINDS = ["half jpeg", "half png", "half tif", "half npy", "text", "html", "empty", "bad checksum", "bad header"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_named(kind: str, tmp_path: Path) -> None:
    path = damaged(tmp_path, kind)
    with pytest.raises(ImageReadError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_failing_disks_are_not_bad_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        read(tmp_path / "gone.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.png"):
        read(tmp_path / "folder.png")


def test_huge_images_name_the_file_and_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (15000, 15000)).save(tmp_path / "huge.png")
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(ImageReadError, match=r"huge\.png: it has 225,000,000 pixels.*data\.max_pixels .*raise"):
        read(tmp_path / "huge.png", max_pixels=89_478_485)
    assert before == Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL itself would refuse more than twice that
    path = save(tmp_path / "a.png", noise(20, 20))
    assert read(path, max_pixels=400).shape == (20, 20, 3)
    with own_pixel_limit():
        assert Image.open(path).crop((0, 0, 19, 19)).size == (19, 19)
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(ImageReadError, match=r"400 pixels, more than data\.max_pixels"):
        read(path, max_pixels=399)
    assert Image.MAX_IMAGE_PIXELS == 100


# Finding files


def test_find_images(tmp_path: Path) -> None:
    names = ["b/10.png", "b/2.JPG", "a/deep/er/x.webp", "z.tiff", "b/array.npy"]
    hidden = [".hidden.png", ".cache/a.png", "a/.git/a.png", "b/._2.JPG"]
    for name in [*names, *hidden, "notes.txt", "a/Thumbs.db", "b/png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [tmp_path / name for name in ("a/deep/er/x.webp", "b/10.png", "b/2.JPG", "b/array.npy", "z.tiff")]
    assert find_images(tmp_path) == found
    assert find_images([str(tmp_path)]) == found
    files = [tmp_path / "z.tiff", tmp_path / ".hidden.png", tmp_path / "notes.txt"]
    assert find_images([*files, tmp_path / "b"]) == [*files, *found[1:4]]  # what is named is taken, in order


def test_find_images_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nowhere"):
        find_images([tmp_path, tmp_path / "nowhere"][1:])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no images under .*empty.*\.png"):
        find_images(tmp_path / "empty")


def test_find_images_follows_links_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").touch()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "set" / "link" / "back").symlink_to(tmp_path / "set")
    assert find_images(tmp_path / "set") == [tmp_path / "set" / "link" / "a.png"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may open any folder")
def test_a_folder_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    try:
        with pytest.raises(PermissionError, match="closed"):
            find_images(tmp_path)
    finally:
        shutil.rmtree(tmp_path / "closed", ignore_errors=True)
