"""The optional C++ forms for a CPU, float32: built when asked for, never needed to install or import.

``weightformer.ops.native.build()`` compiles them with the machine's own vector instructions (seconds, once: the result
is cached) and loads them; from then on `implementation("auto")` takes them for float32 tensors on a CPU.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

from weightformer.ops.dispatch import capturing
from weightformer.ops.precision import autocasting

__all__ = ["build", "built", "check", "suits"]

_SOURCE = Path(__file__).parent / "csrc" / "native.cpp"
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp"]
_lock = threading.Lock()
_built = False


def build(verbose: bool = False) -> None:
    """Compile the C++ forms, or take them from the cache, and load them into this process.

    Args:
        verbose: show what the compiler says.

    Raises:
        RuntimeError: no C++ compiler that understands GCC's vectors, or it fails.
    """
    global _built
    with _lock:
        if _built:
            return
        from torch.utils import cpp_extension

        try:
            cpp_extension.load(
                # the name carries what the machine code depends on, so that a shared cache never mixes machines
                name=f"weightformer_native_{_fingerprint()}",
                sources=[str(_SOURCE)],
                extra_cflags=_FLAGS,
                extra_ldflags=["-fopenmp"],
                is_python_module=False,
                verbose=verbose,
            )
        except (OSError, ImportError, RuntimeError) as error:
            raise RuntimeError(
                f"the native ops need a C++ compiler (g++ or clang++) and ninja; building them failed: {error}"
            ) from error
        from weightformer.ops.native.registration import register

        register()
        _built = True


def built() -> bool:
    """Whether `build` has run in this process."""
    return _built


def suits(x: Tensor) -> bool:
    """Whether the native forms are loaded and compute such a tensor."""
    return _built and x.device.type == "cpu" and x.dtype == torch.float32 and not (autocasting(x) or capturing())


def check(*tensors: Tensor) -> None:
    """Refuse what the C++ forms do not compute.

    Raises:
        RuntimeError: not built yet, autocast is on, or a tensor is not float32 on the CPU.
    """
    if not _built:
        raise RuntimeError("the native ops are not built: call weightformer.ops.native.build() first")
    for x in tensors:
        if x.device.type != "cpu" or x.dtype != torch.float32 or autocasting(x):
            raise RuntimeError(
                f"the native ops compute float32 on the CPU without autocast, got {x.dtype} on {x.device}; "
                "use implementation('auto') or 'eager'"
            )


@functools.cache
def _fingerprint() -> str:
    cpu = Path("/proc/cpuinfo")
    features = (
        next((line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        if (cpu.is_file())
        else platform.processor()
    )
    parts = (features, torch.__version__, sys.version.split()[0], _SOURCE.read_text(), *_FLAGS)
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]
