"""Find image files and read them, the same way everywhere: upright, in the model's channels; errors name the file."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

__all__ = [
    "IMAGE_SUFFIXES",
    "ImageReadError",
    "Readable",
    "find_images",
    "images_below",
    "own_pixel_limit",
    "read_as_stored",
    "read_image",
]

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)

_pil_limit = threading.RLock()
Item = TypeVar("Item")


class ImageReadError(ValueError):
    """A file that is no readable image; the message names it."""


class Readable:
    """Which items of a data set in files can be read.

    One that cannot stops everything, or is remembered and passed over. In training the next readable one of the data
    set is taken instead: a rule that depends on the place alone keeps processes in step and a resumed run exact. In
    evaluation nothing is.

    Args:
        count: items of the data set.
        skip: pass over those that cannot be read.
        beside: for the message that none can: what they are read together with.
    """

    def __init__(self, count: int, *, skip: bool, beside: str = "") -> None:
        self.skip, self._beside = skip, beside
        self._bad = torch.zeros(count, dtype=torch.bool).share_memory_()  # workers write to it

    def skipped(self) -> list[int]:
        """Places of the items passed over so far, by this process or its workers."""
        return self._bad.nonzero().flatten().tolist()

    def load(self, place: int, read: Callable[[int], Item], *, train: bool) -> Item | None:
        """What ``read`` makes of the item at a place, or of the one that takes its place.

        Raises:
            ImageReadError: it cannot be read, or in training none can.
        """
        count = len(self._bad)
        for candidate in ((place + step) % count for step in range(count if train else 1)):
            if self._bad[candidate]:
                continue
            try:
                return read(candidate)
            except ImageReadError as error:
                if not self.skip:
                    raise ImageReadError(f"{error} (data.on_bad_image: skip passes over such files)") from error
                warnings.warn(f"passed over: {error}", stacklevel=3)
                self._bad[candidate] = True
        if train:
            raise ImageReadError(f"none of the {count} training images can be read{self._beside}")
        return None


def find_images(paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[Path]:
    """Image files among ``paths``: files as given, folders searched to any depth in sorted order.

    Hidden files and folders are ignored, and so are files in a folder whose suffix is not in `IMAGE_SUFFIXES`.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without images.
    """
    found: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, (str, os.PathLike)) else map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {path}")
        files = images_below(path) if path.is_dir() else [os.fspath(path)]
        if not files:
            raise FileNotFoundError(f"no images under {path} (looked for {' '.join(sorted(IMAGE_SUFFIXES))})")
        found += map(Path, files)
    return found


def images_below(folder: str | os.PathLike[str]) -> list[str]:
    """Paths of the images at any depth below a folder, sorted; possibly none.

    Links are followed, as data sets are often made of them, but never in a circle.
    """
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise error  # a folder that cannot be opened is not an empty one

    seen: set[str] = set()
    for here, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = [name for name in files if not name.startswith(".")]
        found += [os.path.join(here, name) for name in visible if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]
    return sorted(found)


@contextmanager
def own_pixel_limit() -> Iterator[None]:
    """Lift PIL's limit on image size inside this block, where `read_image` keeps its own."""
    with _pil_limit:  # it is a global of PIL's: one thread at a time may change it
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def read_image(path: str | os.PathLike[str], in_chans: int, max_pixels: int) -> Image.Image | Tensor:
    """One image, turned upright by its EXIF orientation, in the channels that the model takes.

    For 1 and 3 channels, a PIL image of mode L or RGB: transparency is laid on white, 16-bit greys are scaled to 8
    bits by their full range, floats from [0, 1], CMYK, palettes and two-level images are converted, and of an animation
    the first picture is taken. For other channel counts a float
    tensor (C, H, W) from a ``.npy`` array or a TIFF, laid out (H, W, C) or (C, H, W): 8- and 16-bit integers scaled
    to [0, 1] by their full range, floats as they are.

    Args:
        path: the file.
        in_chans: C.
        max_pixels: refuse images with more pixels.

    Raises:
        ImageReadError: the content is damaged, no image, too large, or of other channels.
        OSError: the file is missing or cannot be opened.
    """
    path = Path(path)
    with _naming(path):
        if path.suffix.lower() == ".npy":
            values = _channels_first(np.load(path, mmap_mode="r", allow_pickle=False), in_chans, max_pixels)
            return values if in_chans not in (1, 3) else _to_pil(values)
        if in_chans not in (1, 3):
            return _channels_first(_read_tiff(path), in_chans, max_pixels)
        with _opened(path, max_pixels) as image:
            return _to_mode(image, "L" if in_chans == 1 else "RGB")


def read_as_stored(path: str | os.PathLike[str], max_pixels: int) -> Image.Image:
    """One image, turned upright, in the file's own mode: numbers and palette indices stay what they are.

    Args:
        path: the file.
        max_pixels: refuse images with more pixels.

    Raises:
        ImageReadError: the content is damaged, no image, or too large.
        OSError: the file is missing or cannot be opened.
    """
    with _naming(Path(path)), _opened(Path(path), max_pixels) as image:
        return image.copy()


@contextmanager
def _opened(path: Path, max_pixels: int) -> Iterator[Image.Image]:
    """The decoded image, upright."""
    # From a file object: given a path, Pillow 13 maps uncompressed TIFFs and scrambles those stored on their side.
    with own_pixel_limit(), path.open("rb") as file, Image.open(file) as image:
        _check_size(image.width * image.height, max_pixels)
        image.load()
        yield _upright(image)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn whatever a decoder raises into a sentence that names the file."""
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # decoders raise anything on damaged bytes
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk or a missing file, not the image
        reason = "it is no image that can be read" if isinstance(error, Image.UnidentifiedImageError) else error
        raise ImageReadError(f"cannot read image {path}: {reason}") from error


def _check_size(pixels: int, max_pixels: int) -> None:
    if pixels > max_pixels:
        raise ImageReadError(
            f"it has {pixels:,} pixels, more than data.max_pixels ({max_pixels:,}); raise that setting"
        )


# How to undo each EXIF orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - damaged metadata fails in any way, and says nothing of the pixels
        return image
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = _scale_to_8_bits(image)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)  # a copy, that outlives the file, where the mode is right already


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16-bit integers, or of floats in [0, 1], in 8 bits; PIL itself would clip or wrap them."""
    white = 1.0 if image.mode == "F" else 65535
    values = np.asarray(image, dtype=np.float64)
    if not 0 <= values.min() <= values.max() <= white:
        raise ImageReadError(f"its grey values {values.min():g}..{values.max():g} are outside of 0..{white:g}")
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def _to_pil(values: Tensor) -> Image.Image:
    if not 0 <= values.min() <= values.max() <= 1:
        raise ImageReadError(f"its values {values.min():g}..{values.max():g} are outside of 0..1")
    array = (values * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def _read_tiff(path: Path) -> np.ndarray:
    if path.suffix.lower() not in (".tif", ".tiff"):
        raise ImageReadError("images of other than 1 or 3 channels are read from .npy or .tif files")
    try:
        import tifffile
    except ImportError as error:
        raise ImportError(f"reading {path} needs tifffile: pip install tifffile") from error
    return tifffile.imread(path)


def _channels_first(array: np.ndarray, in_chans: int, max_pixels: int) -> Tensor:
    """An array of either layout, (C, H, W) where both fit, as a float tensor (C, H, W)."""
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and array.shape[0] != in_chans and array.shape[2] == in_chans:
        array = array.transpose(2, 0, 1)
    if array.ndim != 3 or array.shape[0] != in_chans:
        raise ImageReadError(f"its shape {array.shape} has no axis of {in_chans} channels (model.in_chans)")
    _check_size(array.shape[1] * array.shape[2], max_pixels)
    kind, width = array.dtype.kind, array.dtype.itemsize
    if kind != "f" and not (kind == "u" and width <= 2):
        raise ImageReadError(f"its values are {array.dtype}; give uint8, uint16 or floats")
    white = 1 if kind == "f" else 2 ** (8 * width) - 1
    values = torch.from_numpy(array.astype(np.float32)) / white
    if not values.isfinite().all():
        raise ImageReadError("it holds values that are not finite")
    return values
