"""The page of results: verdicts follow from the numbers, and the committed page is what the measurements say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from weightformer.analysis import claims
from weightformer.analysis.ablate import expand, read_grid
from weightformer.analysis.claims import FAILS, HOLDS, OPEN, PENDING, Measurements
from weightformer.analysis.erf import _parse
from weightformer.analysis.experiments import EXPERIMENTS, SKIPPED, main
from weightformer.analysis.report import page

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "a processor, 2 cores", "system": "Linux", "Python": "3.11", "torch": "2.14.1"}


def test_the_committed_page_is_what_the_measurements_say() -> None:
    text = page(Measurements(ROOT / "benchmarks" / "results"), EXPERIMENTS, SKIPPED)
    assert (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8") == text, "run: make results"


@pytest.fixture
def measured(tmp_path: Path) -> Measurements:
    (tmp_path / "results").mkdir()
    return Measurements(tmp_path / "results")


def write(measured: Measurements, name: str, **content: Any) -> None:
    content = {"date": "2026-01-01", "machine": MACHINE, **content}
    (measured.folder / f"{name}.json").write_text(json.dumps(content))


def write_strategies(measured: Measurements, **means: float) -> None:
    """Every variant at 60 % on both tasks, with a spread of a point over three seeds, but for ``task__variant``."""
    grid = read_grid("strategies")
    rows = []
    for run in expand(grid):
        mean = means.get(f"{run.task}__{run.variant.replace(' ', '_').replace('+', 'and')}", 0.6)
        row = {"task": run.task, "variant": run.variant, "seed": run.seed, "top1": mean + 0.01 * (run.seed - 1)}
        rows.append(row | {"parameters": 1000, "multiply_adds": 10**6, "cpu_seconds": 12.0})
    content = {"grid": {"baseline": grid.baseline}, "missing": [], "marks": {"probe": {"chance": 0.25}}, "rows": rows}
    write(measured, "strategies", **content)


OURS = "bilateral_and_adaptive"


def test_without_measurements_nothing_is_claimed(measured: Measurements) -> None:
    text = page(measured, EXPERIMENTS, SKIPPED)
    verdicts = [claim.find(measured).verdict for claim in claims.CLAIMS]
    assert verdicts.count(PENDING) == 8
    assert text.count(f"**{PENDING}**") == 8
    assert "Not measured yet" in text


def test_counts_and_identity_hold(measured: Measurements) -> None:
    for find in (claims._linear_cost, claims._sizes, claims._identity):
        assert find(measured).verdict == HOLDS


@pytest.mark.parametrize(
    ("ours", "static", "verdict"), [(0.95, 0.5, HOLDS), (0.7, 0.5, FAILS), (0.95, 0.9, FAILS), (0.5, 0.5, FAILS)]
)
def test_global_modelling(ours: float, static: float, verdict: str, measured: Measurements) -> None:
    write_strategies(measured, **{f"probe__{OURS}": ours, "probe__static": static})
    finding = claims._global(measured)
    assert finding.verdict == verdict
    assert f"WeightFormer {100 * ours:.1f} ± 1.0 %" in finding.measured


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, OPEN),
        ({f"probe__{OURS}": 0.9, f"fashion_mnist__{OURS}": 0.9}, HOLDS),
        ({f"probe__{OURS}": 0.9}, OPEN),
        ({"probe__linear_deep": 0.9}, FAILS),
    ],
)
def test_best_strategy(changes: dict[str, float], verdict: str, measured: Measurements) -> None:
    write_strategies(measured, **changes)
    assert claims._best_strategy(measured).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, OPEN),
        ({"probe__every_block": 0.5, "fashion_mnist__every_block": 0.5}, HOLDS),
        ({"probe__every_block": 0.5}, OPEN),
        ({"fashion_mnist__every_2nd_block": 0.7}, FAILS),
    ],
)
def test_frequency(changes: dict[str, float], verdict: str, measured: Measurements) -> None:
    write_strategies(measured, **changes)
    assert claims._frequency(measured).verdict == verdict


@pytest.mark.parametrize(
    ("ours", "verdict", "words"),
    [(0.9, HOLDS, "ahead of the static"), (0.6, FAILS, "not told apart from the static"), (0.3, FAILS, "behind the")],
)
def test_twins(ours: float, verdict: str, words: str, measured: Measurements) -> None:
    write_strategies(measured, **{f"fashion_mnist__{OURS}": ours})
    finding = claims._beats_twins(measured)
    assert finding.verdict == verdict
    assert words in finding.measured


def fields(**outside: float) -> list[dict[str, Any]]:
    shared = {"size": [140, 140], "images": 8, "reach": 42, "side_50": 30, "side_99": 120}
    names = ["bilateral + adaptive", "linear gap", "linear linear", "linear nonlinear", "linear deep", "DeiT twin"]
    shares = {**dict.fromkeys(names, 0.4), "static": 0.0, **outside}
    return [
        {"label": name, "weights": weights, "outside": share, **shared}
        for name, share in shares.items()
        for weights in ("random weights", "trained")
    ]


@pytest.mark.parametrize(("static", "deep", "verdicts"), [(0.0, 0.4, (HOLDS, FAILS)), (0.1, 0.1, (FAILS, HOLDS))])
def test_receptive_fields(static: float, deep: float, verdicts: tuple[str, str], measured: Measurements) -> None:
    write(measured, "erf_after", rows=fields(static=static, **{"linear deep": deep}))
    assert (claims._fields(measured).verdict, claims._deep_is_local(measured).verdict) == verdicts


@pytest.mark.parametrize(("every", "verdict"), [(0.9, FAILS), (0.7, HOLDS), (None, HOLDS)])
def test_stability(every: float | None, verdict: str, measured: Measurements) -> None:
    dynamics = {"loss": [[0, 2.0]], "ratio": [[0, 1.0]], "saturation": [], "rank": [], "grad": [[0, 1.0]]}
    shared = {"task": "fashion_mnist", "seed": 0, "parameters": 1, "multiply_adds": 1}
    shared["dynamics"] = {**dynamics, "warning": None}
    end = {"diverged": "the loss became nan"} if every is None else {"top1": every}
    rows = [{"variant": "released", "top1": 0.88, **shared}, {"variant": "every block", **end, **shared}]
    write(measured, "stability", rows=rows, grid={"baseline": "released"}, marks={}, missing=["a/b/1", "a/c/1"])
    assert claims._stability(measured).verdict == verdict
    assert "Still missing: 2 of 4 runs, a/b/1 the first." in page(measured, EXPERIMENTS, SKIPPED)
    assert "one epoch, one seed," in claims._stability(measured).on
    write(measured, "stability", rows=[*rows, {**rows[0], "seed": 1}], grid={"baseline": "released"}, marks={})
    assert "one epoch, 1 to 2 seeds," in claims._stability(measured).on


def test_speed_is_that_of_the_less_favourable_run_and_memory_that_of_its_own(measured: Measurements) -> None:
    def rows(case: str, *values: float, size: int = 1248) -> list[dict[str, Any]]:
        models = ("eager", "native", "deit-fused", "deit-explicit")
        return [
            {"case": case, "model": model, "size": size, "value": value}
            for model, value in zip(models, values, strict=True)
        ]

    write(measured, "cpu_t1248_1", rows=rows("throughput", 8.0, 9.0, 1.0, 0.5))
    write(measured, "cpu_t1248_2", rows=rows("throughput", 4.0, 9.0, 1.0, 0.5))
    assert claims._large(measured).verdict == PENDING
    write(measured, "cpu_memory", rows=rows("memory", 10.0, 5.0, 50.0, 100.0) + rows("memory", 1, 1, 1, 1, size=448))
    finding = claims._large(measured)
    assert (
        "eager: the throughput is 4.0 times that of fused attention and 8.0 times that of explicit" in finding.measured
    )
    assert "the memory 90% less than with explicit attention; native: the throughput is 9.0 times" in finding.measured
    assert "Intel" not in finding.measured
    write(measured, "cpu_intel_t1248_1", rows=rows("throughput", 3.0, 7.0, 1.0, 0.5))
    assert "(AMD Zen 5, the slowest of 2) and 3.0 times that of fused attention" in claims._large(measured).measured
    assert "explicit attention (Intel Xeon), the memory" in claims._large(measured).measured
    assert finding.verdict == OPEN  # the paper's hardware is another


def test_small_scale_results_stand_beside_what_is_not_testable(measured: Measurements) -> None:
    assert "AP" not in claims._scenes(measured).measured
    assert claims._generation(measured).measured == "not run at that scale"
    (measured.folder / "detection.csv").write_text("model,box_ap\nweightformer,0.61\nstatic,0.55\ndeit,0.5\n")
    (measured.folder / "segmentation.csv").write_text("model,miou\nweightformer,0.81\nstatic,0.75\ndeit,0.7\n")
    (measured.folder / "generation.csv").write_text("model,guidance,fid\nweightformer,2,1.5\ndit,2,2.5\n")
    scenes, generation = claims._scenes(measured), claims._generation(measured)
    assert "box AP on fashion scenes 61.0, static twin 55.0, DeiT twin 50.0" in scenes.measured
    assert "mIoU on fashion scenes 81.0, static twin 75.0, DeiT twin 70.0" in scenes.measured
    assert "FID 1.50 against DiT's 2.50" in generation.measured
    assert scenes.verdict == generation.verdict == OPEN


def test_the_page_shows_tables_figures_machine_and_commands(measured: Measurements, tmp_path: Path) -> None:
    write_strategies(measured, **{f"probe__{OURS}": 0.95, "probe__static": 0.5})
    write(measured, "erf_after", rows=fields())
    docs = tmp_path / "docs"
    assert main(["--report_only", "--results", str(measured.folder), "--docs", str(docs)]) == 0
    text = (docs / "index.md").read_text()
    for part in (
        "| probe | bilateral + adaptive | 95.00 ± 1.00 | 3 | +45.00 | < 0.001 * |",
        "](strategies-probe.svg)",
        "](strategies-fashion-mnist.svg)",
        "a processor, 2 cores",
        "torch 2.14.1",
        "2026-01-01",
        "`weightformer ablate strategies --workers 2`",
        "| static | trained | 140 × 140 px | 0.00% | 30 px | 120 px |",
    ):
        assert part in text, part
    figures = {path.name for path in docs.glob("*.svg")}
    assert figures == {"strategies-probe.svg", "strategies-fashion-mnist.svg"}
    assert all(skipped.name in text for skipped in SKIPPED)


def test_a_page_is_not_overwritten_for_want_of_measurements(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("results of hours")
    with pytest.raises(SystemExit):
        main(["--report_only", "--results", str(tmp_path / "resluts"), "--docs", str(tmp_path)])
    assert (tmp_path / "index.md").read_text() == "results of hours"
    assert not (tmp_path / "resluts").exists()


def test_the_commands_of_receptive_fields_can_be_typed() -> None:
    for experiment in EXPERIMENTS:
        if experiment.name == "erf_before":
            specs = shlex.split(experiment.command)[2:-4]
            assert len(specs) == 10
            assert [label for label, _, _ in map(_parse, specs)][-2:] == ["static", "DeiT"]
