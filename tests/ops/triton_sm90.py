"""Compile every launch of the kernels for an H100 or H200, without a GPU, and print registers and spilled bytes.

Run by test_triton.py in a process of its own; by hand: ``python tests/ops/triton_sm90.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from weightformer.ops import triton_support

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Sm90:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Takes the place of `triton_support.launch`: compiles for these arguments instead of running."""
    compiled = kernel.warmup(*args, grid=(1,), **constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, dump, file.name], capture_output=True, check=True, text=True).stdout
            for dump in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK"))
    matrix = "tensor cores" if re.search("[HQ]G?MMA", code) else "no tensor cores"
    spilled = len(re.findall(r"\b(?:STL|LDL)\b", code))
    print(f"{kernel.__name__} C={constants.get('C')} registers={registers} stack={stack} spills={spilled} {matrix}")


def compile_all(channels: int, dtype: torch.dtype) -> None:
    from weightformer.ops.depthwise_norm import triton as norm
    from weightformer.ops.dynamic_depthwise import triton as depthwise
    from weightformer.ops.dynamic_linear import triton as linear
    from weightformer.ops.mlp import triton as mlp
    from weightformer.ops.pooling import triton as pooling

    for module in (norm, depthwise, linear, mlp, pooling):
        module.launch = launch
    hidden = 4 * channels
    x, vector = torch.zeros(2, 14, 14, channels, dtype=dtype), torch.zeros(channels, dtype=dtype)
    kernel, y = torch.zeros(2, channels, 3, 3, dtype=dtype), x.flatten(1, 2)
    wide = torch.zeros(2, 196, hidden, dtype=dtype)
    left, right = torch.zeros(2, 49, 5 * channels // 4, dtype=dtype).split((channels // 4, channels), -1)
    w1, w2 = torch.zeros(channels // 4, channels), torch.zeros(channels, hidden)

    depthwise.convolve(x, kernel, vector, (vector, vector, 1e-6, dtype), residual=True)
    norm._op_backward._init_fn(x, x, x, kernel, x, vector, 1e-6)
    weights = torch.zeros(2, channels, hidden, dtype=dtype), torch.zeros(hidden, channels, dtype=dtype).mT[None]
    for tokens, weight, grad in (
        (y, weights[0], wide),
        (y.reshape(1, -1, channels), weights[1], wide.view(1, -1, hidden)),
    ):
        mlp._hidden(tokens, weight, torch.zeros(hidden, dtype=dtype), "none")
        mlp._hidden(tokens, weight, torch.zeros(hidden, dtype=dtype), "none", grad)
    linear.gram._init_fn(left, right)
    gram = torch.zeros(2, channels // 4, channels)
    linear.predicted_weight._init_fn(gram, w1, w2, torch.zeros(channels, hidden), 0.1, dtype)
    pooling._pool_2x2._init_fn(x)
    pooling._pool_2x2_backward._init_fn(x, 28, 28)
    pooling._region_mean._init_fn(x, 3)
    pooling._region_mean_backward._init_fn(torch.zeros(2, 3, 3, channels), 14, 14, dtype)


if __name__ == "__main__":
    assert not triton_support.INTERPRETED, "unset TRITON_INTERPRET: the interpreter compiles nothing"
    driver.set_active(Sm90())
    for width in map(int, sys.argv[1:] or ["192", "384"]):
        compile_all(width, torch.bfloat16)
