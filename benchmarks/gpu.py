"""Speed of one GPU: each kernel beside the measured copy bandwidth, then whole models. Run by gpu.sh, after parity."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightformer import ops
from weightformer.bench import BenchConfig
from weightformer.bench import main as bench
from weightformer.ops.depthwise_norm.triton import _op_backward as depthwise_norm_backward
from weightformer.ops.dynamic_linear.triton import gram, predicted_weight
from weightformer.ops.mlp.triton import _hidden

MODELS = ["auto", "eager", "released", "deit-fused", "deit-explicit"]


@dataclass(frozen=True)
class Kernel:
    """One call, the bytes it must move (inputs read once, outputs written once) and its floating-point operations."""

    name: str
    call: Callable[[], Any]
    bytes: int
    flops: int


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def kernels(batch: int, side: int, c: int, device: str) -> Iterator[Kernel]:
    """The kernels of one dynamic and one static block in bfloat16, on ``side`` x ``side`` tokens."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    o, r, tokens, pooled = 4 * c, c // 4, side * side, (side // 2) ** 2
    x, vector = draw(batch, side, side, c), draw(c)
    static, per_image = draw(c, 3, 3), draw(batch, 3, 3, c).movedim(-1, -3)
    norm = vector, vector, vector, 1e-6
    for name, kernel in (("depthwise + norm, static", static), ("depthwise + norm, per image", per_image)):
        call = partial(ops.depthwise_norm, x, kernel, *norm)
        yield Kernel(name, call, 3 * size(x) + size(kernel), 2 * 9 * x.numel())
    call = partial(depthwise_norm_backward, x, x, x, per_image, x, vector, 1e-6)
    yield Kernel("depthwise + norm, backward", call, 7 * size(x) + 2 * size(per_image), 2 * 27 * x.numel())

    hidden, bias = draw(batch, tokens, o), draw(o)
    y, w1 = x.view(batch, tokens, c), draw(batch, c, o)
    shared, w1_static = x.view(1, batch * tokens, c), draw(o, c).mT[None]
    flops = 2 * batch * tokens * c * o
    for name, *operands in (("product + GELU, per image", y, w1), ("product + GELU, static", shared, w1_static)):
        yield Kernel(name, partial(_hidden, *operands, bias, "none"), size(*operands, hidden), flops)
    call = partial(_hidden, y, w1, bias, "none", hidden)
    yield Kernel("product + GELU, backward", call, size(y, w1) + 3 * size(hidden), flops)

    left, right = draw(batch, pooled, r + c).split((r, c), -1)
    grams = draw(batch, r, c, dtype=torch.float32)
    yield Kernel("Gram matrix", partial(gram, left, right), size(left, right, grams), 2 * batch * pooled * r * c)
    factors = draw(r, c), draw(c, o), draw(c, o)
    call = partial(predicted_weight, grams, *factors, 1e-3, torch.bfloat16)
    yield Kernel("predicted weight", call, size(grams, *factors, w1), 4 * batch * r * c * o)
    yield Kernel("2 x 2 pooling", partial(ops.pool_2x2, x), size(x) + size(x) // 4, x.numel())
    yield Kernel("region means", partial(ops.region_mean, x, 3), size(x), x.numel())


def seconds(call: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """Median, 10 % and 90 % quantile; on a GPU by events, with the L2 cache cleared before each run."""
    if device == "cuda":
        from triton.testing import do_bench

        low, middle, high = do_bench(call, quantiles=[0.1, 0.5, 0.9])
        return middle / 1e3, low / 1e3, high / 1e3
    samples = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples), min(samples), max(samples)


def copy_bandwidth(values: int, device: str) -> float:
    """Bytes read and written a second by a copy of float32 ``values``."""
    source = torch.randn(values, device=device)
    target = torch.empty_like(source)
    return 2 * size(source) / seconds(partial(target.copy_, source), device)[0]


def measure_kernels(batch: int, side: int, channels: int, bandwidth: float, device: str) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{batch} x {side} x {side} tokens, {channels} channels, bfloat16")
    print(f"{'kernel':30}{'us':>10}{'GB/s':>8}{'of copy':>9}{'TFLOP/s':>9}")
    with torch.inference_mode(), ops.implementation("triton"):
        for kernel in kernels(batch, side, channels, device):
            middle, low, high = seconds(kernel.call, device)
            share = kernel.bytes / middle / bandwidth
            rate = kernel.flops / middle
            print(
                f"{kernel.name:30}{middle * 1e6:10.1f}{kernel.bytes / middle / 1e9:8.0f}{share:9.0%}{rate / 1e12:9.1f}"
            )
            rows.append(
                {
                    "kernel": kernel.name,
                    "batch": batch,
                    "side": side,
                    "channels": channels,
                    "seconds": middle,
                    "p10": low,
                    "p90": high,
                    "bytes": kernel.bytes,
                    "flops": kernel.flops,
                    "share_of_copy": share,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None, help="folder; default benchmarks/results/gpu")
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes on the CPU: proves the script, measures nothing"
    )
    args = parser.parse_args()
    device = "cpu" if args.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; --dry-run runs the same steps on the CPU")
    folder = args.output or Path("runs/gpu-dry-run" if args.dry_run else "benchmarks/results/gpu")
    folder.mkdir(parents=True, exist_ok=True)

    bandwidth = copy_bandwidth(2**12 if args.dry_run else 2**28, device)
    print(f"copy, read + written: {bandwidth / 1e9:.0f} GB/s")
    shapes = [(2, 5, 32)] if args.dry_run else [(256, 14, 192), (16, 78, 192), (256, 14, 384)]
    rows = [row for shape in shapes for row in measure_kernels(*shape, bandwidth, device)]
    results = {
        "device": "CPU, Triton's interpreter: no measurement" if args.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "kernels": rows,
    }
    (folder / "kernels.json").write_text(json.dumps(results, indent=1) + "\n")

    if args.dry_run:
        common = {"variant": "weightformer_micro", "rounds": 1, "sample_seconds": 1e-3}
        runs = {"dry": {"models": ["triton", "released"], "cases": ["throughput"], "sizes": [16], "batch": 1}}
    else:
        common = {"models": MODELS, "device": device, "precision": "bfloat16", "graphs": True, "rounds": 5}
        runs = {
            "224": {"cases": ["throughput", "training"], "sizes": [224], "batch": 256},
            "1248": {"cases": ["throughput", "memory"], "sizes": [1248], "batch": 16},
            "latency": {"cases": ["latency"], "sizes": [224, 1248]},
        }
    for name, run in runs.items():
        bench(BenchConfig(**common, **run, output=str(folder / name)))


if __name__ == "__main__":
    main()
