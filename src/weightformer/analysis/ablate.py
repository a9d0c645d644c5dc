"""A grid of training runs, variant x task x seed: run it resumably, say what the differences are worth."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import fnmatch
import json
import math
import multiprocessing
import os
import re
import shlex
import statistics
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from weightformer.analysis.dynamics import dynamics_table, read_dynamics
from weightformer.analysis.flops import multiply_adds
from weightformer.analysis.machine import machine, now
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.streaming.workspace import write_whole
from weightformer.training.log import read_log

__all__ = ["GridConfig", "Run", "Summary", "ablate", "grid_path", "grids", "significance_note", "summarise"]

_GRIDS = Path(__file__).parent / "grids"


@dataclass
class GridConfig:
    """What ``weightformer ablate`` runs: every variant on every task with every seed."""

    output: str = "runs/ablation"
    """Folder for the runs, the table and the figures; the same command on it continues."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Of the runs of each variant."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: ``recipe``, and what differs from it, nested as in the recipe."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: what differs from the task, nested likewise; ``model.kwargs`` are merged."""
    baseline: str = ""
    """The variant that the others are compared with; by default the first."""

    def __post_init__(self) -> None:
        if not (self.tasks and self.variants and self.seeds):
            raise ValueError("a grid needs tasks, variants and seeds")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {self.seeds}")
        for kind, names in (("task", self.tasks), ("variant", self.variants)):
            _check_names(kind, names)
        self.baseline = self.baseline or next(iter(self.variants))
        if self.baseline not in self.variants:
            raise ValueError(f"baseline {self.baseline!r} is no variant; choose one of {', '.join(self.variants)}")


def _check_names(kind: str, names: Iterable[Any]) -> None:
    """Every name is to have a folder of its own."""
    folders: dict[str, str] = {}
    for name in names:
        folder = slug(name) if isinstance(name, str) else ""
        if not folder:
            raise ValueError(f"{kind} {name!r} cannot name a folder; give it a name with a letter or digit, in quotes")
        if folder in folders:
            raise ValueError(f"{kind}s {folders[folder]!r} and {name!r} would share the folder {folder!r}; rename one")
        folders[folder] = name


@dataclass(frozen=True)
class Run:
    """One training run of a grid."""

    task: str
    """Name of the task in the grid."""
    variant: str
    """Name of the variant."""
    seed: int
    """Its seed."""
    content: dict[str, Any]
    """The configuration, as a recipe's content."""
    command: str
    """The ``weightformer train`` command that is the same run."""

    @property
    def name(self) -> str:
        """``task/variant/seed``."""
        return f"{self.task}/{self.variant}/{self.seed}"


@dataclass(frozen=True)
class Summary:
    """The runs of one variant on one task."""

    task: str
    """Name of the task."""
    variant: str
    """Name of the variant."""
    values: list[float]
    """Top-1 of each seed that ended."""
    diverged: int
    """Seeds that ended in a loss or gradient that is not finite."""
    difference: float | None
    """Mean minus the baseline's mean; none for the baseline itself."""
    p: float | None
    """Of Welch's t-test against the baseline, two-sided; none with fewer than two seeds on either side."""
    significant: bool
    """Whether it stays below 5 % after Holm's correction for all the comparisons on its task."""
    parameters: int
    """Of the model."""
    multiply_adds: int
    """Of one forward pass on one image."""
    cpu_seconds: float | None
    """Mean processor time of a run, evaluation included."""

    @property
    def mean(self) -> float:
        """Of the values; not a number without any."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float:
        """Sample standard deviation; not a number with fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


def grids() -> list[str]:
    """Names of the grids that come with the package."""
    return sorted(path.stem for path in _GRIDS.glob("*.yaml"))


def grid_path(name: str) -> Path:
    """The YAML file that a grid's name, or a path, stands for.

    Raises:
        FileNotFoundError: neither a file nor a grid.
    """
    for path in (Path(name), _GRIDS / f"{name}.yaml"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no grid file {name!r}, and no grid of that name; those that are shipped: {grids()}")


def read_grid(name: str, argv: Sequence[str] = (), arguments: Any = (), *, quick: bool = False) -> GridConfig:
    """A grid from its file, with dotted options on top.

    Args:
        name: a path, or one of `grids`.
        argv: command-line options.
        arguments: what ``argv`` holds beside the grid's own.
        quick: put what the file has under ``quick`` in the place of the keys of the same name.

    Raises:
        ValueError: an unknown key, or a value that does not fit.
    """
    content = read_yaml(grid_path(name))
    small = content.pop("quick", None)
    if quick:
        if not isinstance(small, dict):
            raise ValueError(f"grid {name} has no `quick` part, so --quick does not apply to it")
        content |= small
    return parse_config(GridConfig, content, argv, name, arguments)


def expand(grid: GridConfig, only: str = "*") -> list[Run]:
    """The runs of a grid, seed by seed, so that an unfinished grid has something of every variant.

    Args:
        grid: the grid.
        only: a pattern that ``task/variant/seed`` must match.

    Raises:
        ValueError: a task without recipe, no run that matches, or a configuration that is not valid: all are checked
            before the first run starts.
    """
    from weightformer.tasks.classification import Config

    found = []
    for seed in grid.seeds:
        for task, over in grid.tasks.items():
            recipe = over.get("recipe")
            if not recipe:
                raise ValueError(f"task {task!r} of the grid names no recipe")
            base = read_yaml(recipe_path(recipe))
            for variant, changes in grid.variants.items():
                rest = {key: value for key, value in over.items() if key != "recipe"}
                output = str(Path(grid.output, *map(slug, (task, variant)), str(seed)))
                differs = _merge(_merge(rest, changes), {"seed": seed, "output": output})
                content = _merge(base, differs)
                if content.get("task") != "classification":
                    raise ValueError(f"task {task!r}: recipe {recipe} is not one of classification")
                if seed == grid.seeds[0]:
                    parse_config(Config, content, where=f"{task}/{variant}")
                found.append(Run(task, variant, seed, content, _command(recipe, base, differs)))
    return _matching(found, only)


def _matching(runs: Sequence[Run], only: str) -> list[Run]:
    chosen = [run for run in runs if fnmatch.fnmatch(run.name, only)]
    if not chosen:
        raise ValueError(f"no run of the grid matches {only!r}; they are named like {runs[0].name!r}")
    return chosen


def ablate(grid: GridConfig, *, workers: int = 1, only: str = "*", console: Console | None = None) -> list[str]:
    """Run what is not finished, then write table, figures and ``results.json`` into the grid's output folder.

    A killed run continues from its checkpoint and a finished one is kept. A run that fails for another reason than
    divergence does not keep the others from running.

    Args:
        grid: the grid.
        workers: processes that run at the same time, each on one thread; with 1, runs take place in this process.
        only: a pattern that ``task/variant/seed`` must match.
        console: where progress goes.

    Returns:
        A sentence for each run that failed.

    Raises:
        ValueError: a mistake in the grid, no worker, or a folder whose run has other settings or a damaged result.
        OSError: a worker process was killed; what was finished is kept.
    """
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    console = console or Console(highlight=False)
    every = expand(grid)
    runs = _matching(every, only)
    finished = {run.name for run in every if _is_finished(run)}  # all of them, since the table shows all of them
    open_runs = [run for run in runs if run.name not in finished]
    console.print(f"{len(runs)} runs, {len(runs) - len(open_runs)} of them finished", markup=False)
    failures = []
    for number, (run, row) in enumerate(_execute_all(open_runs, workers), 1):
        if "error" in row:
            failures.append(f"{run.name}: {row['error']}")
        text = row.get("error") or row.get("diverged") or f"top-1 {row['top1']:.2%}"
        seconds = f", {row['cpu_seconds']:.0f} CPU s" if row.get("cpu_seconds") else ""
        console.print(f"[{number}/{len(open_runs)}] {run.name}: {text}{seconds}", markup=False)
        write_results(grid, every)
    results = write_results(grid, every)
    if results["rows"]:
        text = write_report(results, grid.output)
        console.print(text, markup=False, soft_wrap=True)
    return failures


def write_report(results: Mapping[str, Any], folder: str | Path) -> str:
    """Write the figures of a grid and ``table.md``; returns its text.

    Args:
        results: the content of ``results.json``.
        folder: where to.
    """
    write_figures(results, folder)
    summaries = summarise(results["rows"], results["grid"]["baseline"])
    parts = [table(summaries), significance_note(summaries)]
    parts += [dynamics_table(rows) for rows in _recorded(results).values()]
    text = "\n\n".join(parts)
    Path(folder, "table.md").write_text(text + "\n", encoding="utf-8")
    return text


def write_figures(results: Mapping[str, Any], folder: str | Path, prefix: str = "") -> None:
    """Write the figures of a grid.

    Args:
        results: the content of ``results.json``.
        folder: where to.
        prefix: of the file names.
    """
    from weightformer.analysis.figures import dynamics_figure, grid_figure

    folder = Path(folder)
    summaries = summarise(results["rows"], results["grid"]["baseline"])
    for task in dict.fromkeys(summary.task for summary in summaries):
        chosen = [summary for summary in summaries if summary.task == task]
        grid_figure(chosen, results["marks"].get(task, {}), folder / f"{prefix}{slug(task)}.svg")
    for task, recorded in _recorded(results).items():
        first = {row["variant"]: row["dynamics"] for row in reversed(recorded)}  # the first seed of each
        dynamics_figure(dict(reversed(first.items())), folder / f"{prefix}{slug(task)}-dynamics.svg")


def _recorded(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of runs that recorded their dynamics, by task."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        if "dynamics" in row:
            found.setdefault(row["task"], []).append(row)
    return found


def write_results(grid: GridConfig, runs: Sequence[Run]) -> dict[str, Any]:
    """Collect the finished runs into ``results.json``; returns its content."""
    rows = [_read_result(path) for run in runs if (path := _result(run)).exists()]
    content = {
        "date": now(),
        "machine": machine(),
        "grid": dataclasses.asdict(grid),
        "missing": [run.name for run in runs if not _result(run).exists()],
        "commands": {run.name: run.command for run in runs if run.seed == grid.seeds[0]},
        "marks": {task: _marks(grid, task) for task in dict.fromkeys(row["task"] for row in rows)},
        "rows": rows,
    }
    if rows:
        write_whole(Path(grid.output) / "results.json", _one_row_a_line(content).encode())
    return content


def _one_row_a_line(content: Mapping[str, Any]) -> str:
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def summarise(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[Summary]:
    """One summary for each task and variant, in the order of the rows.

    Args:
        rows: of ``results.json``.
        baseline: the variant that the others are compared with.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["variant"]), []).append(row)
    values = {key: [row["top1"] for row in group if "top1" in row] for key, group in groups.items()}
    tasks = dict.fromkeys(task for task, _ in groups)
    kept: dict[tuple[str, str], float | None] = {}
    significant: set[tuple[str, str]] = set()
    for task in tasks:
        compared = {}
        for key in (key for key in groups if key[0] == task and key[1] != baseline):
            kept[key] = _welch(values[key], values.get((task, baseline), []))
            if kept[key] is not None:
                compared[key] = kept[key]
        for rank, (key, p) in enumerate(sorted(compared.items(), key=lambda item: item[1] or 0)):
            if p is None or p * (len(compared) - rank) > 0.05:  # Holm stops at the first that fails
                break
            significant.add(key)
    summaries = []
    for key, group in groups.items():
        own, other = values[key], values.get((key[0], baseline), [])
        costs = [row["cpu_seconds"] for row in group if row.get("cpu_seconds")]
        differs = key[1] != baseline and own and other
        summaries.append(
            Summary(
                task=key[0],
                variant=key[1],
                values=own,
                diverged=sum("diverged" in row for row in group),
                difference=statistics.fmean(own) - statistics.fmean(other) if differs else None,
                p=kept.get(key),
                significant=key in significant,
                parameters=group[0]["parameters"],
                multiply_adds=group[0]["multiply_adds"],
                cpu_seconds=statistics.fmean(costs) if costs else None,
            )
        )
    return summaries


def table(summaries: Sequence[Summary]) -> str:
    """A Markdown table of summaries."""
    lines = [
        "| task | variant | top-1, mean ± sd | seeds | to baseline | p | parameters | multiply-adds | CPU s a run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        seeds = f"{len(s.values)}" + (f", {s.diverged} diverged" if s.diverged else "")
        shown = f"{100 * s.mean:.2f} ± {100 * s.sd:.2f}" if len(s.values) > 1 else f"{100 * s.mean:.2f}"
        cells = [
            s.task,
            s.variant,
            shown if s.values else "–",
            seeds,
            "" if s.difference is None else f"{100 * s.difference:+.2f}",
            "" if s.p is None else ("< 0.001" if s.p < 0.001 else f"{s.p:.3f}") + (" *" if s.significant else ""),
            f"{s.parameters:,}",
            f"{s.multiply_adds / 1e6:.2f} M",
            "" if s.cpu_seconds is None else f"{s.cpu_seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def significance_note(summaries: Sequence[Summary]) -> str:
    """What the differences in the table are worth, in words and in points."""
    most = max((len(s.values) for s in summaries), default=0)
    note = (
        "p is that of Welch's t-test against the baseline over seeds, two-sided; * marks what stays below 5 % after "
        f"Holm's correction for all comparisons on the task. {_count(most)} a variant is little: "
    )
    parts = []
    for task in dict.fromkeys(s.task for s in summaries):
        sds = [s.sd for s in summaries if s.task == task and len(s.values) > 1]
        if sds:
            pooled = math.sqrt(statistics.fmean(sd**2 for sd in sds))
            least = _detectable(most) * pooled
            parts.append(f"on {task} (pooled standard deviation {100 * pooled:.2f} points) {100 * least:.2f}")
    if not parts:
        return note + "nothing can be said about spread."
    return (
        note
        + "a single comparison reaches 5 % only from a difference of about this many points: "
        + "; ".join(parts)
        + ". Smaller differences are not evidence, in either direction."
    )


def _count(seeds: int) -> str:
    return {1: "One seed", 2: "Two seeds", 3: "Three seeds"}.get(seeds, f"{seeds} seeds")


def _detectable(seeds: int) -> float:
    """Smallest difference of two means of ``seeds`` values that reaches 5 %, in standard deviations."""
    from scipy.stats import t

    return float(t.ppf(0.975, 2 * seeds - 2)) * math.sqrt(2 / seeds)


def _welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    if min(len(a), len(b)) < 2:
        return None
    if statistics.variance(a) + statistics.variance(b) == 0:
        return 1.0 if statistics.fmean(a) == statistics.fmean(b) else 0.0
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nearly equal values; the result holds
        return float(ttest_ind(a, b, equal_var=False).pvalue)


def _execute_all(runs: Sequence[Run], workers: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    if workers == 1 or len(runs) < 2:
        yield from ((run, execute(run)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_prepare_worker) as pool:
        try:
            futures = {pool.submit(execute, run): run for run in runs}
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed, perhaps for want of memory: what was finished is kept, and the same command goes "
                "on from there; fewer --workers need less memory"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare_worker() -> None:
    """One thread, and no life beyond the parent's: the same command again must find nobody at work in its folders."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(LeafSpec|does not have many workers|exists and is not empty).*")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def execute(run: Run) -> dict[str, Any]:
    """Train one run through the task's own ``train`` and write its row; what it prints goes into its folder.

    Returns:
        The row; ``diverged`` in it says where the run stopped being finite, ``error`` what else went wrong, in which
        case nothing is written and the run is tried again next time.
    """
    from weightformer.tasks import classification

    config = parse_config(classification.Config, run.content, where=run.name)
    folder = Path(config.output)
    row: dict[str, Any] = {"task": run.task, "variant": run.variant, "seed": run.seed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.log").open("a") as log, contextlib.redirect_stdout(log):
            try:
                row |= classification.train(config)
            except FloatingPointError as error:
                row["diverged"] = str(error)
        row |= _cost(config)
        row |= training_cost(folder / "log.jsonl")
        if config.dynamics_every:
            row["dynamics"] = read_dynamics(folder)
        write_whole(folder / "result.json", (json.dumps(row) + "\n").encode())
    except Exception as error:  # noqa: BLE001  whatever a model raises, the other runs are not to suffer from it
        known = isinstance(error, (ValueError, OSError, RuntimeError, ImportError))
        return {**row, "error": str(error) if known else f"{type(error).__name__}: {error}"}
    return row


def training_cost(log: Path) -> dict[str, Any]:
    """``steps`` and ``cpu_seconds`` of a run, from its log: steps that a resumption repeated are counted once.

    Without two log lines of one session there is no ``cpu_seconds``.
    """
    spent, measured, last = 0.0, 0, -1
    first: tuple[float, int] | None = None
    for record in read_log(log):
        if record.get("event") == "start":
            first = None
        elif "train/loss_step" in record:
            last = max(last, record["step"])
            if first is not None:
                spent, measured = spent + record["cpu"] - first[0], measured + record["step"] - first[1]
            first = (record["cpu"], record["step"])
    cost: dict[str, Any] = {"steps": last + 1}
    if measured > 0:
        cost["cpu_seconds"] = round(spent / measured * (last + 1), 2)
    return cost


def _cost(config: Any) -> dict[str, Any]:
    from weightformer.tasks.classification.data import ImageData
    from weightformer.tasks.classification.module import build_model

    channels = config.model.in_chans
    data = ImageData(config.data, in_chans=channels, mean=[0.5] * channels, std=[0.5] * channels, seed=0)
    fresh = dataclasses.replace(config.model, weights=None, pretrained=False)
    model = build_model(fresh, len(data.class_names), config.data.image_size)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": multiply_adds(model, channels, *config.data.size),
        "dynamic_blocks": sum(getattr(block, "dynamic", False) for block in getattr(model, "blocks", ())),
    }


def _marks(grid: GridConfig, task: str) -> dict[str, float]:
    """Shares to draw a line at, by name: what can be reached on the task, where that is known."""
    source = read_yaml(recipe_path(grid.tasks[task]["recipe"])).get("data", {})
    source = _merge(source, grid.tasks[task].get("data", {}))
    if source.get("source") != "probe":
        return {}
    from weightformer.tasks.classification import probe

    return {"chance": probe.CHANCE, "best local": probe.LOCAL, "ceiling": probe.ceiling(source.get("root"))}


def _is_finished(run: Run) -> bool:
    """Whether the run's folder holds its result.

    Raises:
        ValueError: the folder holds a run with other settings, or a damaged result.
    """
    from weightformer.tasks.classification import Config
    from weightformer.training.engine import claim_output

    if not _result(run).exists():
        return False
    _read_result(_result(run))
    config = parse_config(Config, run.content, where=run.name)
    claim_output(config.output, dataclasses.asdict(config))
    return True


def _result(run: Run) -> Path:
    return Path(run.content["output"]) / "result.json"


def _read_result(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if {"task", "variant", "seed", "parameters"} <= row.keys():
            return row
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{path} is damaged; delete it, and the same command makes it again from the run's checkpoint")


def _command(recipe: str, base: Mapping[str, Any], differs: Mapping[str, Any]) -> str:
    """``weightformer train`` with an option for everything that differs from the recipe."""
    words = ["weightformer", "train", "--config", recipe]
    for key, value in _leaves(differs):
        if key == "model.kwargs":
            value = _merge(base.get("model", {}).get("kwargs", {}), value)
        if isinstance(value, (dict, list)):
            value = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
        words += [f"--{key}", str(value)]
    return shlex.join(words)


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; ``kwargs`` is one value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and key != "kwargs":
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``, mapping by mapping; neither is changed."""
    merged = dict(copy.deepcopy(dict(base)))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
