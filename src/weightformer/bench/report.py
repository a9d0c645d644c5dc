"""What a measurement looks like: a table for the terminal, JSON, and one self-contained HTML page with curves."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weightformer.streaming.workspace import write_whole

__all__ = ["affine", "show", "slope", "write"]

Row = dict[str, Any]
Curves = dict[str, list[tuple[float, float]]]

_COLUMNS = ("px", "batch", "model", "value", "p10 - p90", "to released", "GFLOP")
_TITLES = {
    "memory": "memory of an inference step: MB of the process",
    "memory, tensors": "memory of an inference step: MB in tensors",
    "training-memory": "memory of a training step: MB of the process",
    "training-memory, tensors": "memory of a training step: MB in tensors",
    "FLOPs": "GFLOP an image",
}
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c564b")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of log y over log x."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def affine(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The line y = a + b x that is nearest in relative error: a, b and the largest |y - a - b x| / y of the points."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    u, v = [1 / y for y in ys], [x / y for x, y in points]  # least squares of a u + b v = 1
    uu, uv, vv = (math.fsum(p * q for p, q in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    a = (vv * math.fsum(u) - uv * math.fsum(v)) / determinant
    b = (uu * math.fsum(v) - uv * math.fsum(u)) / determinant
    return a, b, max(abs(y - a - b * x) / y for x, y in zip(xs, ys, strict=True))


def show(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the machine, one table a case, and the slopes."""
    console = console or Console()
    machine = results["machine"]
    console.print(_header(results))
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        table = Table(
            title=f"{case}, {_unit(results, case)}; {machine['threads']} threads, {results['config']['precision']}"
        )
        for column in _columns(case):
            table.add_column(column, justify="left" if column == "model" else "right")
        for row in _rows(results, case):
            table.add_row(*_cells(row, results["rows"]))
        console.print(table)
    for line in _slopes(results):
        console.print(line)


def write(results: dict[str, Any], folder: Path) -> None:
    """Write results.json and report.html into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    write_whole(folder / "report.html", _page(results).encode())


def _columns(case: str) -> tuple[str, ...]:
    """A measurement of memory has no quantiles, but a second measure."""
    return tuple("tensors" if "memory" in case and c == "p10 - p90" else c for c in _COLUMNS)


def _rows(results: dict[str, Any], case: str) -> list[Row]:
    return [row for row in results["rows"] if row["case"] == case]


def _unit(results: dict[str, Any], case: str) -> str:
    return _rows(results, case)[0]["unit"]


def _header(results: dict[str, Any]) -> str:
    m = results["machine"]
    where = m["accelerator"] or m["processor"]
    return (
        f"{results['config']['variant']} on {where}, {m['cores']} cores, {m['threads']} threads; "
        f"{results['config']['precision']}, TF32 off, {m['layout']}; python {m['python']}, torch {m['torch']}, "
        f"timm {m['timm']}, weightformer {m['weightformer']}; load {m['load']:.1f} when done; "
        f"FLOPs: {results['flops_unit']}"
    )


def _cells(row: Row, rows: list[Row]) -> list[str]:
    value = f"{row['value']:.4g}" if "value" in row else row["status"]
    second = f"{row['p10']:.4g} - {row['p90']:.4g}" if "p10" in row else ""
    second = f"{row['tensors']:.4g}" if "tensors" in row else second
    return [
        str(row["size"]),
        str(row["batch"]),
        row["model"],
        value,
        second,
        _against_released(row, rows),
        f"{row['gflop']:.3g}",
    ]


def _against_released(row: Row, rows: list[Row]) -> str:
    for other in rows:
        same = all(other[key] == row[key] for key in ("case", "size", "batch"))
        if same and other["model"] == "released" and "value" in other and "value" in row:
            if "seconds" in row:
                return f"{other['seconds'] / row['seconds']:.2f} x speed"
            return f"{row['value'] / other['value']:.2f} x size"
    return ""


def _curves(results: dict[str, Any], case: str, key: str = "value") -> Curves:
    """Per model, (pixels, seconds an image or megabytes) over the sizes."""
    curves: Curves = {}
    for row in _rows(results, case):
        if row.get(key, 0.0) > 0:
            y = row["seconds"] / row["batch"] if "seconds" in row else row[key]
            curves.setdefault(row["model"], []).append((row["size"] ** 2, y))
    return {model: points for model, points in curves.items() if len(points) > 1}


def _flop_curves(results: dict[str, Any]) -> Curves:
    curves: dict[str, dict[float, float]] = {}
    for row in results["rows"]:
        if row["gflop"] > 0:  # a peer's own operators may not be counted
            curves.setdefault(row["model"], {})[row["size"] ** 2] = row["gflop"]
    return {model: sorted(points.items()) for model, points in curves.items() if len(points) > 1}


def _all_curves(results: dict[str, Any]) -> dict[str, Curves]:
    curves = {}
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        curves[case] = _curves(results, case)
        if "memory" in case:
            curves[f"{case}, tensors"] = _curves(results, case, "tensors")
    curves["FLOPs"] = _flop_curves(results)
    return {name: found for name, found in curves.items() if found}


def _slopes(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, curves in _all_curves(results).items():
        slopes = ", ".join(f"{model} {slope(points):.2f}" for model, points in curves.items())
        lines.append(f"slope of {name} over pixels (1 is linear, 2 quadratic): {slopes}")
    return lines + _fits(results)


def _fits(results: dict[str, Any]) -> list[str]:
    """What of the memory is fixed and what grows with the pixels."""
    memory = {name: curves for name, curves in _all_curves(results).items() if "memory" in name}
    fits = {name: _affine_fits(curves) for name, curves in memory.items()}
    return [f"{name}, fixed MB + bytes a pixel (largest error of the fit): {fit}" for name, fit in fits.items() if fit]


def _affine_fits(curves: Curves) -> str:
    fits = {model: affine(points) for model, points in curves.items() if len(points) > 2}
    lines = {m: f"{a:.1f} + {1e6 * b:.1f} ({e:.0%})" if e < 0.1 else "no line" for m, (a, b, e) in fits.items()}
    return ", ".join(f"{model} {line}" for model, line in lines.items())


def _page(results: dict[str, Any]) -> str:
    tables, plots = [], []
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        head = "".join(f"<th>{c}</th>" for c in _columns(case))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row, results["rows"])) + "</tr>"
            for row in _rows(results, case)
        )
        tables.append(f"<h2>{case}, {_unit(results, case)}</h2><table><tr>{head}</tr>{body}</table>")
    for name, curves in _all_curves(results).items():
        title = _TITLES.get(name, f"{name}: seconds an image")
        plots.append(f"<figure>{_plot(title, curves)}</figure>")
    parity = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_number(check['output'])}</td>"
        f"<td>{_number(check['gradient'])}</td><td>{check['tolerance']:.0e}</td></tr>"
        for name, check in results["parity"].items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>WeightFormer, measured</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
td:nth-child(3), th:nth-child(3) {{ text-align: left }}
.parity td:first-child, .parity th:first-child {{ text-align: left }}
figure {{ display: inline-block; margin: 0 1rem 1rem 0 }}
p {{ color: #555 }}
</style>
<h1>WeightFormer, measured</h1><p>{html.escape(_header(results))}</p>
<p>Medians of {results["config"]["rounds"]} interleaved rounds; memory is the peak beyond weights and input: of the
process, and of tensors alone. Slopes are of the logarithms over pixels: 1 is linear, 2 quadratic.</p>
{"".join(plots)}{"".join(f"<p>{html.escape(line)}</p>" for line in _fits(results))}{"".join(tables)}
<h2>Parity, checked before timing</h2>
<table class="parity"><tr><th>model, precision</th><th>output</th><th>worst gradient</th><th>tolerance</th></tr>{parity}
</table></html>
"""


def _number(value: float | None) -> str:
    return "not compared" if value is None else f"{value:.1e}"


def _plot(title: str, curves: Curves) -> str:
    """One log-log chart as SVG, each curve labelled with its slope."""
    width, height, left, right, top, bottom = 560, 380, 62, 170, 34, 44
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    x_range, y_range = _decades(xs, pad=0.05), _decades(ys, pad=0.1)

    def place(x: float, y: float) -> tuple[float, float]:
        u = (math.log10(x) - x_range[0]) / (x_range[1] - x_range[0])
        v = (math.log10(y) - y_range[0]) / (y_range[1] - y_range[0])
        return left + u * (width - left - right), height - bottom - v * (height - top - bottom)

    parts = [f'<text x="{left}" y="20" font-weight="600">{html.escape(title)}</text>']
    labelled = -math.inf
    for x in sorted(set(xs)):
        px, _ = place(x, ys[0])
        parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{top}" y2="{height - bottom}" stroke="#eee"/>')
        side, y_text = math.isqrt(int(x)), height - bottom + 16
        if px - labelled > 28:  # where two sides are too close, the line of the second goes without its number
            parts.append(f'<text x="{px:.1f}" y="{y_text}" text-anchor="middle" font-size="11">{side}</text>')
            labelled = px
    for y in _ticks(y_range):
        _, py = place(xs[0], y)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 6}" y="{py + 4:.1f}" text-anchor="end" font-size="11">{y:g}</text>')
    labels = []
    for i, (model, points) in enumerate(curves.items()):
        color, placed = _COLORS[i % len(_COLORS)], [place(x, y) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in placed]
        labels.append((placed[-1][1], f"{model}, slope {slope(points):.2f}", color))
    last = -math.inf
    for y, text, color in sorted(labels):
        last = max(y + 4, last + 14)
        parts.append(
            f'<text x="{width - right + 8}" y="{last:.1f}" fill="{color}" font-size="12">{html.escape(text)}</text>'
        )
    middle = (left + width - right) / 2
    parts.append(
        f'<text x="{middle}" y="{height - 8}" text-anchor="middle" font-size="12">image side, px (log scale)</text>'
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def _decades(values: list[float], pad: float) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(pad * (high - low), 0.05)
    return low - margin, high + margin


def _ticks(decades: tuple[float, float]) -> list[float]:
    steps = (1,) if decades[1] - decades[0] > 2 else (1, 2, 5)
    exponents = range(math.floor(decades[0]), math.ceil(decades[1]) + 1)
    return [s * 10.0**e for e in exponents for s in steps if decades[0] <= math.log10(s * 10.0**e) <= decades[1]]
