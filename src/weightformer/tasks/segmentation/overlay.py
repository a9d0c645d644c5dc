"""Label maps for people: a colour for every class, laid over the image, with a legend."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

__all__ = ["draw_overlay", "palette", "share_text"]

_SIDE = 448  # smaller pictures are enlarged to about this side, so that the legend can be read beside them
_ROW = 22  # height of a line of the legend


def palette(num_classes: int) -> NDArray[np.uint8]:
    """A colour for every class, (K, 3): neighbours far apart in hue, rounds of the circle apart in brightness."""
    golden = 0.618034
    colors = [
        colorsys.hsv_to_rgb((0.58 + i * golden) % 1, (0.75, 0.5, 0.9)[i // 8 % 3], (0.95, 0.75, 0.6)[i // 8 % 3])
        for i in range(num_classes)
    ]
    return np.rint(np.array(colors).reshape(-1, 3) * 255).astype(np.uint8)


def draw_overlay(image: Image.Image, labels: NDArray[np.uint8], class_names: Sequence[str]) -> Image.Image:
    """The image under its classes' colours, with a legend of the classes present and their shares of the picture.

    Args:
        image: of any mode, H x W.
        labels: (H, W); pixels of no class (255, say) stay uncoloured.
        class_names: K.
    """
    colors = palette(len(class_names))
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    known = labels < len(class_names)
    pixels[known] = 0.5 * pixels[known] + 0.5 * colors[labels[known]]
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    factor = max(1, round(_SIDE / max(picture.size)))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return _beside(picture, _legend(labels[known], class_names, colors, labels.size))


def share_text(share: float) -> str:
    """A share for people, never zero for what is there."""
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def _legend(
    present: NDArray[np.uint8], class_names: Sequence[str], colors: NDArray[np.uint8], num_pixels: int
) -> Image.Image:
    """A line for every class present, the largest first."""
    counts = np.bincount(present, minlength=len(class_names))
    order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
    lines = [(colors[i], f"{class_names[i]}  {share_text(counts[i] / num_pixels)}") for i in order]
    font = ImageFont.load_default(14)
    width = max((round(font.getlength(text)) for _, text in lines), default=0) + 40
    legend = Image.new("RGB", (width, _ROW * len(lines) + 8), "white")
    draw = ImageDraw.Draw(legend)
    for row, (color, text) in enumerate(lines):
        top = 4 + row * _ROW
        draw.rectangle((8, top + 3, 24, top + 19), fill=tuple(color.tolist()), outline="black")
        draw.text((32, top + 2), text, fill="black", font=font)
    return legend


def _beside(picture: Image.Image, legend: Image.Image) -> Image.Image:
    canvas = Image.new("RGB", (picture.width + legend.width, max(picture.height, legend.height)), "white")
    canvas.paste(picture, (0, 0))
    canvas.paste(legend, (picture.width, 0))
    return canvas
