"""The Triton kernels, in processes of their own: the interpreter must be chosen before triton is first imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightformer import ops

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(*arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@needs_triton
def test_kernels_equal_the_reference() -> None:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    report = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py"), **interpret)
    assert int(re.search(r"(\d+) passed", report).group(1)) >= 70, report


@needs_triton
def test_kernels_compile_for_hopper_without_spills(tmp_path: Path) -> None:
    report = run(str(HERE / "triton_sm90.py"), "192", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    lines = report.splitlines()
    assert len(lines) == 14, report
    assert not [line for line in lines if "spills=0 " not in line], report
    for kernel in ("_product_kernel", "_gram_kernel", "_weight_kernel"):
        assert all("no tensor cores" not in line for line in lines if line.startswith(kernel)), report


@needs_triton
def test_cpu_tensors_take_the_cpu_path_and_are_refused_by_name() -> None:
    x = torch.zeros(1, 2, 2, 16)
    assert ops.pool_2x2(x).shape == (1, 1, 1, 16)
    with ops.implementation("triton"), pytest.raises(RuntimeError, match=r"need CUDA tensors, got one on cpu"):
        ops.pool_2x2(x)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, weightformer
from weightformer import ops
assert ops.pool_2x2(torch.zeros(1, 2, 2, 16)).shape == (1, 1, 1, 16)
assert not [m for m in sys.modules if m.startswith("weightformer") and "triton" in m]
try:
    with ops.implementation("triton"):
        ops.pool_2x2(torch.zeros(1, 2, 2, 16))
except RuntimeError as error:
    print(error)
"""


def test_without_triton_everything_else_runs_and_the_name_says_what_is_missing() -> None:
    report = run("-c", WITHOUT_TRITON)
    assert "needs triton, which is not installed: `pip install triton`" in report
