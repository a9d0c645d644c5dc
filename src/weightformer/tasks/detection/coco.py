"""COCO's annotation files: read, checked and mended, so that nothing in one stops a run hours later."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from numpy.typing import NDArray

__all__ = ["CocoImage", "CocoSet", "decode_mask", "encode_mask"]

Annotation = dict[str, Any]


@dataclass(frozen=True)
class CocoImage:
    """One image of a set."""

    id: int
    """The file's own number for it."""
    path: str
    """Where it lies."""
    height: int
    """In pixels, as the image is shown (upright)."""
    width: int
    """In pixels, likewise."""
    content: bytes
    """Its annotations as JSON: one object that worker processes share instead of copying it reference by reference."""

    @property
    def annotations(self) -> list[Annotation]:
        """Its annotations, mended: see `CocoSet`."""
        return json.loads(self.content)


class CocoSet:
    """The images, categories and annotations of one file.

    What COCO's own tools stumble over is mended: a missing ``iscrowd`` is 0, a missing ``id`` and a missing or
    senseless ``area`` are filled in, boxes are clipped to the image. Outlines that are none are left out: an odd number
    of coordinates, fewer than three points, no width or no height, outside of the image, coordinates that are no
    numbers or lie further off than the image is large. An annotation that has no box or no mask left is dropped. One
    warning names what was dropped.

    Args:
        path: the JSON file.
        folder: where its images lie.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no COCO file: it misses a part, an image misses a key, an id is no whole number or occurs twice, an
            annotation names an image or a category that is not there, or none of the annotations can be used. The
            sentence names the ids.
    """

    def __init__(self, path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        content = _read(self.path)
        categories = {
            _integer(c, "id", f"{path}: a category"): str(c.get("name", c["id"])) for c in content["categories"]
        }
        if not categories or len(categories) != len(content["categories"]):
            raise ValueError(f"{path}: its categories are missing or share an id")
        self.categories = dict(sorted(categories.items()))
        """Names by the file's own ids, in the order of the ids."""
        self.dropped: list[str] = []
        """Annotations that could not be used, with the reason."""
        records = {_integer(r, "id", f"{path}: an image"): r for r in content["images"]}
        if not records or len(records) != len(content["images"]):
            raise ValueError(f"{path}: its images are missing or share an id")
        by_image = self._mend(content["annotations"], records)
        self.images = [
            self._image(number, records[number], by_image.get(number, []), folder) for number in sorted(records)
        ]
        """Sorted by id."""
        if self.dropped:
            shown = "; ".join(self.dropped[:5]) + ("; ..." if len(self.dropped) > 5 else "")
            if not by_image:
                raise ValueError(f"{path}: none of its {len(self.dropped)} annotation(s) can be used: {shown}")
            warnings.warn(f"{path}: {len(self.dropped)} annotation(s) were dropped: {shown}", stacklevel=2)

    def ground_truth(self) -> dict[str, Any]:
        """All of it as a COCO dictionary that COCO's evaluation takes as it is."""
        annotations = [a for image in self.images for a in image.annotations]
        return {
            "images": [{"id": image.id, "height": image.height, "width": image.width} for image in self.images],
            "annotations": [{**a, "id": i} for i, a in enumerate(annotations, 1)],  # the file's may repeat
            "categories": [{"id": number, "name": name} for number, name in self.categories.items()],
        }

    def _image(self, number: int, record: Any, annotations: Sequence[Annotation], folder: Any) -> CocoImage:
        where = f"{self.path}: image {number}"
        height, width = (_integer(record, key, where) for key in ("height", "width"))
        if height < 1 or width < 1:
            raise ValueError(f"{where} has a size of {height} x {width} px")
        file = os.path.join(folder, str(_need(record, "file_name", where)))
        return CocoImage(number, file, height, width, json.dumps(annotations).encode())

    def _mend(self, annotations: Sequence[Any], records: Mapping[int, Any]) -> dict[int, list[Annotation]]:
        found: dict[int, list[Annotation]] = {}
        for place, given in enumerate(annotations, 1):
            number = given.get("id", place) if isinstance(given, dict) else place
            where = f"{self.path}: annotation {number}"
            image_id, category = (_integer(given, key, where) for key in ("image_id", "category_id"))
            if image_id not in records:
                raise ValueError(f"{where} is for image {image_id!r}, which the file does not list")
            if category not in self.categories:
                raise ValueError(
                    f"{where} of image {image_id} has category {category!r}, which the file does not list; its "
                    f"categories are {', '.join(map(str, list(self.categories)[:20]))}"
                )
            record = records[image_id]
            height, width = (_integer(record, key, f"{self.path}: image {image_id}") for key in ("height", "width"))
            try:
                box = _clip(given.get("bbox"), height, width)
                segmentation = _mend_segmentation(given.get("segmentation"), height, width)
                crowd = given.get("iscrowd") or 0
                if crowd not in (0, 1):
                    raise _UnusableError(f"its iscrowd {crowd!r} is neither 0 nor 1")
                area = given.get("area")
                if not _is_number(area) or area < 0:
                    area = _mask_area(segmentation, height, width)
            except _UnusableError as error:
                self.dropped.append(f"annotation {number} of image {image_id}: {error}")
                continue
            known = {"id": number, "image_id": image_id, "category_id": category, "iscrowd": int(crowd)}
            found.setdefault(image_id, []).append(
                {**known, "bbox": box, "area": float(area), "segmentation": segmentation}
            )
        return found


class _UnusableError(ValueError):
    """Why an annotation has to be dropped."""


def _read(path: Path) -> dict[str, list[Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no annotation file {path}")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    parts = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(isinstance(content.get(part), list) for part in parts):
        raise ValueError(f"{path} is no COCO annotation file: it must hold lists of {', '.join(parts)}")
    return content


def _need(record: Any, key: str, where: str) -> Any:
    if not isinstance(record, dict) or record.get(key) is None:
        raise ValueError(f"{where} has no {key!r}")
    return record[key]


def _integer(record: Any, key: str, where: str) -> int:
    value = _need(record, key, where)
    if not _is_number(value) or value != int(value):
        raise ValueError(f"{where} has {value!r} as its {key!r}, which is no whole number")
    return int(value)


def _clip(box: Any, height: int, width: int) -> list[float]:
    """A box [x, y, width, height] inside the image, as it was where it needs no clipping."""
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        raise _UnusableError(f"its box {box!r} is not four numbers of any use")
    x, y, w, h = box
    if w <= 0 or h <= 0:
        raise _UnusableError(f"its box {box} has no area")
    left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    if right <= left or bottom <= top:
        raise _UnusableError(f"its box {box} lies outside of the image of {height} x {width} px")
    inside = x >= 0 and y >= 0 and x + w <= width and y + h <= height
    return list(box) if inside else [left, top, right - left, bottom - top]


def _is_number(value: Any) -> bool:
    """Finite, and small enough that sums of such numbers are."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def _mend_segmentation(segmentation: Any, height: int, width: int) -> list[list[float]] | dict[str, Any]:
    """Outlines without those that are none, or compressed run lengths."""
    if isinstance(segmentation, dict):
        return _mend_rle(segmentation, height, width)
    if not isinstance(segmentation, list):
        raise _UnusableError("it has no segmentation")
    outlines = [outline for outline in segmentation if _is_outline(outline, height, width)]
    if not outlines:
        raise _UnusableError("its segmentation holds no outline of three points or more around a part of the image")
    return outlines


def _is_outline(outline: Any, height: int, width: int) -> bool:
    if not isinstance(outline, list) or len(outline) < 6 or len(outline) % 2 or not all(map(_is_number, outline)):
        return False
    for values, side in ((outline[::2], width), (outline[1::2], height)):
        low, high = min(values), max(values)
        # COCO's rasteriser takes memory by the length of an outline, however far from the image it runs.
        if low == high or high <= 0 or low >= side or low < -side or high > 2 * side:
            return False
    return True


def _mend_rle(rle: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width]:
        raise _UnusableError(f"its run lengths are for a size of {size}, the image has {[height, width]}")
    if isinstance(counts, list):
        if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != height * width:
            raise _UnusableError("its run lengths do not add up to the image")
        counts = coco_mask.frPyObjects({"size": size, "counts": counts}, height, width)["counts"]
    if isinstance(counts, bytes):
        counts = counts.decode("ascii")
    if not isinstance(counts, str) or _encoded_length(counts) != height * width:
        raise _UnusableError("its run lengths do not add up to the image")
    rle = {"size": [height, width], "counts": counts}
    if not coco_mask.area(rle):
        raise _UnusableError("its run lengths cover no pixel")
    return rle


def _encoded_length(counts: str) -> int:
    """Pixels that a compressed string of run lengths covers; -1 if it is none. COCO's decoder trusts it blindly.

    Six bits a character, offset by 48: five of the value, then one that says that more follow; from the fourth run on,
    the difference to the run two before.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts.encode("ascii", "replace"):
        bits = character - 48
        if not 0 <= bits < 64:
            return -1
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            if runs[-1] < 0:
                return -1
            value = shift = 0
    return -1 if shift else sum(runs)


def _mask_area(segmentation: Any, height: int, width: int) -> int:
    return int(coco_mask.area(_to_rle(segmentation, height, width)))


def _to_rle(segmentation: Any, height: int, width: int) -> Any:
    if isinstance(segmentation, dict):
        return segmentation
    return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))


def decode_mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """The mask (height, width) of a mended segmentation: ones inside."""
    return coco_mask.decode(_to_rle(segmentation, height, width))


def encode_mask(mask: NDArray[np.uint8]) -> dict[str, Any]:
    """COCO's compressed run lengths of a mask (height, width), as JSON takes them."""
    rle = coco_mask.encode(np.asfortranarray(mask))
    return {"size": [int(side) for side in mask.shape], "counts": rle["counts"].decode("ascii")}
