"""Figures of the analyses, for a white page: SVG, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.patches
from matplotlib.figure import Figure

from weightformer.analysis.dynamics import QUANTITIES

if TYPE_CHECKING:
    from weightformer.analysis.ablate import Summary
    from weightformer.analysis.erf import ReceptiveField

__all__ = ["AXES", "check_format", "dynamics_figure", "erf_figure", "grid_figure"]

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#444444",
    "#8c564b",
    "#b5a515",
    "#7f3fbf",
)
AXES: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
"""How axes look in every figure."""

_STYLE = {**AXES, "font.size": 9, "svg.hashsalt": "weightformer", "grid.alpha": 0.25}


def check_format(path: Path) -> None:
    """Refuse a file that no figure can be written to, before it is computed.

    Raises:
        ValueError: the suffix is none of a picture.
    """
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"{str(path)!r} does not say the format of the picture: end it in .png, .svg or .pdf")


def grid_figure(summaries: Sequence[Summary], marks: Mapping[str, float], path: Path) -> None:
    """Top-1 of every seed and their mean, a row a variant, beside what a forward pass and a run cost.

    Args:
        summaries: of one task, in the order of the rows.
        marks: shares to draw a line at, by name.
        path: the SVG file to write.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 1.3 + 0.27 * len(summaries)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        rows = range(len(summaries))
        for row, summary in enumerate(summaries):
            points = [100 * value for value in summary.values]
            left.plot(points, [row] * len(points), "o", ms=4, color=_COLOURS[0], alpha=0.55, mew=0)
            if points:
                left.plot([100 * summary.mean], [row], "|", ms=13, mew=2, color=_COLOURS[1])
            if summary.diverged:
                left.annotate(
                    f"{summary.diverged} diverged", (0.01, row), xycoords=("axes fraction", "data"), color=_COLOURS[1]
                )
        for name, share in marks.items():
            left.axvline(100 * share, color="#444444", ls="--", lw=0.9)
            left.annotate(name, (100 * share, -0.85), fontsize=8, ha="center", annotation_clip=False)
        left.set(title=f"{summaries[0].task}: top-1, % (bar: mean of the seeds)" + ("\n" if marks else ""))
        left.set_yticks(rows, [summary.variant for summary in summaries])
        left.invert_yaxis()
        costs = [summary.multiply_adds / 1e6 for summary in summaries]
        right.barh(rows, costs, color=_COLOURS[6], height=0.55, alpha=0.35)
        for row, summary in enumerate(summaries):
            if summary.cpu_seconds:
                right.annotate(f" {summary.cpu_seconds:.0f} s", (0, row), va="center", fontsize=8)
        right.set(title="multiply-adds, M\n(CPU time of a run)")
        right.grid(axis="y", visible=False)
        _save(figure, path)


def dynamics_figure(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Loss and the recorded quantities over steps, a line a run; each in its worst layer.

    Args:
        runs: what `weightformer.analysis.dynamics.read_dynamics` returns, by what the legend calls the run.
        path: the SVG file to write.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6.2), layout="constrained")
        panels = list(figure.subplots(2, 3).flat)
        shown = {"loss": "training loss", **QUANTITIES}
        for axes, (quantity, title) in zip(panels, shown.items(), strict=False):
            for number, (label, run) in enumerate(runs.items()):
                finite = [(step, value) for step, value in run[quantity] if math.isfinite(value)]
                style, colour = ("-", "--", ":")[number // len(_COLOURS) % 3], _COLOURS[number % len(_COLOURS)]
                axes.plot(*zip(*finite, strict=True) if finite else ([], []), style, color=colour, lw=1.3, label=label)
            axes.set(title=title, xlabel="optimiser step")
            if quantity in ("ratio", "grad"):
                axes.set_yscale("log")
        panels[-1].axis("off")
        panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="upper left", fontsize=8)
        _save(figure, path)


def erf_figure(fields: Sequence[ReceptiveField], path: Path) -> None:
    """Effective receptive fields side by side on one colour scale: map ** 0.2 over its largest value, as in the paper.

    Args:
        fields: a panel each.
        path: the file to write; its suffix says the format.
    """
    aspect = max(field.map.shape[0] / field.map.shape[1] for field in fields)
    width, most = (2.5, 4) if aspect > 1 / 3 else (5.0, 2)  # inches, panels in a row; strips get wider panels
    columns = min(most, len(fields))
    rows = -(-len(fields) // columns)
    with matplotlib.rc_context({**_STYLE, "axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(0.9 + width * columns, (width * aspect + 0.65) * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, shown in zip(panels, fields, strict=False):
            image = axes.imshow(shown.picture().numpy(), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            top, left, bottom, right = shown.window_px
            axes.add_patch(
                matplotlib.patches.Rectangle(
                    (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec="white", lw=0.8, ls="--"
                )
            )
            height, width = shown.map.shape
            axes.set_title(f"{shown.label}\n{shown.note}", fontsize=8)
            axes.set_xlabel(f"{height} × {width} px; outside: {shown.outside:.2%}", fontsize=8)
            axes.set(xticks=[], yticks=[])
        for axes in panels[len(fields) :]:
            axes.axis("off")
        figure.colorbar(image, ax=panels, shrink=0.6, label="(contribution / largest) ** 0.2", aspect=30)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, facecolor="white", metadata=metadata)
