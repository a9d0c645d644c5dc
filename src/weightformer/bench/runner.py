"""Measure: parity first, then every model in interleaved rounds."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import weightformer
from weightformer.analysis.flops import multiply_adds
from weightformer.bench import parity, report
from weightformer.bench.cases import CASES, Case, captured, inference_step, training_step
from weightformer.bench.contenders import OURS, Contender, resolve
from weightformer.bench.memory import address_space_limit, peak

__all__ = ["BenchConfig", "main"]

_WARMUP = 2
_PARITY_SIZE = 80  # five tokens a side: an odd grid, which every pooling has to round


@dataclass
class BenchConfig:
    """What to measure, of which models, how."""

    variant: str = "weightformer_tiny"
    """Which of our models the names of our implementations stand for."""
    models: list[str] = field(default_factory=lambda: ["eager", "released", "deit-fused", "deit-explicit"])
    """Ours (reference, eager, native, triton, auto, compiled, released), deit-fused, deit-explicit, pvtv2, convnext, or
    any timm model."""
    peer: list[str] = field(default_factory=list)
    """Other implementations, each as PATH:factory."""
    cases: list[str] = field(default_factory=lambda: ["throughput"])
    """throughput, latency (batch 1), training, memory, training-memory."""
    sizes: list[int] = field(default_factory=lambda: [224])
    """Image sides in pixels."""
    batch: int = 8
    """Images a step, at every size."""
    precision: str = "float32"
    """float32, bfloat16 or float16: of weights and input alike."""
    device: str = "cpu"
    """cpu, cuda, cuda:1 and so on."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    rounds: int = 7
    """Samples a model and size; the models take turns in every round."""
    sample_seconds: float = 0.2
    """A sample repeats the step until it lasts this long."""
    step_limit: float = 60.0
    """Skip a model at a size where a step is expected to take longer, in seconds; a memory case, whose process loads
    the model and takes several steps, is given up after four times this plus a minute, and skipped at larger sizes."""
    graphs: bool = False
    """On a GPU, replay every step of every model as a CUDA graph: the kernels' own time, without Python's launches."""
    output: str = "runs/bench"
    """Folder for results.json and report.html, written after every case and size. The same configuration on the same
    machine continues what was interrupted there; a finished run is measured anew."""

    def __post_init__(self) -> None:
        for case in self.cases:
            if case not in CASES:
                raise ValueError(f"unknown case {case!r}; choose from {', '.join(CASES)}")
        if self.precision not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"precision must be float32, bfloat16 or float16, got {self.precision!r}")
        if min(self.rounds, self.batch, *self.sizes) < 1:
            raise ValueError("rounds, batch and sizes must be positive")


def main(config: BenchConfig) -> dict[str, Any]:
    """Check parity, measure, print the table and write results.json and report.html; returns what was written.

    Both files are written after every case and size, so that a run that is killed loses only what it was measuring.

    Raises:
        ValueError: a name that cannot be resolved, or a red parity check: nothing is timed then.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.precision)
    if config.threads:
        torch.set_num_threads(config.threads)
    contenders = [resolve(name, config.variant) for name in [*config.models, *config.peer]]
    results: dict[str, Any] = {
        "config": asdict(config),
        "machine": _machine(device),
        "finished": False,
        "parity": {},
        "flops_unit": "GFLOP an image, 2 per multiply-add, counted on the formula",
        "rows": [],
    }
    results["rows"] = rows = _interrupted_rows(results, Path(config.output))
    done = {(row["case"], row["size"]) for row in rows}
    with _exact_float32():
        results["parity"] = _check(contenders, config, device, dtype)
        for name in config.cases:
            measure = _memory if CASES[name].value is None else _time
            for size in sorted(config.sizes):
                if (name, size) not in done:
                    rows += measure(name, contenders, size, config, rows)
                    results["machine"] = _machine(device)
                    report.write(results, Path(config.output))
    results["finished"] = True
    report.show(results)
    report.write(results, Path(config.output))
    return results


def _interrupted_rows(results: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows that an interrupted run of the same configuration on the same machine left in the folder."""

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a["config"] == b["config"] and {**a["machine"], "load": 0} == {**b["machine"], "load": 0}

    try:
        earlier = json.loads((folder / "results.json").read_text())
        return earlier["rows"] if not earlier["finished"] and same(earlier, results) else []
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none there, or the file of something else
        return []


def _check(
    contenders: list[Contender], config: BenchConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, float | None]]:
    training = any(CASES[case].training for case in config.cases)
    checks, red = {}, []
    for contender in contenders:
        for precision in {torch.float32, dtype}:
            result = parity.check(contender, _PARITY_SIZE, device, precision, training=training)
            checks[f"{contender.name} {precision}".replace("torch.", "")] = asdict(result)
            if not result.ok:
                red.append(f"{contender.name} in {precision}: {result}")
    if red:
        raise ValueError("parity is red, nothing is timed: " + "; ".join(red))
    return checks


def _time(
    case_name: str, contenders: list[Contender], size: int, config: BenchConfig, earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    case = CASES[case_name]
    device, dtype = torch.device(config.device), getattr(torch, config.precision)
    batch = case.batch or config.batch
    rows = {c.name: _row(case_name, c, size, batch) for c in contenders}
    running: dict[str, tuple[Contender, Callable[[], None], int]] = {}
    with address_space_limit(device):
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        for contender in contenders:
            expected = _expected_seconds(case_name, contender.name, size, earlier)
            if expected > config.step_limit:
                rows[contender.name]["status"] = f"skipped: about {expected:.0f} s a step"
                continue
            with _out_of_memory_is_a_cell(rows[contender.name]):
                model = contender.load(size, device, dtype)
                step = (training_step if case.training else inference_step)(model, images)
                if config.graphs and device.type == "cuda":
                    with contender.active():
                        step = captured(step)
                seconds = min(_seconds(contender, step, 1, device) for _ in range(_WARMUP))
                running[contender.name] = (contender, step, max(1, round(config.sample_seconds / seconds)))
        samples: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(config.rounds):
            for name, (contender, step, repeats) in running.items():
                with _out_of_memory_is_a_cell(rows[name]):
                    samples[name].append(_seconds(contender, step, repeats, device))
    for name, values in samples.items():
        if len(values) == config.rounds:
            rows[name].update(_summary(case, values, batch))
    return list(rows.values())


def _memory(
    case_name: str, contenders: list[Contender], size: int, config: BenchConfig, earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    skipped = {r["model"] for r in earlier if r["case"] == case_name and r["status"].startswith("skipped")}
    for contender in contenders:
        row = _row(case_name, contender, size, config.batch)
        rows.append(row)
        if contender.name in skipped:
            row["status"] = "skipped: a smaller size took too long"
            continue
        with _out_of_memory_is_a_cell(row):
            found = peak(
                name=contender.name,
                variant=config.variant,
                size=size,
                batch=config.batch,
                dtype=config.precision,
                device=config.device,
                training=CASES[case_name].training,
                threads=torch.get_num_threads(),
                timeout=60 + 4 * config.step_limit,
            )
            row.update(status="ok", value=found.process, tensors=found.tensors)
    return rows


def _row(case: str, contender: Contender, size: int, batch: int) -> dict[str, Any]:
    ours = contender.name in OURS
    return {
        "case": case,
        "model": contender.name,
        "ours": ours and contender.name != "released",
        "size": size,
        "batch": batch,
        "gflop": _gigaflops(contender, size),
        "status": "not run",
        "unit": CASES[case].unit,
    }


def _gigaflops(contender: Contender, size: int) -> float:
    with sdpa_kernel(SDPBackend.MATH):  # attention as its two products, whatever kernel runs it
        return 2e-9 * multiply_adds(contender.build(size), 3, size, size)


def _summary(case: Case, seconds: list[float], batch: int) -> dict[str, Any]:
    assert case.value is not None
    deciles = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    values = [case.value(s, batch) for s in (statistics.median(seconds), deciles[0], deciles[-1])]
    return {
        "status": "ok",
        "value": values[0],
        "p10": min(values[1:]),
        "p90": max(values[1:]),
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "samples": len(seconds),
    }


def _seconds(contender: Contender, step: Callable[[], None], repeats: int, device: torch.device) -> float:
    with contender.active():
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        _synchronize(device)
        return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _expected_seconds(case: str, model: str, size: int, earlier: list[dict[str, Any]]) -> float:
    """The last smaller size's time, scaled as attention would: an upper bound for what is linear."""
    known = [r for r in earlier if r["case"] == case and r["model"] == model and r["size"] < size and "seconds" in r]
    if not known:
        return 0.0
    last = max(known, key=lambda row: row["size"])
    power = 2 if last["ours"] or model == "released" else 4
    return last["seconds"] * (size / last["size"]) ** power


@contextlib.contextmanager
def _out_of_memory_is_a_cell(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        row["status"] = "out of memory"
    except TimeoutError as error:
        row["status"] = f"skipped: {error}"
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        row["status"] = "out of memory"


@contextlib.contextmanager
def _exact_float32() -> Iterator[None]:
    """No TF32, for all models alike."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.release()}",
        "layout": "images channels-first, contiguous",
        "tf32": False,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "weightformer": weightformer.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [
            line for line in info.read_text().splitlines() if line.startswith(("model name", "cpu family", "model\t"))
        ]
        return ", ".join(" ".join(line.split()) for line in dict.fromkeys(lines))
    return platform.processor()
