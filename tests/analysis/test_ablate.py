"""A grid expands to ordinary training commands, resumes, and its table says what the differences are worth."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import ttest_ind

from weightformer.analysis.ablate import (
    GridConfig,
    ablate,
    execute,
    expand,
    grids,
    read_grid,
    significance_note,
    summarise,
    table,
    training_cost,
)
from weightformer.cli import main
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.tasks.classification import Config
from weightformer.tasks.classification.module import build_model

SMALL = {
    "recipe": "digits",
    "model": {"kwargs": {"embed_dim": 16, "depth": 2}},
    "data": {"image_size": 16, "pad_crop": 1, "batch_size": 128},
    "optim": {"warmup_epochs": 0.2},
    "trainer": {"epochs": 1, "val_every": 1, "log_every": 1, "accelerator": "cpu"},
}
VARIANTS: dict[str, Any] = {
    "released": {},
    "static": {"model": {"kwargs": {"dynamic_every": 0}}},
    "DeiT twin": {"model": {"name": "deit_tiny_patch16_224", "kwargs": {"patch_size": 4, "num_heads": 2}}},
    "runs away": {"optim": {"lr": 1e30, "clip_norm": 0.0}},
}


def grid(folder: Path, **changes: Any) -> GridConfig:
    content = {"output": str(folder), "seeds": [0, 1], "tasks": {"digits": SMALL}, "variants": VARIANTS}
    return parse_config(GridConfig, content | changes)


# Expansion


@pytest.mark.parametrize("name", grids())
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_grids_are_valid(name: str, quick: bool) -> None:
    if quick and name == "imagenet":
        with pytest.raises(ValueError, match="imagenet has no `quick` part"):
            read_grid(name, quick=True)
        return
    content = read_grid(name, quick=quick)
    runs = expand(content)
    assert len({run.content["output"] for run in runs}) == len(runs)
    assert len(runs) == len(content.seeds) * len(content.tasks) * len(content.variants)
    assert content.output == f"runs/{name}" + ("_quick" if quick else "")


def test_the_strategies_grid_holds_what_the_paper_compares() -> None:
    runs = expand(read_grid("strategies"), "probe/*/0")
    kwargs = [run.content["model"]["kwargs"] for run in runs]
    assert {k.get("dynamic_every", 3) for k in kwargs} == {0, 1, 2, 3, 4, 6}
    assert {k.get("linear_predictor") for k in kwargs} == {None, "gap", "linear", "nonlinear", "deep"}
    assert {k.get("conv_predictor") for k in kwargs} == {None, "gap", "amp_dir", "conv"}
    assert all(k["depth"] <= 6 for k in kwargs), "deeper static twins see two items at once"


@pytest.mark.parametrize("quick", [False, True])
def test_twins_have_the_same_tokens_width_and_depth(quick: bool) -> None:
    """A ViT's default patch of 16 px would leave it four tokens of an image of 28 px."""
    sizes: dict[str, set[tuple[Any, ...]]] = {}
    for run in expand(read_grid("strategies", quick=quick), "*/0"):
        config = parse_config(Config, run.content)
        model: Any = build_model(config.model, 10, config.data.image_size)
        size = (model.patch_embed.proj.kernel_size, model.embed_dim, len(model.blocks))
        sizes.setdefault(run.task, set()).add(size)
    assert sizes
    assert all(len(found) == 1 for found in sizes.values()), sizes


@pytest.mark.parametrize("name", grids())
def test_the_commands_are_the_runs(name: str) -> None:
    for run in expand(read_grid(name), "*/0"):
        verb, option, recipe, *rest = shlex.split(run.command)[1:]
        assert (verb, option) == ("train", "--config")
        typed = parse_config(Config, read_yaml(recipe_path(recipe)), rest)
        assert typed == parse_config(Config, run.content), run.name


def test_merging_reaches_into_kwargs_and_leaves_the_grid_alone(tmp_path: Path) -> None:
    runs = {run.variant: run.content for run in expand(grid(tmp_path), "*/0")}
    assert runs["static"]["model"]["kwargs"] == {"embed_dim": 16, "depth": 2, "dynamic_every": 0}
    assert runs["released"]["model"]["kwargs"] == {"embed_dim": 16, "depth": 2}
    assert runs["released"]["optim"]["lr"] == 4e-3  # the recipe's


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"variants": {"a": {"optim": {"learning": 1}}}}, "digits/a: unknown key 'optim.learning'"),
        ({"tasks": {"digits": {"model": {}}}}, "names no recipe"),
        ({"tasks": {"digits": {"recipe": "digitz"}}}, "no recipe of that name"),
        ({"baseline": "nothing"}, "baseline 'nothing' is no variant"),
        ({"seeds": [1, 1]}, "seeds must differ"),
        ({"variants": {}}, "needs tasks, variants and seeds"),
        ({"variantz": {}}, "did you mean variants"),
        ({"variants": {"a+b": {}, "a b": {}}}, "variants 'a\\+b' and 'a b' would share the folder 'a-b'; rename one"),
        ({"tasks": {"β": SMALL}}, "task 'β' cannot name a folder"),
        ({"variants": {0: {}}}, "variant 0 cannot name a folder; give it a name .* in quotes"),
    ],
)
def test_mistakes_are_found_before_anything_runs(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        ablate(grid(tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_pattern_without_runs_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no run of the grid matches 'probe/\*'; they are named like 'digits/released/0'"
    ):
        expand(grid(tmp_path), "probe/*")


# Running


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of eight runs on the digits, the first half of them by two workers."""
    folder = tmp_path_factory.mktemp("grid")
    content = {"output": str(folder / "out"), "seeds": [0, 1], "tasks": {"digits": SMALL}, "variants": VARIANTS}
    (folder / "grid.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert main(["ablate", str(folder / "grid.yaml"), "--only", "*/0", "--workers", "2"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")}
    assert len(before) == 4
    assert len(json.loads((folder / "out" / "results.json").read_text())["missing"]) == 4
    assert main(["ablate", str(folder / "grid.yaml")]) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), "a finished run was run again"
    return folder / "out"


def test_results_of_a_grid(finished: Path) -> None:
    content = json.loads((finished / "results.json").read_text())
    assert content["missing"] == []
    assert {"processor", "torch", "Python"} <= content["machine"].keys()
    rows = {(row["variant"], row["seed"]): row for row in content["rows"]}
    assert len(rows) == 8
    assert 0.1 < rows["released", 0]["top1"] <= 1
    assert rows["released", 0]["dynamic_blocks"] == 1
    assert rows["static", 0]["dynamic_blocks"] == rows["DeiT twin", 0]["dynamic_blocks"] == 0
    assert rows["static", 0]["parameters"] < rows["released", 0]["parameters"]
    assert rows["released", 1]["steps"] == 11
    assert 0 < rows["released", 1]["cpu_seconds"] < 600
    for seed in (0, 1):
        assert "not finite" in rows["runs away", seed]["diverged"] or "became" in rows["runs away", seed]["diverged"]
        assert "top1" not in rows["runs away", seed]
    text = (finished / "table.md").read_text()
    assert "2 diverged" in text
    assert "Two seeds a variant is little" in text
    assert "<svg" in (finished / "digits.svg").read_text()
    assert "epoch 1/1" in (finished / "digits" / "static" / "1" / "console.log").read_text()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for the workers in Linux's /proc")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """They would go on in folders that the same command, started again, writes to."""
    endless = {**SMALL, "trainer": {**SMALL["trainer"], "epochs": 10_000}}
    content = {"output": str(tmp_path / "out"), "tasks": {"digits": endless}, "variants": {"released": {}}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "weightformer", "ablate", str(tmp_path / "grid.yaml"), "--workers", "2"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(tmp_path.rglob("log.jsonl"))) == 2)
        workers = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(workers) >= 2
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers))


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def test_a_run_with_other_settings_is_not_overwritten(finished: Path) -> None:
    changed = {**SMALL, "optim": {"warmup_epochs": 0.3}}
    with pytest.raises(ValueError, match="holds a run with other settings"):
        ablate(grid(finished, tasks={"digits": changed}))


def test_a_failure_leaves_the_other_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "output": str(tmp_path / "out"),
        "seeds": [0],
        "tasks": {"digits": SMALL},
        "variants": {"no such model": {"model": {"name": "weightformer_macro"}}, "released": {}},
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert main(["ablate", str(tmp_path / "grid.yaml")]) == 1
    assert "failed: digits/no such model/0: timm knows no model" in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["released"]


def test_list_prints_commands_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "--quick", "--list", "--seeds", "[3]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert all("--config digits" in line and "--seed 3" in line for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, -1])
def test_no_worker_is_a_mistake(workers: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--workers must be at least 1, got {workers}"):
        ablate(grid(tmp_path / "out"), workers=workers)


def test_a_damaged_result_is_named_before_anything_runs(tmp_path: Path) -> None:
    damaged = tmp_path / "digits" / "static" / "1" / "result.json"
    damaged.parent.mkdir(parents=True)
    for content in ('{"task": "dig', "[]", "{}"):
        damaged.write_text(content)
        with pytest.raises(ValueError, match=r"static/1/result\.json is damaged; delete it"):
            ablate(grid(tmp_path), only="digits/released/0")
    assert not (tmp_path / "digits" / "released").exists()


def test_rows_beside_those_that_are_run_are_of_the_same_settings(finished: Path) -> None:
    """The table shows all of them."""
    changed = {**VARIANTS, "static": {"model": {"kwargs": {"dynamic_every": 2}}}}
    with pytest.raises(ValueError, match="static/0 holds a run with other settings"):
        ablate(grid(finished, variants=changed), only="digits/released/0")


def test_whatever_a_model_raises_stays_its_own(tmp_path: Path) -> None:
    """timm refuses sizes by assertions."""
    unfit = {"model": {"name": "test_vit", "kwargs": {"patch_size": 7, "embed_dim": 48, "depth": 1}}}
    for run in expand(grid(tmp_path, variants={"unfit": unfit}, seeds=[0])):
        assert "AssertionError: " in execute(run)["error"]
        assert not (tmp_path / "digits" / "unfit" / "0" / "result.json").exists()


def test_a_killed_worker_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightformer.analysis.ablate._prepare_worker", os.abort)
    with pytest.raises(ChildProcessError, match=r"a worker was killed.*the same command goes on"):
        ablate(grid(tmp_path / "out"), workers=2)


# Cost, spread and significance


def test_steps_that_a_resumption_repeated_are_counted_once(tmp_path: Path) -> None:
    records = [
        {"event": "start", "cpu": 3.0},
        *({"cpu": 5.0 + 2 * i, "step": 10 * i + 9, "train/loss_step": 1.0} for i in range(4)),  # 0.2 s a step
        {"event": "start", "cpu": 1.0},
        *({"cpu": 4.0 + 2 * i, "step": 10 * i + 29, "train/loss_step": 1.0} for i in range(3)),  # from step 20 on
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert training_cost(tmp_path / "log.jsonl") == {"steps": 50, "cpu_seconds": pytest.approx(10.0)}
    (tmp_path / "log.jsonl").write_text(json.dumps(records[1]))
    assert training_cost(tmp_path / "log.jsonl") == {"steps": 10}
    (tmp_path / "log.jsonl").write_text(json.dumps(records[1]) + '\n{"time": 1')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2, is damaged; delete that line"):
        training_cost(tmp_path / "log.jsonl")


def row(variant: str, seed: int, top1: float | None, task: str = "t") -> dict[str, Any]:
    end = {"diverged": "the loss became nan"} if top1 is None else {"top1": top1}
    return {"task": task, "variant": variant, "seed": seed, "parameters": 10, "multiply_adds": 2_000_000, **end}


VALUES = {"base": [0.5, 0.52, 0.51], "far": [0.9, 0.91, 0.92], "near": [0.52, 0.53, 0.54], "same": [0.5, 0.52, 0.51]}


def test_summaries_are_welch_and_holm() -> None:
    rows = [row(name, seed, value) for name, values in VALUES.items() for seed, value in enumerate(values)]
    found = {s.variant: s for s in summarise(rows, "base")}
    assert found["base"].p is None
    assert found["base"].difference is None
    for name in ("far", "near", "same"):
        expected = ttest_ind(VALUES[name], VALUES["base"], equal_var=False).pvalue
        assert found[name].p == pytest.approx(expected)
    assert found["far"].difference == pytest.approx(0.4)
    assert found["far"].sd == pytest.approx(0.01)
    # near alone would reach 7 %; far survives the correction for three comparisons
    assert [found[name].significant for name in ("far", "near", "same")] == [True, False, False]


def test_holm_counts_the_comparisons() -> None:
    rows = [row(name, seed, value) for name, values in VALUES.items() for seed, value in enumerate(values)]
    close = [0.532, 0.542, 0.552]  # p = 1.7 % alone, 5.2 % among three
    rows += [row("close", seed, value) for seed, value in enumerate(close)]
    alone = [r for r in rows if r["variant"] in ("base", "close")]
    p = ttest_ind(close, VALUES["base"], equal_var=False).pvalue
    assert 0.05 / 3 < p < 0.05
    assert {s.variant: s.significant for s in summarise(alone, "base")}["close"]
    assert not {s.variant: s.significant for s in summarise(rows, "base")}["close"]


def test_single_seeds_diverged_and_equal_ones() -> None:
    rows = [row("base", 0, 0.5), row("one", 0, 0.6), row("gone", 0, None)]
    found = {s.variant: s for s in summarise(rows, "base")}
    assert found["one"].p is None
    assert math.isnan(found["one"].sd)
    assert math.isnan(found["gone"].mean)
    assert found["gone"].diverged == 1
    equal = [row(name, seed, value) for name, value in (("base", 0.5), ("b", 0.5), ("c", 0.6)) for seed in (0, 1)]
    assert [s.p for s in summarise(equal, "base")] == [None, 1.0, 0.0]
    text = table(summarise(rows, "base"))
    assert "| t | gone | – | 0, 1 diverged |  |  | 10 | 2.00 M |  |" in text
    assert "| t | one | 60.00 | 1 | +10.00 |" in text


def test_the_note_says_how_weak_three_seeds_are() -> None:
    rows = [row(name, seed, value) for name in ("base", "far") for seed, value in enumerate(VALUES[name])]
    note = significance_note(summarise(rows, "base"))
    assert "Three seeds a variant is little" in note
    assert "pooled standard deviation 1.00 points) 2.27" in note  # t(4) at 97.5 % times sqrt(2 / 3)
