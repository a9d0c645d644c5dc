"""What ``make experiments`` runs: every experiment that fits a desk, resumably, and then the page of results.

python -m weightformer.analysis.experiments [--workers N] [--results FOLDER] [--docs FOLDER] [--report_only]
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from weightformer.analysis.ablate import ablate, expand, read_grid
from weightformer.analysis.erf import erf
from weightformer.analysis.machine import machine, now
from weightformer.analysis.report import write_page

__all__ = ["EXPERIMENTS", "SKIPPED", "Experiment", "main"]

_STRATEGIES = ("gap", "linear", "nonlinear", "deep", "bilateral")
_KERNELS = ("gap", "adaptive", "amp_dir", "conv")


@dataclass(frozen=True)
class Experiment:
    """One measurement of the page."""

    name: str
    """Stem of its file in benchmarks/results."""
    command: str
    """What to type for it alone."""
    cost: str
    """What it costs."""
    run: Callable[[Path, int], bool]
    """Measures into a file with so many workers; finished parts are kept. Returns whether all of it is there."""


@dataclass(frozen=True)
class Skipped:
    """An experiment of the paper that does not fit two cores."""

    name: str
    """What it is."""
    why: str
    """What it would take."""
    command: str
    """How to run it where that is at hand; empty where this package cannot."""


def _grid(name: str) -> Callable[[Path, int], bool]:
    def run(path: Path, workers: int) -> bool:
        grid = read_grid(name)
        failures = ablate(grid, workers=workers)
        shutil.copyfile(Path(grid.output) / "results.json", path)
        return not failures

    return run


def _specs_before() -> list[str]:
    wide = "weightformer_tiny"
    specs = [f"linear {name}={wide} {_kwargs('linear_predictor', name)}" for name in _STRATEGIES]
    specs += [f"conv {name}={wide} {{conv_predictor: {name}}}" for name in _KERNELS if name != "adaptive"]
    return [*specs, f"static={wide} {{dynamic_every: 0}}", "DeiT=deit_tiny_patch16_224"]


def _fields_before(path: Path, _: int) -> bool:
    """The paper's row "before training": every strategy, its picture pooled as there, at 1024 px."""
    return path.exists() or _fields(path, _specs_before(), size=[1024], num=2)


def _kwargs(key: str, name: str) -> str:
    pool = "" if name == "gap" else ", pool: 7x7"
    return f"{{{key}: {name}{pool}}}"


def _fields_after(path: Path, _: int) -> bool:
    """The trained probes of the grid, the first seed of every variant, before and after."""
    if path.exists():
        return True
    runs = {run.variant: Path(run.content["output"]) for run in expand(read_grid("strategies"), "probe/*/0")}
    specs = {name: folder / "checkpoints" / "last.ckpt" for name, folder in runs.items()}
    missing = [name for name, file in specs.items() if not file.exists()]
    if missing:
        raise FileNotFoundError(f"the strategies grid has no probe of {', '.join(missing)} yet; run it first")
    return _fields(path, [f"{name}={file}" for name, file in specs.items()], num=8, before=True)


def _fields(path: Path, specs: Sequence[str], **options: Any) -> bool:
    picture = path.with_suffix(".png")
    erf(specs, picture, **options)
    rows = json.loads(picture.with_suffix(".json").read_text())
    path.write_text(json.dumps({"date": now(), "machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return True


EXPERIMENTS = [
    Experiment(
        "strategies",
        "weightformer ablate strategies --workers 2",
        "90 runs, about a CPU minute each",
        _grid("strategies"),
    ),
    Experiment(
        "stability",
        "weightformer ablate stability --workers 2",
        "39 runs, 50 to 95 CPU seconds each",
        _grid("stability"),
    ),
    Experiment(
        "erf_before",
        f"weightformer erf {shlex.join(_specs_before())} --size 1024 --num 2",
        "about five CPU minutes",
        _fields_before,
    ),
    Experiment(
        "erf_after",
        "weightformer erf runs/strategies/probe/*/0/checkpoints/last.ckpt --before",
        "about a CPU minute, after the strategies",
        _fields_after,
    ),
]

SKIPPED = [
    Skipped(
        "ImageNet-1K, models T, S and B",
        "1.28 million images, 300 epochs: days on eight GPUs",
        "torchrun --nproc_per_node 8 -m weightformer train --config imagenet_tiny --data.root IMAGENET "
        "--trainer.devices 8",
    ),
    Skipped(
        "ImageNet-1K, strategies and frequencies (the paper's ablation)",
        "13 variants, three seeds, 300 epochs each",
        "weightformer ablate imagenet --list",
    ),
    Skipped("COCO 2017 and ADE20K", "pre-training on ImageNet first, then 380,000 and 160,000 iterations on GPUs", ""),
    Skipped("class-conditional ImageNet at 256 px, FID-50K", "400,000 iterations at batch 256 on GPUs", ""),
    Skipped(
        "throughput and memory at 1248 px on a GPU",
        "a GPU; what two CPU cores give is in the first table",
        "benchmarks/gpu.sh",
    ),
]


def main(argv: Sequence[str]) -> int:
    """Run the experiments and write the page; an experiment that fails leaves the others and the page alone."""
    parser = ArgumentParser(prog="python -m weightformer.analysis.experiments", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time")
    parser.add_argument("--results", default="benchmarks/results", help="folder of the measurements")
    parser.add_argument("--docs", default="docs/results", help="folder of the page")
    parser.add_argument("--report_only", action="store_true", help="write the page from the measurements there are")
    args = parser.parse_args(argv)
    results, console, failed = Path(args.results), Console(highlight=False), []
    if args.report_only and not any(results.glob("*.json")):
        parser.error(f"{results} holds no measurements; the page is left as it is")  # else all would be "not measured"
    results.mkdir(parents=True, exist_ok=True)
    for experiment in [] if args.report_only else EXPERIMENTS:
        console.print(f"{experiment.name}: {experiment.cost}", markup=False)
        try:
            if not experiment.run(results / f"{experiment.name}.json", args.workers):
                failed.append(experiment.name)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            failed.append(experiment.name)
            console.print(f"{experiment.name} failed: {error}", markup=False)
    for skipped in [] if args.report_only else SKIPPED:
        console.print(f"skipped, does not fit here: {skipped.name} ({skipped.why})", markup=False)
    page = write_page(results, Path(args.docs), EXPERIMENTS, SKIPPED)
    console.print(f"written to {page}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
