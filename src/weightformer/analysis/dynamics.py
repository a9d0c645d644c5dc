"""A report on what training did to predicted weights, from the logs of runs with ``dynamics_every``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightformer.training.dynamics import Thresholds, early_warnings
from weightformer.training.log import read_log

__all__ = ["QUANTITIES", "dynamics_table", "read_dynamics"]

QUANTITIES = {
    "ratio": "predicted over static norm",
    "saturation": "column norm of the predicted part",
    "rank": "effective rank over 16 images",
    "grad": "gradient norm before clipping",
}
"""What a report shows, of those that `weightformer.training.dynamics` defines."""


def read_dynamics(folder: str | Path, thresholds: Thresholds | None = None) -> dict[str, Any]:
    """What the run in a folder recorded, each quantity in the layer where it is worst.

    Where a resumed run repeated a step, the later record counts.

    Returns:
        ``loss`` and each of `QUANTITIES` as pairs of optimiser step and value: the largest over the layers, for
        ``rank`` the smallest, for ``grad`` that of all parameters. ``warning``: step and sentence of the earliest
        record that is beyond a threshold, or None.

    Raises:
        FileNotFoundError: the folder holds no log.
        ValueError: the run recorded no dynamics.
    """
    path = Path(folder) / "log.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no log.jsonl; give the output folder of a training run")
    losses: dict[int, float] = {}
    steps: dict[int, dict[str, float]] = {}
    for record in read_log(path):
        if "train/loss_step" in record:
            losses[record["step"]] = record["train/loss_step"]
        found = {key.removeprefix("dynamics/"): value for key, value in record.items() if key.startswith("dynamics/")}
        if found:
            steps.setdefault(record["step"], {}).update(found)
    if not steps:
        raise ValueError(f"{path} holds no dynamics; train with --dynamics_every STEPS")
    report: dict[str, Any] = {"loss": _rounded(losses)}
    for quantity in QUANTITIES:
        worst = {step: _worst(values, quantity) for step, values in steps.items()}
        report[quantity] = _rounded({step: value for step, value in worst.items() if value is not None})
    report["warning"] = _first_warning(steps, thresholds or Thresholds())
    return report


def dynamics_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: how the runs of each variant ended, their extremes, and the earliest warning.

    Args:
        rows: of a grid's ``results.json``, those of one task whose runs recorded their dynamics.
    """
    lines = [
        "| variant | ended | largest ratio | largest saturation | smallest rank | largest gradient | first warning |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    for variant, group in groups.items():
        ends = [f"{row['top1']:.2%}" if "top1" in row else "diverged" for row in group]
        cells = [variant, ", ".join(ends)]
        for quantity in QUANTITIES:
            values = [value for row in group for _, value in row["dynamics"][quantity]]
            cells.append(f"{(min if quantity == 'rank' else max)(values):.3g}" if values else "–")
        warned = [row["dynamics"]["warning"] for row in group if row["dynamics"]["warning"]]
        step, sentence = min(warned, default=(0, ""))
        what = f"step {step}: {sentence.split(':')[0]}"
        cells.append(f"{what} ({len(warned)} of {len(group)} seeds)" if warned else "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _worst(values: Mapping[str, float], quantity: str) -> float | None:
    """Of one record, over its layers."""
    found = [
        value
        for name, value in values.items()
        if name.endswith(f"/{quantity}") and (quantity != "grad" or name == "all/grad")
    ]
    return (min if quantity == "rank" else max)(found, default=None)


def _first_warning(steps: Mapping[int, Mapping[str, float]], thresholds: Thresholds) -> tuple[int, str] | None:
    norms: list[float] = []
    for step, values in sorted(steps.items()):
        for _, _, sentence in early_warnings(values, norms[-20:], thresholds):
            return step, sentence
        norms += [values["all/grad"]] if "all/grad" in values else []
    return None


def _rounded(series: Mapping[int, float]) -> list[tuple[int, float]]:
    return [(step, float(f"{value:.4g}")) for step, value in sorted(series.items())]
