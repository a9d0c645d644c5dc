"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = ["machine", "now"]


def machine() -> dict[str, str]:
    """Processor, accelerator, system and the versions that results depend on."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    found = {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found | {name: version(name) for name in ("weightformer", "torch", "timm", "lightning")}


def now() -> str:
    """Today, as YYYY-MM-DD."""
    return time.strftime("%Y-%m-%d")
