"""Fashion scenes: real Fashion-MNIST items composed on larger canvases, as COCO and ADE20K write theirs.

A small stand-in for both data sets, with what makes them hard to read: objects that overlap or are cut off by the
border, crowd regions, images without objects, polygons in several parts, masks with holes as RLE, category ids with
gaps in an order of their own. Boxes, areas and masks are those of the visible pixels, exactly.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import track

from weightformer.tasks.classification.sources import SOURCE_CLASSES, load_fashion_mnist

__all__ = ["CATEGORIES", "SceneOptions", "encode_rle", "main", "mask_polygons", "write_scenes"]

# COCO ids of the ten classes, by label: with gaps, and not in the order in which the file lists them.
_CATEGORY_IDS = [3, 1, 7, 4, 8, 13, 90, 11, 27, 21]
CATEGORIES = [
    {"id": number, "name": name, "supercategory": "fashion"}
    for number, name in zip(_CATEGORY_IDS, SOURCE_CLASSES["fashion_mnist"], strict=True)
]

_Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class SceneOptions:
    """What decides every pixel of a set of scenes, beside Fashion-MNIST itself."""

    height: int = 128
    """Of every scene, in pixels."""
    width: int = 128
    """Of every scene, in pixels."""
    train: int = 1000
    """Training scenes, composed of Fashion-MNIST's training images."""
    val: int = 200
    """Validation scenes, composed of its test images."""
    seed: int = 0
    """Scene i is a function of the seed, the split and i."""
    objects: tuple[int, int] = (2, 6)
    """Fewest and most objects of a scene."""
    scale: tuple[int, int] = (28, 64)
    """Smallest and largest side of an item before it is rotated, in pixels."""
    rotate: float = 30.0
    """Largest rotation, in degrees to either side."""
    empty: float = 0.03
    """Share of scenes without objects."""
    crowd: float = 0.1
    """Share of scenes with a crowd: many small items of one class under one annotation."""

    def __post_init__(self) -> None:
        if not 1 <= self.objects[0] <= self.objects[1] <= 200:
            raise ValueError(f"objects must be two rising counts in 1..200, got {list(self.objects)}")
        if not 4 <= self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be two rising sides of at least 4 pixels, got {list(self.scale)}")
        if min(self.height, self.width) < self.scale[1]:
            raise ValueError(
                f"a scene of {self.height} x {self.width} px has no room for items of {self.scale[1]} px; raise size "
                "or lower scale"
            )
        if min(self.train, self.val) < 1:
            raise ValueError(f"train and val must be at least 1 scene, got {self.train} and {self.val}")
        for name in ("empty", "crowd"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share in [0, 1], got {getattr(self, name)}")
        if not 0 <= self.rotate <= 180:
            raise ValueError(f"rotate must be in 0..180 degrees, got {self.rotate}")


def write_scenes(
    folder: str | os.PathLike[str], options: SceneOptions, source: str | os.PathLike[str] | None = None
) -> Path:
    """Write the scenes as both data sets lay theirs out; a folder that holds the same scenes already is left alone.

    ``coco/``: ``{train,val}2017/*.png`` and ``annotations/instances_{train,val}2017.json``.
    ``ade20k/``: ``images/{training,validation}/*.png``, the masks ``annotations/{training,validation}/*.png`` and the
    class names in ``objectInfo150.txt``. Masks hold 0 for unlabelled pixels (crowds), 1 for the backdrop and 2 to 11
    for the items. Training and validation scenes share no source image.

    Args:
        folder: where to; it appears when everything is written.
        options: which scenes.
        source: the folder of Fashion-MNIST, see `load_fashion_mnist`.

    Raises:
        ValueError: the folder holds something else.
    """
    folder = Path(folder)
    record = {"scenes": 1, **json.loads(json.dumps(asdict(options)))}
    if folder.exists() and any(folder.iterdir()):
        if (folder / "scenes.json").is_file() and json.loads((folder / "scenes.json").read_text()) == record:
            return folder
        raise ValueError(f"{folder} is not empty and does not hold these scenes; remove it or choose another folder")
    partial_folder = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    for number, split in enumerate(("train", "val")):
        images, labels = load_fashion_mnist(source, train=split == "train")
        items = images[:, 0].numpy(), labels.numpy()
        _write_split(partial_folder, split, number, items, options)
    (partial_folder / "ade20k" / "objectInfo150.txt").write_text(_object_info())
    (partial_folder / "scenes.json").write_text(json.dumps(record, indent=1) + "\n")
    if folder.exists():
        folder.rmdir()
    os.replace(partial_folder, folder)
    return folder


def _write_split(folder: Path, split: str, number: int, items: tuple[Any, Any], options: SceneOptions) -> None:
    ade = {"train": "training", "val": "validation"}[split]
    places = {
        "coco": folder / "coco" / f"{split}2017",
        "images": folder / "ade20k" / "images" / ade,
        "masks": folder / "ade20k" / "annotations" / ade,
        "json": folder / "coco" / "annotations",
    }
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    records: dict[str, Any] = {
        "info": {"description": "fashion scenes", "version": "1", "year": 2017},
        "licenses": [],
        "images": [],
        "annotations": [],
        "categories": CATEGORIES,
    }
    shown = partial(track, description=f"{split} scenes", console=Console(stderr=True), transient=True)
    for index in shown(range(getattr(options, split))):
        rng = np.random.default_rng([options.seed, number, index])
        canvas, semantic, annotations = _compose(rng, *items, options)
        image_id, name = index + 1, f"{index + 1:012d}.png"
        Image.fromarray(canvas).save(places["coco"] / name)
        _link(places["coco"] / name, places["images"] / name)
        Image.fromarray(semantic).save(places["masks"] / name)
        records["images"].append({"id": image_id, "file_name": name, "height": options.height, "width": options.width})
        for annotation in annotations:
            count = len(records["annotations"]) + 1
            records["annotations"].append({"id": count, "image_id": image_id, **annotation})
    (places["json"] / f"instances_{split}2017.json").write_text(json.dumps(records))


def _link(source: Path, target: Path) -> None:
    """One file under two names where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _object_info() -> str:
    """ADE20K's table of classes; the shares of pixels, which nobody reads, are left at 0."""
    names = ["backdrop", *SOURCE_CLASSES["fashion_mnist"]]
    rows = [f"{i}\t0\t0\t0\t{int(i == 1)}\t{name}" for i, name in enumerate(names, 1)]
    return "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n"


def _compose(
    rng: np.random.Generator, images: NDArray[np.uint8], labels: NDArray[np.int64], options: SceneOptions
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], list[dict[str, Any]]]:
    """One scene: grey canvas (H, W), semantic mask (H, W), and its annotations without ids."""
    canvas = _backdrop(rng, options)
    owner = np.zeros(canvas.shape, np.uint8)  # 0 is the backdrop, object k of `kinds` is k + 1
    kinds: list[tuple[int, bool]] = []
    if rng.random() >= options.empty:
        if rng.random() < options.crowd:
            _place_crowd(rng, canvas, owner, kinds, images, labels, options)
        for _ in range(rng.integers(options.objects[0], options.objects[1] + 1)):
            item = rng.integers(len(images))
            pixels, mask = _vary(rng, images[item], int(rng.integers(options.scale[0], options.scale[1] + 1)), options)
            for _ in range(20):
                top, left = (int(rng.integers(-s // 5, full - s + s // 5 + 1)) for s, full in
                             zip(mask.shape, canvas.shape, strict=True))  # fmt: skip
                if _leaves_others_visible(owner, mask, top, left):
                    kinds.append((int(labels[item]), False))
                    _paste(canvas, owner, pixels, mask, top, left, len(kinds))
                    break
    semantic = np.ones(canvas.shape, np.uint8)
    annotations = []
    for number, (label, is_crowd) in enumerate(kinds, 1):
        visible = owner == number
        if visible.any():
            semantic[visible] = 0 if is_crowd else label + 2
            annotations.append(_annotation(visible, label, is_crowd))
    return canvas, semantic, annotations


def _place_crowd(
    rng: np.random.Generator,
    canvas: NDArray[np.uint8],
    owner: NDArray[np.uint8],
    kinds: list[tuple[int, bool]],
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    options: SceneOptions,
) -> None:
    """Eight small items of one class close to each other, as one object."""
    label = int(rng.integers(10))
    side = max(options.scale[0] * 2 // 3, 4)
    kinds.append((label, True))
    centre = [int(rng.integers(side, full - side + 1)) for full in canvas.shape]
    for item in rng.choice(np.flatnonzero(labels == label), 8):
        pixels, mask = _vary(rng, images[item], side, options)
        top, left = (c - s // 2 + int(rng.integers(-side, side + 1)) for c, s in zip(centre, mask.shape, strict=True))
        _paste(canvas, owner, pixels, mask, top, left, len(kinds))


def _backdrop(rng: np.random.Generator, options: SceneOptions) -> NDArray[np.uint8]:
    """Smooth dark noise (H, W)."""
    coarse = rng.integers(0, 80, (4, 4), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((options.width, options.height), Image.Resampling.BICUBIC)
    return np.array(smooth)


def _vary(
    rng: np.random.Generator, item: NDArray[np.uint8], side: int, options: SceneOptions
) -> tuple[NDArray[np.uint8], _Mask]:
    """An item scaled to ``side``, rotated and perhaps mirrored: its pixels and its mask, cropped to the mask."""
    angle, mirror = float(rng.uniform(-options.rotate, options.rotate)), rng.random() < 0.5

    def move(image: Image.Image) -> NDArray[np.uint8]:
        image = image.resize((side, side), Image.Resampling.BILINEAR)
        image = image.rotate(angle, Image.Resampling.BILINEAR, expand=True)
        return np.array(image)[:, :: -1 if mirror else 1]

    pixels, mask = move(Image.fromarray(item)), move(_silhouette(item)) >= 128
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    window = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return pixels[window], mask[window]


def _silhouette(item: NDArray[np.uint8]) -> Image.Image:
    """The item's mask (255 inside) without holes: dark cloth inside of an item belongs to it."""
    padded = Image.fromarray(np.pad(np.where(item > 16, 255, 0).astype(np.uint8), 1)).copy()  # an array's is read-only
    ImageDraw.floodfill(padded, (0, 0), 1)
    return Image.fromarray(np.where(np.array(padded)[1:-1, 1:-1] == 1, 0, 255).astype(np.uint8))


def _leaves_others_visible(owner: NDArray[np.uint8], mask: _Mask, top: int, left: int) -> bool:
    """Whether at least half of every object's visible pixels stay so when an item is put on top."""
    window, inside = _overlap(owner.shape, mask, top, left)
    covered = np.bincount(owner[window][inside], minlength=256)[1:]
    touched = np.flatnonzero(covered) + 1
    return all(2 * covered[k - 1] <= np.count_nonzero(owner == k) for k in touched)


def _paste(
    canvas: NDArray[np.uint8],
    owner: NDArray[np.uint8],
    pixels: NDArray[np.uint8],
    mask: _Mask,
    top: int,
    left: int,
    number: int,
) -> None:
    window, inside = _overlap(canvas.shape, mask, top, left)
    rows, columns = (slice(w.start - start, w.stop - start) for w, start in zip(window, (top, left), strict=True))
    canvas[window][inside] = pixels[rows, columns][inside]
    owner[window][inside] = number


def _overlap(shape: Sequence[int], mask: _Mask, top: int, left: int) -> tuple[tuple[slice, slice], _Mask]:
    """The part of a canvas that a mask at this place covers, and the part of the mask that lies on the canvas."""
    spans = [(max(0, start), min(full, start + side)) for start, side, full in
             zip((top, left), mask.shape, shape, strict=True)]  # fmt: skip
    (y0, y1), (x0, x1) = ((a, max(a, b)) for a, b in spans)
    return (slice(y0, y1), slice(x0, x1)), mask[y0 - top : y1 - top, x0 - left : x1 - left]


def _annotation(mask: _Mask, label: int, is_crowd: bool) -> dict[str, Any]:
    """COCO's record of a mask: polygons where they can say it exactly, RLE for crowds and masks with holes."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    x, y = int(columns[0]), int(rows[0])
    polygons = None if is_crowd else mask_polygons(mask)
    return {
        "category_id": _CATEGORY_IDS[label],
        "iscrowd": int(is_crowd),
        "area": int(mask.sum()),
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "segmentation": encode_rle(mask) if polygons is None else polygons,
    }


def encode_rle(mask: _Mask) -> dict[str, Any]:
    """COCO's uncompressed run lengths of a mask (H, W): down the columns, starting with the zeros."""
    edges = np.flatnonzero(np.diff(mask.ravel(order="F"), prepend=False))
    return {"size": list(mask.shape), "counts": np.diff([0, *edges, mask.size]).tolist()}


def mask_polygons(mask: _Mask) -> list[list[float]] | None:
    """The outlines of a mask (H, W) along pixel edges, ``[x, y, x, y, ...]`` each; None if it has holes.

    Pixels that touch at a corner only are outlined apart, so no outline meets itself.
    """
    inside = np.pad(mask, 1)
    steps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    # Edges run clockwise, the inside on their right: along the top to the right, down the right side, and so on.
    for shift, start, step in (((-1, 0), (0, 0), (0, 1)), ((0, 1), (0, 1), (1, 0)),
                               ((1, 0), (1, 1), (0, -1)), ((0, -1), (1, 0), (-1, 0))):  # fmt: skip
        edge = inside & ~np.roll(inside, (-shift[0], -shift[1]), (0, 1))
        for y, x in (np.argwhere(edge) - 1 + start).tolist():
            steps.setdefault((y, x), []).append(step)
    polygons = []
    while steps:
        point = first = min(steps)
        heading = steps[point][0]
        outline: list[tuple[int, int]] = []
        while True:
            choices = steps[point]
            # At a corner where two pixels touch, turn right: stay with the pixel at hand.
            right = (heading[1], -heading[0])
            step = right if right in choices else choices[0]
            choices.remove(step)
            if not choices:
                del steps[point]
            if step != heading or not outline:
                outline.append(point)
            point, heading = (point[0] + step[0], point[1] + step[1]), step
            if point == first:
                break
        if _signed_area(outline) < 0:
            return None
        polygons.append([float(value) for y, x in outline for value in (x, y)])
    return polygons


def _signed_area(outline: Iterable[tuple[int, int]]) -> float:
    """Twice the area, negative for the outline of a hole."""
    y, x = np.array(list(outline)).T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum())


def main(argv: Sequence[str]) -> None:
    """Compose detection and segmentation scenes of real Fashion-MNIST items, in COCO's and ADE20K's formats."""
    default = SceneOptions()
    parser = ArgumentParser(prog="weightformer data fashion-scenes", description=main.__doc__)
    parser.add_argument("folder", metavar="OUT", help="folder to write; it gets coco/ and ade20k/")
    parser.add_argument("--size", nargs="+", type=int, metavar="PX", default=[default.height],
                        help="side, or height and width, of every scene (default: %(default)s)")  # fmt: skip
    parser.add_argument("--train", type=int, default=default.train, help="training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=default.val, help="validation scenes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    for name, help_text in (("objects", "fewest and most objects of a scene"), ("scale", "sides of items, in pixels")):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", nargs=2, type=int, metavar=("MIN", "MAX"), default=value,
                            help=f"{help_text} (default: {value[0]} {value[1]})")  # fmt: skip
    for name, help_text in (
        ("rotate", "largest rotation in degrees"),
        ("empty", "share of scenes without objects"),
        ("crowd", "share of scenes with a crowd region"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=getattr(default, name), help=f"{help_text} (default: %(default)s)"
        )
    parser.add_argument("--source", metavar="FOLDER", help="where Fashion-MNIST lies, if not where it is usually put")
    args = vars(parser.parse_args(argv))
    folder, size, source = (args.pop(name) for name in ("folder", "size", "source"))
    if len(size) > 2:
        raise ValueError(f"--size takes a side, or height and width, in pixels; got {size}")
    args |= {"objects": tuple(args["objects"]), "scale": tuple(args["scale"])}
    write_scenes(folder, SceneOptions(height=size[0], width=size[-1], **args), source)
