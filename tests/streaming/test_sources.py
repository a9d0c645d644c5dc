"""Every reader returns the pixels that a whole-image reader does, and says where it failed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.streaming import RegionError, find_sources, open_source, stream
from weightformer.streaming.sources import OpenSlideSource, PillowSource, RasterioSource, Source

tifffile = pytest.importorskip("tifffile")
zarr = pytest.importorskip("zarr")

REGIONS = [(0, 427, 0, 640), (100, 301, 3, 639), (426, 427, 639, 640), (64, 128, 64, 128)]


def assert_same_pixels(source: Source, pixels: np.ndarray) -> None:
    """``pixels`` is (C, H, W)."""
    assert (source.channels, source.height, source.width) == pixels.shape
    for top, bottom, left, right in REGIONS:
        region = source.read(top, bottom, left, right).numpy()
        assert region.dtype == pixels.dtype
        np.testing.assert_array_equal(region, pixels[:, top:bottom, left:right])
    source.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"rowsperstrip": 7},
        {"rowsperstrip": 7, "compression": "zlib"},
        {"tile": (64, 128), "compression": "zlib", "predictor": True},
        {"tile": (16, 16), "bigtiff": True},
        {"tile": (32, 32), "planarconfig": "separate", "compression": "zlib"},
        {"planarconfig": "separate"},
        {"byteorder": ">"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiff(tmp_path: Path, photograph: np.ndarray, kwargs: dict, dtype: type) -> None:
    pixels = photograph.astype(dtype) * (1 if dtype == np.uint8 else 200)
    planar = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    tifffile.imwrite(
        tmp_path / "image.tif", planar if "planarconfig" in kwargs else pixels, photometric="rgb", **kwargs
    )
    assert_same_pixels(open_source(tmp_path / "image.tif"), planar)


def test_tiff_with_jpeg_tiles_and_of_one_band(tmp_path: Path, photograph: np.ndarray) -> None:
    pytest.importorskip("imagecodecs")
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, photograph, tile=(64, 64), compression="jpeg", photometric="rgb")
    assert_same_pixels(open_source(path), tifffile.imread(path).transpose(2, 0, 1))
    tifffile.imwrite(tmp_path / "grey.tif", photograph[..., 0], tile=(64, 64))
    assert_same_pixels(open_source(tmp_path / "grey.tif"), photograph[None, ..., 0])


def test_pillow_and_exif(tmp_path: Path, photograph: np.ndarray) -> None:
    Image.fromarray(photograph).save(tmp_path / "image.png")
    assert_same_pixels(open_source(str(tmp_path / "image.png")), photograph.transpose(2, 0, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise
    Image.fromarray(photograph).save(tmp_path / "turned.png", exif=exif)
    source = open_source(tmp_path / "turned.png")
    turned = np.rot90(photograph, -1).transpose(2, 0, 1)
    np.testing.assert_array_equal(source.read(0, source.height, 0, source.width).numpy(), turned)


def test_pillow_sixteen_bits_and_transparency(tmp_path: Path, photograph: np.ndarray) -> None:
    deep = photograph[..., 0].astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert_same_pixels(open_source(tmp_path / "deep.png"), deep[None])
    alpha = np.zeros(photograph.shape[:2], np.uint8)
    alpha[:200] = 255
    Image.fromarray(np.dstack([photograph, alpha])).save(tmp_path / "clear.png")
    white = photograph.copy()
    white[200:] = 255
    assert_same_pixels(open_source(tmp_path / "clear.png"), white.transpose(2, 0, 1))


def test_pillow_decodes_when_it_is_read(tmp_path: Path, photograph: np.ndarray) -> None:
    """Sizes are known at once; damage shows at the read, which names the file and the region."""
    Image.fromarray(photograph).save(tmp_path / "image.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "image.png").read_bytes()[:100_000])
    source = open_source(tmp_path / "half.png")
    assert (source.height, source.width) == (427, 640)
    with pytest.raises(RegionError, match=r"half\.png: rows 0-64, columns 0-640 could not be read.*truncated"):
        source.read(0, 64, 0, 640)


def test_images_are_found(tmp_path: Path, photograph: np.ndarray) -> None:
    for name in ("b.tif", "deep/a.png", "deep/notes.txt", ".hidden.png", "deep/.cache/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    zarr.create_array(str(tmp_path / "deep" / "z.zarr"), shape=(9, 9), dtype="u1")
    write_tiles(tmp_path / "tiles", photograph)
    found = find_sources([tmp_path / "deep", tmp_path / "b.tif"])
    assert list(found) == ["a.png", "z.zarr", "b.tif"]
    assert found["a.png"] == tmp_path / "deep" / "a.png"
    assert list(find_sources([tmp_path]))[:3] == ["b.tif", "deep/a.png", "deep/z.zarr"]
    assert find_sources([tmp_path / "tiles"], tiles=True) == {"tiles": tmp_path / "tiles"}
    assert len(find_sources([tmp_path / "tiles"])) == 12
    assert find_sources([tmp_path / "deep" / "z.zarr"]) == {"z.zarr": tmp_path / "deep" / "z.zarr"}
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        find_sources([tmp_path / "absent"])
    with pytest.raises(ValueError, match="have the same name"):
        find_sources([tmp_path / "deep", tmp_path / "deep" / "a.png"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no images under"):
        find_sources([tmp_path / "empty"])


@pytest.mark.parametrize("axes", ["HWC", "CHW", "TCHW", "group"])
def test_zarr(tmp_path: Path, photograph: np.ndarray, axes: str) -> None:
    planar = photograph.transpose(2, 0, 1)
    data = {"HWC": photograph, "CHW": planar, "TCHW": planar[None], "group": planar[None, :, None]}[axes]
    chunks = tuple(min(side, 100) for side in data.shape)
    path = tmp_path / "image.zarr"
    store = f"{path}/0" if axes == "group" else str(path)
    if axes == "group":
        zarr.create_group(str(path))
    zarr.create_array(store, shape=data.shape, dtype=data.dtype, chunks=chunks)[:] = data
    if axes == "group":  # (T, C, Z, H, W) with three channels keeps five axes: refused by name
        with pytest.raises(ValueError, match=r"image\.zarr has shape \(1, 3, 1, 427, 640\)"):
            open_source(path)
        return
    source = open_source(path)
    assert source.tile == (100, 100)
    assert_same_pixels(source, planar)


@pytest.mark.parametrize(("package", "reader"), [("openslide", OpenSlideSource), ("rasterio", RasterioSource)])
def test_slides_and_rasters(tmp_path: Path, photograph: np.ndarray, package: str, reader: type[Source]) -> None:
    pytest.importorskip(package)
    tifffile.imwrite(tmp_path / "image.tif", photograph, tile=(64, 64), photometric="rgb", compression="zlib")
    source = reader(tmp_path / "image.tif")
    assert source.tile == (64, 64)
    assert_same_pixels(source, photograph.transpose(2, 0, 1))
    (tmp_path / "text.svs").write_text("no slide")
    with pytest.raises(ValueError, match=r"text\.svs could not be opened by"):
        reader(tmp_path / "text.svs")


def write_tiles(folder: Path, pixels: np.ndarray, side: int = 200) -> None:
    folder.mkdir()
    for row in range(-(-pixels.shape[0] // side)):
        for col in range(-(-pixels.shape[1] // side)):
            tile = pixels[row * side : (row + 1) * side, col * side : (col + 1) * side]
            Image.fromarray(tile).save(folder / f"tile_{row}_{col}.png")


def test_folder_of_tiles(tmp_path: Path, photograph: np.ndarray) -> None:
    write_tiles(tmp_path / "tiles", photograph)
    assert_same_pixels(open_source(tmp_path / "tiles"), photograph.transpose(2, 0, 1))
    (tmp_path / "tiles" / "tile_1_2.png").unlink()
    with pytest.raises(FileNotFoundError, match="row 1, column 2 is missing"):
        open_source(tmp_path / "tiles")
    Image.new("RGB", (10, 10)).save(tmp_path / "tiles" / "tile_1_2.png")
    with pytest.raises(ValueError, match=r"tile_1_2\.png is 10 x 10 px, its neighbours need 200 x 200"):
        open_source(tmp_path / "tiles")


def test_arrays_and_tensors(photograph: np.ndarray) -> None:
    planar = photograph.transpose(2, 0, 1)
    for image in (photograph, planar, torch.from_numpy(planar.copy()), torch.from_numpy(planar.copy())[None]):
        assert_same_pixels(open_source(image), planar)


def test_a_file_streams_as_its_pixels_do(tmp_path: Path, photograph: np.ndarray, model) -> None:
    """Reads cross tile borders at columns and rows that are no multiple of the patch or the tile."""
    tifffile.imwrite(tmp_path / "image.tif", photograph, tile=(64, 96), photometric="rgb", compression="zlib")
    expected = stream(model, photograph, output="features", progress=False)
    got = stream(model, tmp_path / "image.tif", output="features", progress=False, strip_rows=5)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def test_sixteen_bits_a_channel_stream_as_eight_do(tmp_path: Path, photograph: np.ndarray, model) -> None:
    wide = photograph[:64, :64].astype(np.uint16) * 257  # 65535 = 255 * 257
    tifffile.imwrite(tmp_path / "wide.tif", wide, tile=(32, 32), photometric="rgb")
    expected = stream(model, photograph[:64, :64], progress=False)
    assert (stream(model, tmp_path / "wide.tif", progress=False) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_narrow_reads_join_without_a_seam(tmp_path: Path, photograph: np.ndarray, model, monkeypatch) -> None:
    monkeypatch.setattr("weightformer.streaming.embedding._READ_BYTES", 16 * 4 * 3 * 100)
    tifffile.imwrite(tmp_path / "image.tif", photograph, tile=(64, 96), photometric="rgb", compression="zlib")
    expected = stream(model, photograph, output="features", progress=False)
    reads = []
    source = open_source(tmp_path / "image.tif")
    original = source.read
    monkeypatch.setattr(source, "read", lambda *region: reads.append(region) or original(*region))
    assert (stream(model, source, output="features", progress=False) == expected).all()
    assert {right - left for _, _, left, right in reads} == {96, 640 % 96}


def test_truncated_tiff(tmp_path: Path, photograph: np.ndarray, model) -> None:
    for name, kwargs in (("tiled.tif", {"tile": (64, 64), "compression": "zlib"}), ("plain.tif", {})):
        path = tmp_path / name
        tifffile.imwrite(path, photograph, photometric="rgb", **kwargs)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(RegionError, match=rf"{name}: rows \d+-\d+, columns 0-640 could not be read.*truncated"):
            stream(model, path, progress=False)


def test_damaged_tile(tmp_path: Path, photograph: np.ndarray, model) -> None:
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, photograph, photometric="rgb", tile=(64, 64), compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages.first.dataoffsets[-1]
    data = bytearray(path.read_bytes())
    data[offset : offset + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(RegionError, match=r"image\.tif: rows 384-427, columns 0-640 could not be read"):
        stream(model, path, progress=False)


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, photograph: np.ndarray, model) -> None:
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, photograph, photometric="rgb", tile=(64, 64))

    def replace(share: float) -> None:
        if 0 < share < 0.2:
            tifffile.imwrite(path, photograph[:300], photometric="rgb", tile=(64, 64))

    with pytest.raises(RegionError, match=r"image\.tif: rows \d+-\d+, .* changed after it was opened"):
        stream(model, path, progress=replace, strip_rows=4)

    zarr.create_array(str(tmp_path / "z.zarr"), shape=photograph.shape, dtype="u1", chunks=(64, 64, 3))[:] = photograph
    source = open_source(tmp_path / "z.zarr")
    zarr.open(str(tmp_path / "z.zarr"), mode="r+").resize((300, 640, 3))
    with pytest.raises(RegionError, match=r"z\.zarr: rows 0-64, .* changed"):
        source.read(0, 64, 0, 64)

    write_tiles(tmp_path / "tiles", photograph)
    source = open_source(tmp_path / "tiles")
    Image.new("RGB", (10, 10)).save(tmp_path / "tiles" / "tile_0_0.png")
    with pytest.raises(RegionError, match=r"tiles: rows 0-64, .*tile_0_0\.png changed"):
        source.read(0, 64, 0, 64)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no image at"):
        open_source(tmp_path / "absent.tif")
    for name, text in (("a.tif", "TIFF"), ("b.png", "PNG"), ("c.jpg", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            open_source(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tiles"):
        open_source(tmp_path / "empty")
    with pytest.raises(ValueError, match="cannot read an image from dict"):
        open_source({})
    tifffile.imwrite(
        tmp_path / "volume.tif",
        np.zeros((4, 32, 32), np.uint8),
        volumetric=True,
        tile=(16, 16, 16),
        photometric="minisblack",
    )
    with pytest.raises(ValueError, match="is a volume"):
        open_source(tmp_path / "volume.tif")
    tifffile.imwrite(tmp_path / "turned.tif", np.zeros((32, 32), np.uint8), extratags=[(274, "H", 1, 6, True)])
    with pytest.raises(ValueError, match="stored turned"):
        open_source(tmp_path / "turned.tif")


def test_a_png_beyond_pillows_limit_names_the_way_out(tmp_path: Path, monkeypatch) -> None:
    Image.new("L", (200, 200)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"large\.png: .*tiled TIFF"):
        PillowSource(tmp_path / "large.png")
