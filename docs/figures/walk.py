"""Draw the two pictures of the walk from attention to linear cost (docs/idea.md).

weights.svg: the weights that attention and a dynamic linear layer predict for two sizes of image, to scale.
steps.svg: counted multiply-adds of each step of the walk against the number of tokens.

Run from the repository: `python docs/figures/walk.py`. Shapes are read off the modules, costs are counted; nothing is
timed.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from weightformer.analysis.flops import multiply_adds
from weightformer.layers import AttentionMLP, DynamicLinear

TEAL, ORANGE, GREY = "#00897b", "#f4511e", "#78909c"
DIM, HIDDEN, HEADS = 192, 768, 3  # a block of the tiny models
GRIDS = [(14, "224 px"), (28, "448 px")]


def svg(width: int, height: int, label: str, body: str) -> str:
    """A picture in the style of the other ones."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" font-size="13">{body}</svg>\n'
    )


def text(x: float, y: float, words: str, colour: str = GREY, anchor: str = "start", weight: int = 400) -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def box(x: float, y: float, shape: torch.Size, colour: str) -> str:
    """A matrix to scale, four channels or tokens a pixel."""
    height, width = (side / 4 for side in shape)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" fill-opacity=".25" '
        f'stroke="{colour}"/>'
    )


def weights() -> str:
    """What each layer predicts for a small and a large image."""
    attention, layer = AttentionMLP(DIM, HEADS), DynamicLinear(DIM, HIDDEN)
    parts = []
    for i, (side, pixels) in enumerate(GRIDS):
        x = torch.randn(1, side, side, DIM)
        w1, w2 = (weight[0, 0] for weight in attention.predict(x.flatten(1, 2)))
        predicted = layer.predict(x)[0]
        left = 24 + 300 * i
        parts += [
            text(left, 22, f"image of {pixels}: N = {side * side} tokens", weight=600),
            text(left, 52, f"W1 = Kᵀ/√d: {w1.shape[0]} × {w1.shape[1]}", ORANGE),
            box(left, 60, w1.shape, ORANGE),
            text(left + 50, 108, f"W2 = V: {w2.shape[0]} × {w2.shape[1]}", ORANGE),
            box(left, 94, w2.shape, ORANGE),
            text(left, 330, f"W: {predicted.shape[0]} × {predicted.shape[1]}", TEAL),
            box(left, 338, predicted.shape, TEAL),
        ]
    parts += [
        text(580, 74, "attention predicts an MLP", ORANGE, weight=600),
        text(580, 92, "(one head): as wide as the", ORANGE),
        text(580, 110, "image has tokens", ORANGE),
        text(580, 352, "a dynamic linear layer", TEAL, weight=600),
        text(580, 370, "predicts one matrix of the", TEAL),
        text(580, 388, "same size for any image", TEAL),
    ]
    return svg(780, 400, "predicted weights to scale", "".join(parts))


class OnMaps(nn.Module):
    """A layer on tokens, as a module of maps (B, C, H, W), which is what the counter feeds."""

    def __init__(self, layer: nn.Module, tokens: bool = False) -> None:
        super().__init__()
        self.layer, self.tokens = layer, tokens

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        x = x.permute(0, 2, 3, 1)
        return self.layer(x.flatten(1, 2) if self.tokens else x)


STEPS = [
    ("attention, an MLP of width N", ORANGE, OnMaps(AttentionMLP(DIM, HEADS), tokens=True)),
    (
        "without softmax: one matrix",
        "#8e24aa",
        OnMaps(DynamicLinear(DIM, DIM, predictor="linear", pool=1)),
    ),
    ("bilateral, 2 × 2 pooled", TEAL, OnMaps(DynamicLinear(DIM, DIM))),
    ("an ordinary linear layer", GREY, OnMaps(nn.Linear(DIM, DIM))),
]
SIDES = [7, 14, 28, 56, 78, 112]
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 64, 210, 30, 56, 800, 400
LOG_X, LOG_Y = (math.log10(40), math.log10(16000)), (6.0, 11.0)


def place(tokens: float, macs: float) -> tuple[float, float]:
    """Data to pixels, on two logarithmic axes."""
    u = (math.log10(tokens) - LOG_X[0]) / (LOG_X[1] - LOG_X[0])
    v = (math.log10(macs) - LOG_Y[0]) / (LOG_Y[1] - LOG_Y[0])
    return LEFT + u * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - v * (HEIGHT - TOP - BOTTOM)


def steps() -> str:
    """Cost of one layer with C inputs and outputs at each step."""
    parts = []
    for power in range(int(LOG_Y[0]), int(LOG_Y[1]) + 1):
        (x0, y), (x1, _) = place(40, 10**power), place(16000, 10**power)
        label = {6: "1 M", 7: "10 M", 8: "100 M", 9: "1 G", 10: "10 G", 11: "100 G"}[power]
        parts.append(
            f'<line x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity=".3"/>'
        )
        parts.append(text(x0 - 10, y + 4, label, anchor="end"))
    for side in SIDES:
        x, y = place(side * side, 10 ** LOG_Y[0])
        parts.append(text(x, y + 20, f"{side * side}", anchor="middle"))
    x, y = place(800, 10 ** LOG_Y[0])
    parts.append(text(x, y + 44, "tokens N of the image", anchor="middle"))
    parts.append(text(LEFT - 44, TOP - 12, f"multiply-adds of one layer, {DIM} to {DIM} channels"))
    for name, colour, layer in STEPS:
        pixels = [place(side * side, multiply_adds(layer, DIM, side, side)) for side in SIDES]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in pixels]
        x, y = pixels[-1]
        parts.append(text(x + 12, y + (12 if layer is STEPS[-1][2] else 2), name, colour, weight=600))
    return svg(WIDTH, HEIGHT, "cost of each step", "".join(parts))


def main() -> None:
    """Write both pictures beside this file."""
    folder = Path(__file__).parent
    (folder / "weights.svg").write_text(weights())
    (folder / "steps.svg").write_text(steps())


if __name__ == "__main__":
    main()
