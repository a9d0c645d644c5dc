"""Boxes, masks and names on an image."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from weightformer.tasks.detection.coco import decode_mask

__all__ = ["draw_results"]

_READABLE = 512  # pixels of the longer side below which a picture is enlarged, so that names fit on it
_OPACITY = 0.45  # of masks


def draw_results(image: Tensor, results: Sequence[Mapping[str, Any]], categories: Mapping[int, str]) -> Image.Image:
    """A picture of an image (C, H, W) and COCO result records: a colour for each category, best detections on top.

    Of other than 1 or 3 channels the first is shown, from its smallest to its largest value. A small image is enlarged.
    """
    height, width = image.shape[-2:]
    factor = max(1, -(-_READABLE // max(height, width)))
    pixels = np.asarray(_picture(image)).astype(np.float32)
    canvas = pixels.copy()
    colors = {number: _color(i, len(categories)) for i, number in enumerate(categories)}
    ordered = sorted(results, key=lambda record: record["score"])
    for record in ordered:
        inside = decode_mask(record["segmentation"], height, width).astype(bool)
        canvas[inside] = (1 - _OPACITY) * pixels[inside] + _OPACITY * np.array(colors[record["category_id"]])
    picture = Image.fromarray(canvas.round().astype(np.uint8))
    picture = picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    draw, line = ImageDraw.Draw(picture), max(2, max(picture.size) // 400)
    font = ImageFont.load_default(size=max(12, max(picture.size) // 45))
    for record in ordered:
        x, y, w, h = (value * factor for value in record["bbox"])
        right, bottom = min(x + w, picture.width - 1), min(y + h, picture.height - 1)
        draw.rectangle((x, y, max(x, right), max(y, bottom)), outline=colors[record["category_id"]], width=line)
    for record in ordered:  # names last, so that no box crosses them
        _write_name(draw, record, categories, colors[record["category_id"]], factor, font)
    return picture


def _write_name(
    draw: ImageDraw.ImageDraw,
    record: Mapping[str, Any],
    categories: Mapping[int, str],
    color: tuple[int, int, int],
    factor: int,
    font: Any,
) -> None:
    """Above the box's corner, or inside it where there is no room above."""
    text = f"{categories[record['category_id']]} {record['score']:.0%}"
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 6
    picture_width, picture_height = draw.im.size
    x = min(max(record["bbox"][0] * factor, 0), max(picture_width - width, 0))
    y = record["bbox"][1] * factor
    y = min(y - height if y >= height else max(y, 0), max(picture_height - height, 0))
    draw.rectangle((x, y, x + width, y + height), fill=color)
    draw.text((x + 3 - left, y + 3 - top), text, fill="black", font=font)


def _picture(image: Tensor) -> Image.Image:
    values = image if len(image) in (1, 3) else image[:1]
    if values.is_floating_point():
        values = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12) * 255
    array = values.round().byte() if values.is_floating_point() else values
    return Image.fromarray(array.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def _color(place: int, count: int) -> tuple[int, int, int]:
    """Light enough for black text, hues apart."""
    red, green, blue = colorsys.hls_to_rgb(place / max(count, 1), 0.62, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)
