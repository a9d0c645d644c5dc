"""What each process of a test computes; run as ``python ranks.py <folder> <processes> ...``.

The processes are forked before torch starts any thread, so that all share one import.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weightformer.models import WeightFormer
from weightformer.streaming import RegionError, RowParallel, stream
from weightformer.streaming.sources import ArraySource
from weightformer.streaming.workspace import FileTokens

SIZES = [(61, 33), (100, 52)]
EVERY = [0, 1, 3]
# Between them, everything that another strategy sums over tokens.
STRATEGIES: dict[str, dict[str, Any]] = {
    "conv and gap": {"conv_predictor": "conv", "linear_predictor": "gap"},
    "amp_dir and pool": {"conv_predictor": "amp_dir", "linear_predictor": "nonlinear", "pool": "7x7"},
}
CASES = [(str(every), {"dynamic_every": every}) for every in EVERY]
CASES += [(name, {"dynamic_every": 2, **strategy}) for name, strategy in STRATEGIES.items()]


def build(dynamic_every: int = 3, **kwargs: Any) -> WeightFormer:
    """A double-precision model with predicted weights that matter, the same on every process."""
    torch.manual_seed(1)
    model = WeightFormer(embed_dim=16, depth=5, patch_size=4, num_classes=7, dynamic_every=dynamic_every, **kwargs)
    large = ("fc1.proj", "w1", "w2", "proj1", "amplitude")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.5 if any(part in name for part in large) else 0.3)
    return model.double().eval()


def images(height: int, width: int) -> torch.Tensor:
    """Two images, the same on every process."""
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height), dtype=torch.float64)


def labels() -> torch.Tensor:
    """Their classes."""
    return torch.tensor([1, 5])


class Torn(ArraySource):
    """An image whose rows from 40 on cannot be read."""

    def _read(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        if bottom > 40:
            raise EOFError("the file is truncated")
        return super()._read(top, bottom, left, right)


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def join(rank: int, folder: Path, size: int, name: str) -> None:
    """Become one of ``size`` processes."""
    store = dist.FileStore(str(folder / f"store-{name}-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None


def failure(source: Any) -> str:
    """How streaming a bad image ends on this process."""
    try:
        stream(build(3), source, progress=False, group=dist.group.WORLD)
    except (RegionError, FileNotFoundError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def work(rank: int, folder: Path, size: int) -> None:
    """Everything that is compared with one process."""
    join(rank, folder, size, "work")
    log = logging.getLogger("weightformer.streaming")
    log.setLevel(logging.INFO)
    found: dict[str, Any] = {}
    for case, kwargs in CASES:
        for height, width in SIZES:
            model, batch = build(**kwargs), images(height, width)
            parallel = RowParallel(model)
            top, bottom = parallel.pixel_rows(height)
            part = batch[:, :, top:bottom].clone().requires_grad_()
            logits = parallel(part, height)
            sent = parallel.sent
            F.cross_entropy(logits, labels()).backward()
            for strip_rows in (1, 5):
                found[f"stream {case} {height} {width} {strip_rows}"] = stream(
                    model, batch[0], strip_rows=strip_rows, progress=False, group=dist.group.WORLD
                )
            found[f"{case} {height} {width}"] = {
                "logits": logits.detach(),
                "image": part.grad,
                "rows": (top, bottom),
                "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
                "sent": sent,
            }

    for height, width in SIZES:
        messages = Messages()
        log.addHandler(messages)
        out = folder / f"{height}-{width}-{size}.npy"
        stream(build(3), images(height, width)[0], progress=False, group=dist.group.WORLD)
        log.removeHandler(messages)
        found[f"log {height} {width}"] = messages.texts
        stream(build(3), images(height, width)[0], output="features", out=out, progress=False, group=dist.group.WORLD)

    dropping = RowParallel(build(3, drop_path_rate=0.9, drop_rate=0.5).train())
    torch.manual_seed(rank)  # processes need not be seeded alike
    top, bottom = dropping.pixel_rows(64)
    found["dropped"] = torch.stack([dropping(images(64, 40)[:, :, top:bottom], 64).detach() for _ in range(4)])
    found["own noise"] = torch.rand(1)
    try:
        stream(build(3), images(16, 40)[0], progress=False, group=dist.group.WORLD)
    except ValueError as error:
        found["too few"] = str(error)
    found["failed"] = [
        failure(Torn(images(64, 40)[0])),
        failure(folder / "absent.tif" if rank else images(64, 40)[0]),
    ]
    torch.save(found, folder / f"{size}-{rank}.pt")
    dist.destroy_process_group()


def killed(rank: int, folder: Path, size: int) -> None:
    """A run whose last process dies when all others have finished the third pass, and it has not."""
    finish = FileTokens.finish_pass

    def die(self: FileTokens, number: int, *args: Any, **kwargs: Any) -> None:
        if number == 2 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, number, *args, **kwargs)

    FileTokens.finish_pass = die  # type: ignore[method-assign]
    join(rank, folder, size, "killed")
    try:
        resumable(folder, size)
    except RuntimeError:  # the connection to the killed process is lost
        os._exit(1)


def resumed(rank: int, folder: Path, size: int) -> None:
    """The same run again, to its end."""
    join(rank, folder, size, "resumed")
    seen: list[float] = []
    logits = resumable(folder, size, seen.append)
    torch.save({"seen": seen, "logits": logits}, folder / f"resumed-{size}-{rank}.pt")
    dist.destroy_process_group()


def resumable(folder: Path, size: int, progress: Callable[[float], None] | bool = False) -> torch.Tensor:
    """What is killed and resumed."""
    workspace = folder / f"workspace-{size}"
    return stream(
        build(3), images(100, 52)[0], strip_rows=5, workspace=workspace, progress=progress, group=dist.group.WORLD
    )


def run(target: Callable[[int, Path, int], None], folder: Path, size: int) -> list[int]:
    """Exit codes of ``size`` processes."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            target(rank, folder, size)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    for size in map(int, sys.argv[2:]):
        here = Path(sys.argv[1])
        if any(run(work, here, size)):
            sys.exit(1)
        codes = run(killed, here, size)
        assert codes[-1] == -signal.SIGKILL, codes
        assert all(codes), codes
        if any(run(resumed, here, size)):
            sys.exit(1)
