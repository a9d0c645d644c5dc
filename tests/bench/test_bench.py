"""The benchmark on the micro model: parity before timing, cells instead of crashes, results that add up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightformer.bench import BenchConfig, main, memory, parity, report, runner
from weightformer.bench.cases import CASES, inference_step
from weightformer.bench.contenders import Contender, resolve

MICRO = {"variant": "weightformer_micro", "rounds": 2, "sample_seconds": 0.001, "batch": 1, "sizes": [32]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("bench")
    cases = ["throughput", "latency", "training", "memory"]
    models = ["reference", "eager", "released"]
    config = BenchConfig(**MICRO | {"cases": cases, "models": models, "sizes": [32, 48], "output": str(folder)})
    results = main(config)
    return results | {"folder": folder}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["eager", "released"])
def test_contenders_equal_the_reference(name: str, training: bool) -> None:
    contender = resolve(name, "weightformer_micro")
    result = parity.check(contender, 20, torch.device("cpu"), torch.float32, training=training)
    assert result.ok, result
    assert result.output is not None
    assert (result.gradient is not None) == training


def test_the_parity_check_sees_the_predicted_weights() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = resolve("reference", "weightformer_micro").build(20)
            for block in self.model.blocks:
                if block.dynamic:
                    nn.init.zeros_(block.fc1.w1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    blind = Contender("blind", lambda size: Blind(), twin=resolve("reference", "weightformer_micro"))
    assert not parity.check(blind, 20, torch.device("cpu"), torch.float32, training=False).ok


def test_every_cell_is_there_and_adds_up(results: dict) -> None:
    rows = results["rows"]
    assert len(rows) == 4 * 3 * 2
    assert all(row["status"] == "ok" and row["value"] > 0 for row in rows if row["case"] != "memory")
    for row in rows:
        if "seconds" in row:
            assert row["value"] == CASES[row["case"]].value(row["seconds"], row["batch"])
            assert row["p10"] <= row["value"] <= row["p90"]
    gflop = {row["size"]: row["gflop"] for row in rows}
    assert gflop[48] / gflop[32] == pytest.approx((48 / 32) ** 2, rel=0.1)
    assert len({row["gflop"] for row in rows if row["size"] == 32}) == 1  # whatever form runs


def test_the_files_are_complete_and_self_contained(results: dict) -> None:
    page = (results["folder"] / "report.html").read_text()
    assert "<svg" in page
    assert "slope" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    stored = json.loads((results["folder"] / "results.json").read_text())
    assert stored["rows"] == results["rows"]
    assert {"processor", "threads", "torch", "timm", "tf32", "layout"} <= stored["machine"].keys()


def test_nothing_is_timed_on_a_red_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner.parity, "check", lambda *_, **__: parity.Parity(1e-3, None, 1e-5))
    monkeypatch.setattr(runner, "_time", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"parity is red, nothing is timed: eager in torch\.float32"):
        main(BenchConfig(**MICRO | {"models": ["eager"], "output": str(tmp_path)}))


def test_out_of_memory_is_a_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def step(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(runner, "inference_step", step)
    results = main(BenchConfig(**MICRO | {"models": ["eager"], "output": str(tmp_path)}))
    assert [row["status"] for row in results["rows"]] == ["out of memory"]


def test_an_allocation_that_cannot_fit_raises() -> None:
    with memory.address_space_limit(torch.device("cpu")), pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(2**44)
    torch.empty(1)


HOG = """
import time, torch

class Hog(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        first = torch.ones(x.shape[-1] * 50_000)
        both = first.sum() + torch.ones(x.shape[-1] * 50_000).sum()
        del first
        return (both + torch.ones(x.shape[-1] * 50_000).sum()) * self.p.view(1, 1)

class Slow(Hog):
    def forward(self, x):
        time.sleep(60)
"""


def test_memory_counts_what_a_step_allocates(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(HOG)
    spec = {"variant": "weightformer_micro", "batch": 1, "dtype": "float32", "device": "cpu", "training": False}
    peak = memory.peak(name=f"{tmp_path / 'peer.py'}:Hog", size=200, threads=1, **spec)
    assert 75 < peak.process < 95  # twice 10 million floats
    assert peak.tensors == pytest.approx(80, abs=0.01)


@pytest.mark.parametrize("size", [80, 512])
def test_the_bytes_of_tensors_are_the_same_in_every_run(size: int) -> None:
    contender = resolve("eager", "weightformer_micro")
    step = inference_step(contender.load(size, torch.device("cpu"), torch.float32), torch.zeros(1, 3, size, size))
    first = memory.tensor_bytes(step)
    assert first == memory.tensor_bytes(step)
    tokens = 4 * 64 * (size // 4) ** 2
    assert 2 * tokens < first < (4 if size == 80 else 2.5) * tokens + 2**20


def test_a_process_that_takes_too_long_is_a_cell_and_larger_sizes_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "peer.py").write_text(HOG)
    limits = []

    def hasty(timeout: float, **spec: object) -> memory.Peak:
        limits.append(timeout)
        return memory.peak(timeout=0.5, **spec)

    monkeypatch.setattr(runner, "peak", hasty)
    monkeypatch.setattr(runner, "_gigaflops", lambda *_: 0.0)
    slow = {"models": [], "peer": [f"{tmp_path / 'peer.py'}:Slow"], "cases": ["memory"], "sizes": [32, 48]}
    results = main(BenchConfig(**MICRO | slow | {"output": str(tmp_path), "step_limit": 2.0}))
    first, second = (row["status"] for row in results["rows"])
    assert first.startswith("skipped:")
    assert "took longer than" in first
    assert second == "skipped: a smaller size took too long"
    assert limits == [68]


def test_an_interrupted_run_keeps_and_continues_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = MICRO | {"models": ["eager"], "sizes": [32, 48, 64], "output": str(tmp_path)}
    measure = runner._time

    def killed(case: str, contenders: list, size: int, *rest: Any) -> list:
        if size == 64:
            raise KeyboardInterrupt
        return measure(case, contenders, size, *rest)

    monkeypatch.setattr(runner, "_time", killed)
    with pytest.raises(KeyboardInterrupt):
        main(BenchConfig(**config))
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [row["size"] for row in kept["rows"]] == [32, 48]
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("*.partial"))

    measured: list[int] = []
    monkeypatch.setattr(runner, "_time", lambda *a: measured.append(a[2]) or measure(*a))
    rows = main(BenchConfig(**config))["rows"]
    assert measured == [64]
    assert rows[:2] == kept["rows"]
    main(BenchConfig(**config))  # finished, so measured anew
    assert measured == [64, 32, 48, 64]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"rows": 1, "finished": false}'])
def test_a_file_of_something_else_is_no_interrupted_run(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    assert runner._interrupted_rows({"config": {}, "machine": {}}, tmp_path) == []


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    earlier = {"config": {"batch": 1}, "machine": {"torch": "2", "load": 1}, "finished": False, "rows": [{"size": 32}]}
    (tmp_path / "results.json").write_text(json.dumps(earlier))
    now = {"config": {"batch": 1}, "machine": {"torch": "2", "load": 9}}
    assert runner._interrupted_rows(now, tmp_path) == [{"size": 32}]
    assert runner._interrupted_rows(now | {"config": {"batch": 2}}, tmp_path) == []
    assert runner._interrupted_rows(now | {"machine": {"torch": "3", "load": 1}}, tmp_path) == []


def test_a_file_is_replaced_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, results: dict, tmp_path: Path) -> None:
    results = {key: value for key, value in results.items() if key != "folder"}
    report.write(results, tmp_path)
    before = (tmp_path / "results.json").read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        report.write(results | {"rows": results["rows"][:1]}, tmp_path)
    assert (tmp_path / "results.json").read_text() == before


def test_slow_models_are_skipped_where_they_would_take_too_long() -> None:
    earlier = [{"case": "throughput", "model": "deit-explicit", "ours": False, "size": 224, "seconds": 1.0}]
    assert runner._expected_seconds("throughput", "deit-explicit", 448, earlier) == 16
    assert runner._expected_seconds("throughput", "deit-explicit", 224, earlier) == 0


@pytest.mark.parametrize(("power", "expected"), [(1, 1.0), (2, 2.0)])
def test_slope(power: float, expected: float) -> None:
    assert report.slope([(x, 3 * x**power) for x in (10.0, 40.0, 90.0)]) == pytest.approx(expected)


def test_affine_fit() -> None:
    pixels = [448.0**2, 1024.0**2, 4096.0**2]
    fixed, growth, error = report.affine([(x, 3 + 2e-5 * x) for x in pixels])
    assert (fixed, growth, error) == pytest.approx((3, 2e-5, 0), abs=1e-9)
    assert report.affine([(x, x**1.5) for x in pixels])[2] > 0.2
    curves = {"ours": [(x, 3 + 2e-5 * x) for x in pixels], "other": [(x, x**1.5) for x in pixels]}
    assert report._affine_fits(curves) == "ours 3.0 + 20.0 (0%), other no line"


def test_peers_by_path_and_names_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(
        "import torch\ndef with_size(size): return torch.nn.Linear(size, 1)\n"
        "def without(): return torch.nn.Identity()\n"
    )
    assert resolve(f"{tmp_path / 'peer.py'}:with_size", "").build(7).in_features == 7
    assert isinstance(resolve(f"{tmp_path / 'peer.py'}:without", "").build(7), nn.Identity)
    with pytest.raises(ValueError, match="has no 'other'"):
        resolve(f"{tmp_path / 'peer.py'}:other", "")
    with pytest.raises(FileNotFoundError, match=r"no file /nowhere\.py"):
        resolve("/nowhere.py:factory", "")
    with pytest.raises(ValueError, match="unknown model 'deit-fuse' to measure; choose one of reference, eager"):
        resolve("deit-fuse", "")


def test_explicit_and_fused_attention_are_twins() -> None:
    explicit = resolve("deit-explicit", "").build(32)
    fused = resolve("deit-fused", "").build(32)
    assert not any(block.attn.fused_attn for block in explicit.blocks)
    assert all(block.attn.fused_attn for block in fused.blocks)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"cases": ["speed"]}, "unknown case 'speed'"), ({"precision": "int8"}, "precision"), ({"rounds": 0}, "positive")],
)
def test_configuration_errors(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**wrong)
