"""The paper's claims, each beside what was measured here and what follows from it by a stated rule."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

from weightformer.analysis.ablate import Summary, summarise
from weightformer.analysis.flops import multiply_adds
from weightformer.tasks.classification import probe

__all__ = ["CLAIMS", "Claim", "Finding", "Measurements", "read_measurements"]

HOLDS, FAILS, OPEN, PENDING = "holds", "does not hold here", "not testable here", "not measured yet"


@dataclass(frozen=True)
class Finding:
    """What was measured for a claim."""

    measured: str
    """In a sentence, with numbers."""
    on: str
    """Data and machine."""
    verdict: str
    """``holds``, ``does not hold here``, ``not testable here`` or ``not measured yet``."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    says: str
    """What it says."""
    find: Callable[[Measurements], Finding]
    """Looks it up in the measurements."""


class Measurements:
    """The committed measurements: the files of benchmarks/results.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def json(self, name: str) -> dict[str, Any] | None:
        """The content of ``name.json``; None if it was not measured."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def repeats(self, name: str) -> list[dict[str, Any]]:
        """The contents of ``name_1.json``, ``name_2.json`` and so on."""
        return [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob(f"{name}_[0-9]*.json")]

    def csv(self, name: str) -> list[dict[str, str]] | None:
        """The rows of ``name.csv``; None if it was not measured."""
        path = self.folder / f"{name}.csv"
        if not path.exists():
            return None
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def summaries(self, grid: str, task: str, baseline: str | None = None) -> dict[str, Summary]:
        """Of a grid's runs on one task, by variant; empty if it was not measured."""
        content = self.json(grid)
        if content is None:
            return {}
        rows = [row for row in content["rows"] if row["task"] == task]
        return {s.variant: s for s in summarise(rows, baseline or content["grid"]["baseline"])}


def read_measurements(folder: str | Path) -> Measurements:
    """The measurements in a folder.

    Raises:
        FileNotFoundError: no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is no folder of measurements")
    return Measurements(folder)


_OURS = "bilateral + adaptive"
_PROBE, _FASHION = "probe", "fashion_mnist"
_DESK = "{task}, {seeds} seeds, models of 6 blocks"


def _percent(summary: Summary) -> str:
    spread = "" if math.isnan(summary.sd) else f" ± {100 * summary.sd:.1f}"
    return f"{100 * summary.mean:.1f}{spread} %" if summary.values else "diverged"


def _pending(what: str) -> Finding:
    return Finding("–", what, PENDING)


def _linear_cost(_: Measurements) -> Finding:
    pixels = (1248 / 224) ** 2
    growth = {}
    for name in ("weightformer_tiny", "deit_tiny_patch16_224"):
        counts = []
        for side in (224, 1248):
            kwargs: dict[str, Any] = {"img_size": side} if name.startswith("deit") else {}
            with torch.device("meta"):
                model = timm.create_model(name, **kwargs)
            counts.append(multiply_adds(model, 3, side, side))
        growth[name] = counts[1] / counts[0]
    ours, deit = growth.values()
    return Finding(
        f"from 224 to 1248 px: pixels {pixels:.1f}-fold, multiply-adds of T {ours:.1f}-fold, of DeiT-T {deit:.0f}-fold",
        "counted on the formulas",
        HOLDS if abs(ours / pixels - 1) < 0.05 < deit / pixels - 1 else FAILS,
    )


def _sizes(_: Measurements) -> Finding:
    published = {
        "tiny": (224, 7.074184e6, 1.124e9),
        "small": (224, 27.492136e6, 4.428e9),
        "base": (448, 27.492136e6, 17.66e9),
    }
    parts, worst = [], 0.0
    for name, (side, parameters, macs) in published.items():
        with torch.device("meta"):
            model = timm.create_model(f"weightformer_{name}")
        found = (sum(p.numel() for p in model.parameters()), multiply_adds(model, 3, side, side))
        parts.append(f"{name[0].upper()} {found[0] / 1e6:.2f} M, {found[1] / 1e9:.2f} G")
        worst = max(worst, abs(found[0] / parameters - 1), abs(found[1] / macs - 1))
    return Finding("; ".join(parts), "counted", HOLDS if worst < 0.01 else FAILS)


def _identity(_: Measurements) -> Finding:
    from weightformer.layers.attention import attention_mlp

    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 50, 16, generator=generator, dtype=torch.float64)
    ours = attention_mlp(query, key.transpose(-1, -2) / 4, value)
    torchs = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    error = float((ours - torchs).norm() / torchs.norm())
    shown = "less than 1e-12" if error < 1e-12 else f"{error:.0e}"
    return Finding(
        f"the MLP form differs from PyTorch's attention by {shown}, relative",
        "random tokens, float64; masks and heads in the tests",
        HOLDS if error < 1e-6 else FAILS,
    )


def _imagenet(_: Measurements) -> Finding:
    return Finding("not run: recipes `imagenet_tiny`, `_small`, `_base`", "needs ImageNet-1K and GPUs", OPEN)


def _beats_twins(found: Measurements) -> Finding:
    summaries = found.summaries("strategies", _FASHION, baseline=_OURS)
    if not {_OURS, "static", "DeiT twin"} <= summaries.keys():
        return _pending("Fashion-MNIST, twins under one recipe")
    ours, static, deit = summaries[_OURS], summaries["static"], _attention_twin(summaries)
    verdicts = [_ahead(s) for s in (static, deit)]
    words = {1: "ahead of", 0: "not told apart from", -1: "behind"}
    return Finding(
        f"{_percent(ours)}: {words[verdicts[0]]} the static twin ({_percent(static)}), {words[verdicts[1]]} the DeiT "
        f"twin ({_percent(deit)}, the better of two rates)",
        _DESK.format(task="Fashion-MNIST", seeds=len(ours.values)),
        HOLDS if verdicts == [1, 1] else FAILS,
    )


def _attention_twin(summaries: dict[str, Summary]) -> Summary:
    """The better of the rates that the DeiT twin was trained with."""
    twins = [s for name, s in summaries.items() if name.startswith("DeiT twin")]
    return max(twins, key=lambda s: s.mean if s.values else 0.0)


def _ahead(other: Summary) -> int:
    """Whether the baseline is ahead of this variant (1), behind it (-1), or neither at 5 %, a single comparison."""
    if other.p is None or other.difference is None or other.p > 0.05:
        return 0
    return 1 if other.difference < 0 else -1


def _global(found: Measurements) -> Finding:
    summaries = found.summaries("strategies", _PROBE)
    if not {_OURS, "static", "DeiT twin"} <= summaries.keys():
        return _pending("the probe of global modelling")
    ours, static, deit = summaries[_OURS], summaries["static"], _attention_twin(summaries)
    solved = ours.values and min(ours.values) > probe.LOCAL_BOUND
    stuck = static.values and max(static.values) < probe.LOCAL + 0.05
    return Finding(
        f"WeightFormer {_percent(ours)}, static twin {_percent(static)}, DeiT twin {_percent(deit)}, the better of two "
        f"rates; no sum of local evidence exceeds {probe.LOCAL_BOUND:.0%}, the best reaches {probe.LOCAL:.0%}",
        _DESK.format(task="probe", seeds=len(ours.values)),
        HOLDS if solved and stuck else FAILS,
    )


def _best_strategy(found: Measurements) -> Finding:
    parts, better, worse = [], 0, 0
    for task in (_PROBE, _FASHION):
        summaries = found.summaries("strategies", task, baseline=_OURS)
        others = [s for name, s in summaries.items() if name.startswith(("linear ", "conv "))]
        if _OURS not in summaries or len(others) < 7:
            return _pending("probe and Fashion-MNIST")
        best = max(others, key=lambda s: s.mean if s.values else 0.0)
        parts.append(f"{task}: {_percent(summaries[_OURS])}, best other {best.variant} {_percent(best)}")
        better += sum(_ahead(s) < 0 for s in others)
        worse += sum(_ahead(s) > 0 for s in others)
    verdict = FAILS if better else HOLDS if worse == 14 else OPEN
    parts.append(f"of 14 comparisons with another strategy {worse} are won, {better} lost, the rest within the spread")
    return Finding("; ".join(parts), "models of 6 blocks; the other strategies' forms are inferred", verdict)


def _frequency(found: Measurements) -> Finding:
    names = ["every block", "every 2nd block", "every 4th block", "every 6th block", "static"]
    parts, lost = [], 0
    won_dense = []
    for task in (_PROBE, _FASHION):
        summaries = found.summaries("strategies", task, baseline=_OURS)
        if not {_OURS, *names} <= summaries.keys():
            return _pending("probe and Fashion-MNIST")
        shown = ", ".join(f"{name} {_percent(summaries[name])}" for name in names)
        parts.append(f"{task}: every 3rd {_percent(summaries[_OURS])}, {shown}")
        lost += sum(_ahead(summaries[name]) < 0 for name in names)
        won_dense.append(_ahead(summaries["every block"]) > 0)
    verdict = FAILS if lost else HOLDS if all(won_dense) else OPEN
    return Finding("; ".join(parts), "models of 6 blocks", verdict)


def _fields(found: Measurements) -> Finding:
    content = found.json("erf_after")
    if content is None:
        return _pending("the trained probes")
    trained = {row["label"]: row["outside"] for row in content["rows"] if row["weights"] == "trained"}
    dynamic = {name: share for name, share in trained.items() if name != "static" and "DeiT" not in name}
    local = trained["static"]
    return Finding(
        f"share from outside the convolutions' reach: {_OURS} {trained[_OURS]:.1%}, all dynamic variants "
        f"{min(dynamic.values()):.1%} to {max(dynamic.values()):.1%}, static {local:.1%}, DeiT twin "
        f"{trained['DeiT twin']:.1%}",
        "trained probes, first seed",
        HOLDS if local == 0 and min(dynamic.values()) > 0 else FAILS,
    )


def _deep_is_local(found: Measurements) -> Finding:
    content = found.json("erf_after")
    if content is None:
        return _pending("the trained probes")
    trained = {row["label"]: row["outside"] for row in content["rows"] if row["weights"] == "trained"}
    others = [trained[f"linear {name}"] for name in ("gap", "linear", "nonlinear")] + [trained[_OURS]]
    return Finding(
        f"outside share of deep {trained['linear deep']:.1%}, of the other linear strategies {min(others):.1%} to "
        f"{max(others):.1%}",
        "trained probes, first seed; its form is inferred",
        HOLDS if trained["linear deep"] < min(others) / 2 else FAILS,
    )


def _large(found: Measurements) -> Finding:
    runs = {
        processor: [_by_model(content, "throughput") for content in found.repeats(name)]
        for processor, name in (("AMD Zen 5", "cpu_t1248"), ("Intel Xeon", "cpu_intel_t1248"))
    }
    runs = {processor: measured for processor, measured in runs.items() if measured}
    memory = found.json("cpu_memory")
    if not runs or memory is None:
        return _pending("CPU, 1248 px")
    used = _by_model(memory, "memory")
    parts = []
    for ours in ("eager", "native"):
        times = " and ".join(
            f"{min(run[ours] / run['deit-fused'] for run in measured):.1f} times that of fused attention and "
            f"{min(run[ours] / run['deit-explicit'] for run in measured):.1f} times that of explicit attention "
            f"({processor}{f', the slowest of {len(measured)}' if len(measured) > 1 else ''})"
            for processor, measured in runs.items()
        )
        saved = 1 - used[ours] / used["deit-explicit"]
        parts.append(f"{ours}: the throughput is {times}, the memory {saved:.0%} less than with explicit attention")
    return Finding("; ".join(parts), "T against DeiT-T, two CPU cores, batch 1; the paper's: a GPU", OPEN)


def _by_model(content: dict[str, Any], case: str) -> dict[str, float]:
    """What a benchmark measured at 1248 px, by model."""
    return {row["model"]: row["value"] for row in content["rows"] if row["case"] == case and row["size"] == 1248}


def _stability(found: Measurements) -> Finding:
    content = found.json("stability")
    if content is None:
        return _pending("Fashion-MNIST, dynamics recorded")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        groups.setdefault(row["variant"], []).append(row)
    released = [row["top1"] for row in groups["released"] if "top1" in row]
    floor = min(released) - 0.05 if released else 1.0
    broken = [name for name, rows in groups.items() if any("diverged" in row or row["top1"] < floor for row in rows)]
    healthy = [name for name in groups if name not in broken]
    least, most = (pick(map(len, groups.values())) for pick in (min, max))
    seeds = f"{least} to {most} seeds" if least < most else f"{least} seeds" if least > 1 else "one seed"
    return Finding(
        f"diverged, or five points below the released form: {'; '.join(broken) or 'none'}. Trained well: "
        f"{'; '.join(healthy) or 'none'}",
        f"Fashion-MNIST, one epoch, {seeds}, models of 6 blocks",
        HOLDS if any("every block" in name for name in broken) else FAILS,
    )


def _scenes(found: Measurements) -> Finding:
    with torch.device("meta"):
        model = timm.create_model("weightformer_tiny")
    count = multiply_adds(model, 3, 1024, 1024) / 1e9
    parts = [f"backbone T at 1024 px counts {count:.1f} G of the 77 G (the pyramid makes up the rest)"]
    for name, column, what in (("detection", "box_ap", "box AP"), ("segmentation", "miou", "mIoU")):
        rows = {row["model"]: float(row[column]) for row in found.csv(name) or []}
        if {"weightformer", "static", "deit"} <= rows.keys():
            shares = [f"{100 * rows[model]:.1f}" for model in ("weightformer", "static", "deit")]
            parts.append(f"{what} on fashion scenes {shares[0]}, static twin {shares[1]}, DeiT twin {shares[2]}")
    return Finding("; ".join(parts), "needs COCO, ADE20K and GPUs; the scenes are one seed of micro models", OPEN)


def _generation(found: Measurements) -> Finding:
    rows = {row["model"]: row for row in found.csv("generation") or [] if row["guidance"] == "2"}
    measured = "not run at that scale"
    if {"weightformer", "dit"} <= rows.keys():
        scores = [f"{float(rows[model]['fid']):.2f}" for model in ("weightformer", "dit")]
        measured += f"; on Fashion-MNIST, features of a classifier of ours, FID {scores[0]} against DiT's {scores[1]}"
    return Finding(measured, "needs ImageNet latents and 400,000 iterations on GPUs; ours is one seed", OPEN)


CLAIMS: Sequence[Claim] = (
    Claim("Softmax attention is a two-layer MLP whose weights are predicted from the input", _identity),
    Claim("With weights of fixed size, cost is linear in pixels", _linear_cost),
    Claim("Model sizes: T 7.07 M and 1.12 G, S 27.5 M and 4.43 G, B is S at 448 px, 17.7 G multiply-adds", _sizes),
    Claim("Predicted weights model globally: what no local network can tell, they can", _global),
    Claim(
        "After training, dynamic models see the whole image; the static one nothing beyond its convolutions", _fields
    ),
    Claim("The deep predictor stays almost local after training", _deep_is_local),
    Claim(
        "Of the strategies compared, bilateral (linear layer) and adaptive (convolution) are the best", _best_strategy
    ),
    Claim("One dynamic block in three is the best trade-off; denser replacement under-fits", _frequency),
    Claim("Many dynamic blocks are hard to optimise (the paper leaves stability open)", _stability),
    Claim("Under one recipe WeightFormer is more accurate than its attention and convolution peers", _beats_twins),
    Claim("ImageNet-1K top-1: T 76.3, S 81.3, B 83.4, above DeiT, PVT and isotropic ConvNeXt of their size", _imagenet),
    Claim("At 1248 px, 7.7 times DeiT's throughput with 91 % less memory", _large),
    Claim("COCO 45.0 box AP at 77 G against DeiT-T's 44.4 at 106 G; ADE20K 45.6 mIoU against 44.0", _scenes),
    Claim("Class-conditional ImageNet at 256 px: FID below DiT's and DiG's at equal size", _generation),
)
"""In the order of the page."""
