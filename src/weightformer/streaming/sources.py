"""Images that are read region by region and need never be whole in memory."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightformer.streaming.errors import RegionError

__all__ = [
    "ArraySource",
    "OpenSlideSource",
    "PillowSource",
    "RasterioSource",
    "Source",
    "TiffSource",
    "TileFolderSource",
    "ZarrSource",
    "find_sources",
    "import_reader",
    "open_source",
]

Pixels = np.ndarray[Any, Any]

_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".pbm", ".pgm", ".ppm"}
_TIFFS = {".tif", ".tiff", ".btf"}
_SLIDES = {".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".dcm"}
_RASTERS = {".jp2", ".vrt", ".img", ".ecw"}
_SUFFIXES = _PICTURES | _TIFFS | _SLIDES | _RASTERS
_GREY = ("L", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes that are one channel here
_TURNED = range(5, 9)  # EXIF orientations that swap the sides


class Source(ABC):
    """An image that can be read by region.

    Subclasses set the attributes and implement ``_read``, which is called from a second thread, one call at a time.

    Attributes:
        name: what error messages call it.
        height: pixels.
        width: pixels.
        channels: number of bands.
        tile: pixels (height, width) that are decoded together; reads follow its columns.
    """

    name: str
    height: int
    width: int
    channels: int
    tile: tuple[int, int] = (1, 1)

    def read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Pixels (channels, bottom - top, right - left) in the source's own type.

        Raises:
            RegionError: they cannot be read, or the source is no longer what was opened.
        """
        region = f"rows {top}-{bottom}, columns {left}-{right}"
        try:
            self._check_unchanged()
            pixels = self._read(top, bottom, left, right)
        except Exception as error:
            raise RegionError(f"{self.name}: {region} could not be read: {error}") from error
        expected = (self.channels, bottom - top, right - left)
        if pixels.shape != expected:
            raise RegionError(f"{self.name}: {region} came as {tuple(pixels.shape)} instead of {expected}")
        return pixels

    @abstractmethod
    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Like `read`, raising whatever the reader raises."""

    def identity(self) -> str:
        """Text that differs whenever the pixels may differ: an unfinished run resumes only on the same image."""
        return f"{self.name} {self.height} x {self.width}"

    def close(self) -> None:  # noqa: B027 (most sources hold nothing open)
        """Release the file."""

    def _check_unchanged(self) -> None:  # noqa: B027 (an array in memory cannot change size)
        """Raise if the source changed since it was opened."""


class _FileSource(Source):
    """A source in one file, watched for changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = str(path)
        self._opened = self._stat()

    def identity(self) -> str:
        """The path, size and date of the file."""
        size, modified = self._opened
        return f"{self.path.resolve()} {size} bytes, modified {modified}"

    def _check_unchanged(self) -> None:
        if self._stat() != self._opened:
            raise RuntimeError("the file changed after it was opened")

    def _stat(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns


class ArraySource(Source):
    """A tensor (C, H, W) or (H, W), or an array (H, W), (H, W, C) or (C, H, W).

    Of an array's first and last axis the shorter one is the channels.

    Raises:
        ValueError: it has another number of axes.
    """

    def __init__(self, image: Tensor | Pixels, name: str = "image") -> None:
        pixels: Any = image.detach() if isinstance(image, Tensor) else image
        if pixels.ndim == 4 and len(pixels) == 1:
            pixels = pixels[0]
        if pixels.ndim == 2:
            pixels = pixels[None]
        elif pixels.ndim == 3 and not isinstance(image, Tensor) and _channels_last(pixels.shape):
            pixels = pixels.transpose(2, 0, 1)
        if pixels.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(image.shape)}; expected one image, (channels, height, width)")
        self.name, self._pixels = name, pixels
        self.channels, self.height, self.width = pixels.shape

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        region = self._pixels[:, top:bottom, left:right]
        if isinstance(region, Tensor):
            return region
        # A copy, as the array may be read-only (a memory map) or in the byte order of another machine.
        return torch.from_numpy(region.astype(region.dtype.newbyteorder("=")))

    def identity(self) -> str:
        """A hash of all pixels."""
        digest = hashlib.blake2b(repr((tuple(self._pixels.shape), self._pixels.dtype)).encode())
        for top in range(0, self.height, 256):
            rows = self._read(top, min(top + 256, self.height), 0, self.width)
            digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class PillowSource(_FileSource):
    """A PNG, JPEG or other file that Pillow reads: upright by its EXIF orientation, transparency laid on white.

    These formats cannot be read by region: the file is decoded whole at the first read, into one byte a channel (two
    for 16-bit greys).

    Raises:
        ValueError: the file is no image, or exceeds ``PIL.Image.MAX_IMAGE_PIXELS`` twice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from PIL import ExifTags, Image

        super().__init__(path)
        try:
            with Image.open(path) as image:
                # The base class's: a PNG's own would decode all pixels, as its orientation may follow them.
                exif = Image.Image.getexif(image)
                size, turned = image.size, exif.get(ExifTags.Base.Orientation, 1) in _TURNED
                self.channels = 1 if image.mode in _GREY else 3
        except Image.DecompressionBombError as error:
            raise ValueError(
                f"{path}: {error}. Store it as a tiled TIFF, which is read by region, or raise "
                "PIL.Image.MAX_IMAGE_PIXELS if you trust the file and have memory for all of it"
            ) from error
        except (OSError, SyntaxError) as error:
            raise ValueError(f"{path} could not be opened as an image: {error}") from error
        self.width, self.height = reversed(size) if turned else size
        self._pixels: ArraySource | None = None

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        if self._pixels is None:
            self._pixels = ArraySource(self._decode())
        return self._pixels._read(top, bottom, left, right)

    def _decode(self) -> Pixels:
        from PIL import Image, ImageOps

        with Image.open(self.path) as image:
            upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        if upright.size != (self.width, self.height):
            raise RuntimeError("its orientation is stored behind its pixels; store it upright")
        return np.asarray(upright if upright.mode in _GREY else upright.convert("RGB"))

    def _check_unchanged(self) -> None:
        if self._pixels is None:
            super()._check_unchanged()


class TiffSource(_FileSource):
    """The first image of a TIFF or BigTIFF, at full resolution, decoded tile by tile or strip by strip.

    Raises:
        ValueError: the file is no TIFF or is truncated in its headers, or its first image is a volume, has a
            palette or is stored turned.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        tifffile = import_reader("tifffile")
        super().__init__(path)
        try:
            self._tiff = tifffile.TiffFile(path)
            self._page = page = self._tiff.pages.first.keyframe
            self._plain = page.is_memmappable
        except Exception as error:
            raise ValueError(f"{path} could not be opened as a TIFF: {error}") from error
        if page.imagedepth != 1:
            raise ValueError(f"{path} is a volume; only single planes are read")
        if "Orientation" in page.tags and page.tags["Orientation"].value != 1:
            raise ValueError(f"{path} is stored turned or mirrored (its orientation tag); store it upright")
        if page.photometric == tifffile.PHOTOMETRIC.PALETTE:
            raise ValueError(f"{path} stores palette indices; convert it to RGB")
        self.height, self.width, self.channels = page.imagelength, page.imagewidth, page.samplesperpixel
        self._separate = self.channels > 1 and page.planarconfig == tifffile.PLANARCONFIG.SEPARATE
        self._planes = self.channels if self._separate else 1
        if page.is_tiled:
            self.tile = page.tilelength, page.tilewidth
        else:
            self.tile = 1 if self._plain else min(page.rowsperstrip, self.height), self.width

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        if self._plain:
            planes = [self._plain_rows(plane, top, bottom)[:, :, left:right] for plane in range(self._planes)]
            return torch.from_numpy(np.concatenate(planes))
        out = np.zeros((self.channels, bottom - top, right - left), self._page.dtype)
        tile_h, tile_w = self.tile
        per_row, per_column = -(-self.width // tile_w), -(-self.height // tile_h)
        for plane in range(self._planes):
            into = out[plane : plane + 1] if self._separate else out
            for ty in range(top // tile_h, -(-bottom // tile_h)):
                for tx in range(left // tile_w, -(-right // tile_w)):
                    pixels = self._tile((plane * per_column + ty) * per_row + tx)
                    _paste(into, pixels, ty * tile_h - top, tx * tile_w - left)
        return torch.from_numpy(out)

    def _tile(self, index: int) -> Pixels:
        """One tile (channels, height, width); a tile that the file leaves out is zero, as the format says."""
        size = self._page.databytecounts[index]
        data = self._bytes(self._page.dataoffsets[index], size, f"tile {index}") if size else None
        pixels, _, shape = self._page.decode(data, index, jpegtables=self._page.jpegtables)
        if pixels is None:
            return np.zeros((self.channels // self._planes, *shape[1:3]), self._page.dtype)
        return pixels[0].transpose(2, 0, 1)

    def _plain_rows(self, plane: int, top: int, bottom: int) -> Pixels:
        """Whole rows (channels, height, width) of uncompressed pixels that lie one after the other in the file."""
        dtype = self._page.dtype.newbyteorder(self._tiff.byteorder)
        bands = self.channels // self._planes
        row_bytes = self.width * bands * dtype.itemsize
        offset = self._page.dataoffsets[0] + (plane * self.height + top) * row_bytes
        data = self._bytes(offset, (bottom - top) * row_bytes, f"row {bottom - 1}")
        rows = np.frombuffer(data, dtype).astype(self._page.dtype)
        return rows.reshape(bottom - top, self.width, bands).transpose(2, 0, 1)

    def _bytes(self, offset: int, size: int, what: str) -> bytes:
        end, length = offset + size, self._opened[0]
        if end > length:
            raise EOFError(f"the file is truncated: {what} ends at byte {end} of {length}")
        self._tiff.filehandle.seek(offset)
        return self._tiff.filehandle.read(size)

    def close(self) -> None:
        """Close the file."""
        self._tiff.close()


class ZarrSource(Source):
    """A Zarr array (H, W), (H, W, C) or (C, H, W), or a group (OME-Zarr) whose array ``0`` is the full resolution.

    Leading axes of length one (time, depth) are passed over. As Zarr has it, a chunk that was never written is filled.

    Raises:
        ValueError: it is no Zarr, or has another number of axes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        zarr = import_reader("zarr")
        self.name, self.path = str(path), Path(path)
        try:
            node = zarr.open(str(path), mode="r")
            self._array = node if hasattr(node, "shape") else node["0"]
        except Exception as error:
            raise ValueError(f"{path} could not be opened as a Zarr array: {error}") from error
        shape, chunks = self._array.shape, self._array.chunks
        self._lead = 0
        while len(shape) - self._lead > 2 and shape[self._lead] == 1:
            self._lead += 1
        shape, chunks = shape[self._lead :], chunks[self._lead :]
        if len(shape) not in (2, 3):
            raise ValueError(f"{path} has shape {self._array.shape}; expected an image with at most three axes")
        self._last = len(shape) == 3 and _channels_last(shape)
        axes = (0, 1) if self._last or len(shape) == 2 else (1, 2)
        self.height, self.width = (int(shape[axis]) for axis in axes)
        self.channels = 1 if len(shape) == 2 else int(shape[2] if self._last else shape[0])
        self.tile = chunks[axes[0]], chunks[axes[1]]
        self._metadata = self._stat()

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        where: tuple[Any, ...] = (slice(top, bottom), slice(left, right))
        if len(self._array.shape) - self._lead == 3:
            where = (*where, slice(None)) if self._last else (slice(None), *where)
        where = (0,) * self._lead + where
        pixels = torch.from_numpy(np.ascontiguousarray(self._array[where]))
        return pixels.permute(2, 0, 1) if self._last else pixels.reshape(self.channels, bottom - top, right - left)

    def identity(self) -> str:
        """The path, with size and date of its metadata."""
        return f"{self.path.resolve()} {self._metadata}"

    def _check_unchanged(self) -> None:
        if self._stat() != self._metadata:
            raise RuntimeError("the array's metadata changed after it was opened")

    def _stat(self) -> list[tuple[str, int, int]]:
        found = [p for pattern in ("zarr.json", ".zarray", "0/zarr.json", "0/.zarray") for p in self.path.glob(pattern)]
        return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in found]


class OpenSlideSource(_FileSource):
    """A slide at full resolution; what the scanner left out is white.

    Raises:
        ValueError: OpenSlide cannot open the file.
    """

    tile = (256, 256)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        openslide = import_reader("openslide")
        super().__init__(path)
        try:
            self._slide = openslide.OpenSlide(str(path))
        except openslide.OpenSlideError as error:
            raise ValueError(f"{path} could not be opened by OpenSlide: {error}") from error
        self.width, self.height = self._slide.dimensions
        self.channels = 3
        properties = self._slide.properties
        self.tile = (
            int(properties.get("openslide.level[0].tile-height", 256)),
            int(properties.get("openslide.level[0].tile-width", 256)),
        )

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        from PIL import Image

        region = self._slide.read_region((left, top), 0, (right - left, bottom - top))
        white = Image.new("RGB", region.size, (255, 255, 255))
        white.paste(region, mask=region.getchannel("A"))
        return torch.from_numpy(np.array(white)).permute(2, 0, 1)

    def close(self) -> None:
        """Close the file."""
        self._slide.close()


class RasterioSource(_FileSource):
    """A raster that GDAL reads (GeoTIFF, JPEG 2000, VRT, ...), all bands.

    Raises:
        ValueError: GDAL cannot open the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        rasterio = import_reader("rasterio")
        super().__init__(path)
        try:
            with warnings.catch_warnings():  # pixels are all that is wanted, georeferenced or not
                warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
                self._raster = rasterio.open(path)
        except rasterio.errors.RasterioIOError as error:
            raise ValueError(f"{path} could not be opened by rasterio: {error}") from error
        self.height, self.width, self.channels = self._raster.height, self._raster.width, self._raster.count
        self.tile = self._raster.block_shapes[0]

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        return torch.from_numpy(self._raster.read(window=((top, bottom), (left, right))))

    def close(self) -> None:
        """Close the file."""
        self._raster.close()


class TileFolderSource(Source):
    """A folder of tiles named ``..._<row>_<column>.<png|jpg|tif|...>``, counted from 0 or 1.

    Tiles of one row share their height, tiles of one column their width.

    Raises:
        FileNotFoundError: a tile of the grid is missing.
        ValueError: no file has such a name, or a tile does not fit its neighbours.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from PIL import Image

        self.name, self.path = str(folder), Path(folder)
        named = {
            (int(match[1]), int(match[2])): path
            for path in sorted(self.path.iterdir())
            if (match := re.search(r"(\d+)_(\d+)\.(?:png|jpe?g|tiff?|bmp|webp)$", path.name, re.IGNORECASE))
        }
        if not named:
            raise ValueError(f"{folder} holds no tiles named like tile_<row>_<column>.png")
        rows, cols = (range(min(k[axis] for k in named), max(k[axis] for k in named) + 1) for axis in (0, 1))
        for key in ((r, c) for r in rows for c in cols):
            if key not in named:
                raise FileNotFoundError(f"{folder}: the tile of row {key[0]}, column {key[1]} is missing")
        self._tiles = [[named[r, c] for c in cols] for r in rows]
        sizes: dict[Path, tuple[int, int]] = {}
        for path in named.values():
            with Image.open(path) as image:
                sizes[path] = image.size
        heights = [sizes[row[0]][1] for row in self._tiles]
        widths = [sizes[path][0] for path in self._tiles[0]]
        for row, height in zip(self._tiles, heights, strict=True):
            for path, width in zip(row, widths, strict=True):
                if sizes[path] != (width, height):
                    raise ValueError(
                        f"{path} is {sizes[path][1]} x {sizes[path][0]} px, its neighbours need {height} x {width}"
                    )
        self._tops, self._lefts = np.cumsum([0, *heights]).tolist(), np.cumsum([0, *widths]).tolist()
        self.height, self.width, self.channels = self._tops[-1], self._lefts[-1], 3
        self.tile = max(heights), max(widths)

    def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        from PIL import Image

        out = np.zeros((3, bottom - top, right - left), np.uint8)
        for row, y, y_end in zip(self._tiles, self._tops, self._tops[1:], strict=False):
            for path, x, x_end in zip(row, self._lefts, self._lefts[1:], strict=False):
                if y >= bottom or y_end <= top or x >= right or x_end <= left:
                    continue
                with Image.open(path) as image:
                    if image.size != (x_end - x, y_end - y):
                        raise RuntimeError(f"{path.name} changed its size after it was opened")
                    try:
                        pixels = np.asarray(image.convert("RGB"))
                    except OSError as error:
                        raise RuntimeError(f"{path.name}: {error}") from error
                _paste(out, pixels.transpose(2, 0, 1), y - top, x - left)
        return torch.from_numpy(out)

    def identity(self) -> str:
        """The path, with size and date of every tile."""
        digest = hashlib.blake2b()
        for path in (path for row in self._tiles for path in row):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return f"{self.path.resolve()} {digest.hexdigest()}"


def open_source(source: Any) -> Source:
    """The reader for an image.

    Args:
        source: a `Source`, a tensor (C, H, W), an array, or a path: ``.tif`` by tile, ``.zarr``, a slide by OpenSlide,
            ``.jp2`` and ``.vrt`` by rasterio, a folder of tiles, anything else by Pillow.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: it cannot be opened, or is none of these.
        ImportError: the library that reads it is not installed.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, (Tensor, np.ndarray)):
        return ArraySource(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"cannot read an image from {type(source).__name__}; give a tensor, an array or a path")
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"no image at {path}")
    return _reader(path)(path)


def find_sources(paths: Sequence[str | os.PathLike[str]], *, tiles: bool = False) -> dict[str, Path]:
    """Images among ``paths`` that `open_source` opens, by name; folders are searched to any depth, in sorted order.

    The name is the path below the given folder, or the file's own.

    Args:
        paths: files, Zarr stores, or folders of them.
        tiles: each folder given is one image, cut into tiles.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without images.
        ValueError: two images have the same name.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {path}")
        single = not path.is_dir() or tiles or _is_zarr(path)
        images = {path.name: path} if single else {str(p.relative_to(path)): p for p in _images_below(path)}
        if not images:
            raise FileNotFoundError(f"no images under {path}; is it one image cut into tiles?")
        if doubled := sorted(found.keys() & images.keys()):
            name = doubled[0]
            raise ValueError(f"{found[name]} and {images[name]} have the same name; give the folder that holds both")
        found |= images
    return found


def _images_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        stores = [name for name in folders if _is_zarr(Path(here, name))]
        folders[:] = sorted(name for name in folders if name not in stores and not name.startswith("."))
        images = [name for name in files if Path(name).suffix.lower() in _SUFFIXES and not name.startswith(".")]
        found += [Path(here, name) for name in (*stores, *images)]
    return sorted(found)


def _is_zarr(folder: Path) -> bool:
    return folder.suffix.lower() == ".zarr" or any(
        (folder / name).exists() for name in ("zarr.json", ".zarray", ".zgroup")
    )


def _reader(path: Path) -> Callable[[Path], Source]:
    suffix = path.suffix.lower()
    if path.is_dir():
        return ZarrSource if _is_zarr(path) else TileFolderSource
    if suffix in _TIFFS:
        return TiffSource
    if suffix in _SLIDES:
        return OpenSlideSource
    return RasterioSource if suffix in _RASTERS else PillowSource


def _channels_last(shape: tuple[int, ...]) -> bool:
    return shape[-1] <= shape[0]


def _paste(into: Pixels, pixels: Pixels, top: int, left: int) -> None:
    """Copy the part of ``pixels`` that falls inside ``into`` when its corner is put at (top, left)."""
    height, width = into.shape[1:]
    y, x = max(top, 0), max(left, 0)
    part = pixels[:, y - top : height - top, x - left : width - left]
    into[:, y : y + part.shape[1], x : x + part.shape[2]] = part


def import_reader(name: str, extra: str = "streaming") -> Any:
    """An optional library, which this extra brings.

    Raises:
        ImportError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this needs {name}: pip install 'weightformer[{extra}]'") from error
