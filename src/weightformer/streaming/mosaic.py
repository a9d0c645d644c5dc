"""Write a real image of any size: photographs and Fashion-MNIST items in a tiled TIFF, made tile by tile."""

from __future__ import annotations

import gzip
import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightformer.streaming.sources import import_reader

__all__ = ["TILE", "main", "mosaic_tile", "write_mosaic"]

TILE = 256
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_ITEM = 28

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def main(argv: Sequence[str]) -> None:
    """``weightformer data mosaic``: write a tiled TIFF of any size."""
    parser = ArgumentParser(prog="weightformer data mosaic", description=main.__doc__)
    parser.add_argument("output", help="the .tiff file to write")
    parser.add_argument("--size", required=True, metavar="WxH", help="pixels, such as 32768x32768")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another mosaic")
    parser.add_argument("--fashion_mnist", default=FASHION_MNIST, help="folder with t10k-images-idx3-ubyte.gz")
    args = parser.parse_args(argv)
    match = re.fullmatch(r"(\d+)x(\d+)", args.size)
    if match is None:
        raise ValueError(f"--size is width x height in pixels, such as 32768x32768, not {args.size!r}")
    width, height = map(int, match.groups())
    write_mosaic(args.output, height, width, seed=args.seed, fashion_mnist=args.fashion_mnist)


def write_mosaic(
    path: str | os.PathLike[str],
    height: int,
    width: int,
    *,
    seed: int = 0,
    fashion_mnist: str | os.PathLike[str] = FASHION_MNIST,
) -> Path:
    """Write ``height`` x ``width`` RGB pixels as a BigTIFF of 256 x 256 tiles, deflated; memory holds one tile.

    Every tile is either a crop of a photograph that scikit-image or scikit-learn ships, or a sheet of tinted
    Fashion-MNIST test items. A tile depends on the seed and its place only.

    Args:
        path: the file to write.
        height: pixels.
        width: pixels.
        seed: another seed, another mosaic.
        fashion_mnist: folder with ``t10k-images-idx3-ubyte.gz``.

    Returns:
        The path.

    Raises:
        FileNotFoundError: Fashion-MNIST is not in the folder.
        ValueError: a side is not positive.
        ImportError: tifffile, scikit-image or scikit-learn is missing.
    """
    if height < 1 or width < 1:
        raise ValueError(f"a mosaic needs at least one pixel, not {height} x {width}")
    tifffile = import_reader("tifffile")
    photographs, items = _photographs(), _fashion_items(Path(fashion_mnist))

    def tiles() -> Iterator[Pixels]:
        for row in range(-(-height // TILE)):
            for col in range(-(-width // TILE)):
                yield mosaic_tile(row, col, photographs, items, seed)

    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")  # a run that is killed leaves no half image
    tifffile.imwrite(
        partial,
        tiles(),
        shape=(height, width, 3),
        dtype=np.uint8,
        tile=(TILE, TILE),
        photometric="rgb",
        compression="zlib",
        compressionargs={"level": 1},
        bigtiff=True,
        metadata=None,
    )
    return partial.replace(path)


def mosaic_tile(row: int, col: int, photographs: list[Pixels], items: Pixels, seed: int) -> Pixels:
    """The tile at (row, col): 256 x 256 x 3."""
    rng = np.random.default_rng((seed, row, col))
    if rng.random() < 0.6:
        photograph = photographs[rng.integers(len(photographs))]
        top, left = (rng.integers(side - TILE + 1) for side in photograph.shape[:2])
        crop = photograph[top : top + TILE, left : left + TILE]
        return np.ascontiguousarray(crop[:, ::-1] if rng.random() < 0.5 else crop)
    side = TILE // _ITEM
    sheet = items[rng.integers(len(items), size=side * side)]
    sheet = sheet.reshape(side, side, _ITEM, _ITEM).swapaxes(1, 2).reshape(side * _ITEM, side * _ITEM)
    sheet = np.pad(sheet, (TILE - side * _ITEM) // 2)
    return (sheet[..., None] * rng.uniform(0.4, 1.0, 3)).astype(np.uint8)


def _photographs() -> list[Pixels]:
    skimage, sklearn = import_reader("skimage.data"), import_reader("sklearn.datasets")
    names = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket")
    return [getattr(skimage, name)() for name in names] + list(sklearn.load_sample_images().images)


def _fashion_items(folder: Path) -> Pixels:
    path = folder / "t10k-images-idx3-ubyte.gz"
    if not path.exists():
        raise FileNotFoundError(
            f"no Fashion-MNIST at {path}; apt-get install dataset-fashion-mnist, or name its folder"
        )
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, _ITEM, _ITEM)
