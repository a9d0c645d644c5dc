"""Speed and memory, measured side by side: parity first, cases apart from the runner."""

from weightformer.bench.runner import BenchConfig, main

__all__ = ["BenchConfig", "main"]
