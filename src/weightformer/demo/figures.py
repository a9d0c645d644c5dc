"""The report's pictures: SVG whose lines and letters take the colour of the page, so that they suit light and dark."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from weightformer.analysis.figures import AXES
from weightformer.demo.scaling import ATTENTION, EXPLICIT, OURS

__all__ = ["classes_plane", "embedded_png", "growth", "kernels", "training_curve"]

COLOURS = {OURS: "#2f7ed8", ATTENTION: "#e08214", EXPLICIT: "#c44e52"}
_SECOND = "#e08214"
_DIGITS = ("#2f7ed8", "#e08214", "#2ca02c", "#d64550", "#9467bd", "#a0715e", "#e377c2", "#8a8f98", "#b5a515", "#17a5b8")

_INK = "#010203"  # stands for the page's own colour until the SVG is written
_STYLE: dict[Any, Any] = {
    **AXES,
    "font.family": "DejaVu Sans",  # measures the text; the page's font replaces it
    "font.size": 10,
    "svg.fonttype": "none",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}
# Zero is transparent, so that it is the page's background whatever that is.
_SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0.88, 0.51, 0.08, 1), (0.5, 0.5, 0.5, 0), (0.18, 0.49, 0.85, 1)]
)


def training_curve(losses: Sequence[Sequence[float]], accuracies: Sequence[Sequence[float]]) -> str:
    """Loss on training batches and accuracy on the test images, over epochs.

    Args:
        losses: pairs of epoch and loss.
        accuracies: pairs of epoch and share of the test images that were right.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(*zip(*losses, strict=True), color=COLOURS[OURS])
        left.set(title="Training loss", xlabel="epoch", xlim=(0, None))
        epochs, shares = zip(*((epoch, 100 * share) for epoch, share in accuracies), strict=True)
        right.plot(epochs, shares, color=_SECOND, marker="o")
        right.set(title="Test images classified correctly, %", xlabel="epoch", xlim=left.get_xlim(), ylim=(None, 101))
        right.annotate(f"{shares[-1]:.1f}", (epochs[-1], shares[-1]), (-4, -14), textcoords="offset points", ha="right")
        return _svg(figure, "Training loss and test accuracy over epochs")


def growth(measurements: Sequence[Mapping[str, Any]], slopes: Mapping[str, Mapping[str, float]]) -> str:
    """Time and memory over pixels on logarithmic axes, each curve with its slope.

    Args:
        measurements: the records of `weightformer.demo.scaling.measure`.
        slopes: by quantity (``seconds``, ``bytes``) and model.
    """
    panels = (
        ("seconds", 1e3, "Time of one forward pass, ms"),
        ("bytes", 2**-20, "Peak memory of one forward pass, MiB"),
    )
    sides = [m["side"] for m in measurements]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 4.1), layout="constrained")
        for axes, (quantity, unit, title) in zip(figure.subplots(1, 2), panels, strict=True):
            for name, colour in COLOURS.items():
                points = [(m["side"], m["models"][name][quantity]) for m in measurements if name in m["models"]]
                x, y = [side**2 for side, _ in points], [value * unit for _, value in points]
                label = f"{name}: slope {slopes[quantity][name]:.2f}"
                axes.loglog(x, y, color=colour, marker="o", label=label)
            axes.set(title=title, xlabel="image side, px (the axis is logarithmic in pixels)")
            shown = sides[::2] if len(sides) > 5 else sides
            axes.set_xticks([side**2 for side in shown], [str(side) for side in shown])
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: "")
            axes.legend(loc="upper left", handlelength=1.4)
            low, high = axes.get_ylim()
            axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
        return _svg(figure, "Time and memory of one forward pass against pixels, on logarithmic axes")


def kernels(images: Sequence[np.ndarray], titles: Sequence[str], predicted: Tensor, num_channels: int = 12) -> str:
    """The predicted kernels of some images, one row an image, for the channels that differ most between them.

    Args:
        images: grey, one a row.
        titles: one a row.
        predicted: kernels (rows, C, K, K).
        num_channels: how many channels are shown.
    """
    order = predicted.flatten(2).var(0).sum(1).argsort(descending=True)[:num_channels]
    shown = predicted[:, order].numpy()
    limit = float(np.abs(shown).max())
    with matplotlib.rc_context({**_STYLE, "axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(8.6, 0.72 * len(images) + 0.25), layout="constrained")
        grid = figure.subplots(len(images), num_channels + 1, squeeze=False, width_ratios=[1.3] + [1] * num_channels)
        for row, (image, title) in enumerate(zip(images, titles, strict=True)):
            grid[row, 0].imshow(image, cmap="gray", vmin=0, vmax=255)
            grid[row, 0].set_ylabel(title, rotation=0, ha="right", va="center")
            for column in range(num_channels):
                grid[row, column + 1].imshow(shown[row, column], cmap=_SIGNED, vmin=-limit, vmax=limit)
                if row == 0:
                    grid[row, column + 1].set_title(f"{int(order[column])}", loc="center", fontsize=9, alpha=0.7)
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.patch.set_visible(False)
            for spine in axes.spines.values():
                spine.set(visible=True, alpha=0.25)
        return _svg(figure, "Predicted 3 x 3 kernels of four images; columns are channels")


def classes_plane(points: Tensor, labels: Sequence[str], names: Sequence[str], share: float) -> str:
    """A scatter of images in a plane, each drawn as the name of its class.

    Args:
        points: (B, 2).
        labels: class name of each image.
        names: all classes, in the order of their colours.
        share: of the variance that the plane holds, for the axis label.
    """
    colours = dict(zip(names, itertools.cycle(_DIGITS)))
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(8.6, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.scatter(points[:, 0], points[:, 1], s=0)
        for (x, y), label in zip(points.tolist(), labels, strict=True):
            axes.text(x, y, label, color=colours[label], ha="center", va="center", fontsize=10, fontweight="bold")
        axes.set(
            xticks=[],
            yticks=[],
            xlabel=f"the two directions in which predicted kernels vary most ({share:.0%} of their variance)",
        )
        return _svg(figure, "Test images placed by their predicted kernels")


def embedded_png(image: np.ndarray) -> str:
    """A grey image as a ``data:`` address."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _svg(figure: Figure, description: str) -> str:
    """The figure as an SVG element that takes the page's colour and font, with identifiers of its own."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": description}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = (
        re.sub(r'<g id="[^"]*"', "<g", text)
        .replace(_INK, "currentColor")
        .replace("'DejaVu Sans'", "system-ui, sans-serif")
    )
    return re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
        rf'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="img" aria-label="{description}">',
        text,
        count=1,
    )
