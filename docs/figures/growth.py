"""Draw growth.svg: counted multiply-adds of WeightFormer-T and DeiT-T against the size of the image.

Run from the repository: `python docs/figures/growth.py`. Nothing is timed; the counts are exact.
"""

from __future__ import annotations

from pathlib import Path

import timm

import weightformer  # noqa: F401  registers the models
from weightformer.analysis.flops import multiply_adds

SIDES = [224, 320, 448, 576, 704, 832, 960, 1088, 1248]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 150, 30, 56
TEAL, ORANGE, GREY = "#00897b", "#f4511e", "#78909c"
X_MAX, Y_MAX = 1.6, 210.0


def curve(name: str) -> list[tuple[float, float]]:
    """(megapixels, giga multiply-adds) of one tiny model at every side."""
    points = []
    for side in SIDES:
        options = {"img_size": side} if name.startswith("deit") else {}
        points.append((side**2 / 1e6, multiply_adds(timm.create_model(name, **options), 3, side, side) / 1e9))
    return points


def place(x: float, y: float) -> tuple[float, float]:
    """Data to pixels."""
    return LEFT + x / X_MAX * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / Y_MAX * (HEIGHT - TOP - BOTTOM)


def draw(points: list[tuple[float, float]], colour: str, label: str) -> str:
    """A line with a dot at every counted size, and its name at the end."""
    pixels = [place(*point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in pixels)
    x, y = pixels[-1]
    return (
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>{dots}'
        f'<text x="{x + 12:.1f}" y="{y + 4:.1f}" fill="{colour}" font-weight="600">{label}</text>'
        f'<text x="{x + 12:.1f}" y="{y + 22:.1f}" fill="{colour}">{points[-1][1]:.1f} G</text>'
    )


def grid() -> str:
    """Axes, their numbers and their names."""
    parts = []
    for value in range(0, 201, 50):
        (x0, y), (x1, _) = place(0, value), place(X_MAX, value)
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity=".3"/>')
        parts.append(f'<text x="{x0 - 10}" y="{y + 4:.1f}" fill="{GREY}" text-anchor="end">{value}</text>')
    for side in (224, 448, 704, 960, 1248):
        x, y = place(side**2 / 1e6, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" fill="{GREY}" text-anchor="middle">{side}²</text>')
    x, y = place(X_MAX / 2, 0)
    parts.append(
        f'<text x="{x}" y="{y + 44:.1f}" fill="{GREY}" text-anchor="middle">image, in pixels (area to scale)</text>'
    )
    parts.append(f'<text x="{LEFT - 44}" y="{TOP - 12}" fill="{GREY}">billion multiply-adds an image</text>')
    return "".join(parts)


def main() -> None:
    """Count, and write the picture beside this file."""
    body = grid() + draw(curve("deit_tiny_patch16_224"), ORANGE, "DeiT-T (attention)")
    body += draw(curve("weightformer_tiny"), TEAL, "WeightFormer-T")
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">{body}</svg>\n'
    )
    Path(__file__).with_suffix(".svg").write_text(svg)


if __name__ == "__main__":
    main()
