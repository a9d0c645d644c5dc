"""What each process of a test computes; run as ``python ranks.py <folder> <processes> ...``.

The processes are forked before torch starts any thread, so that all share one import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weightformer.models import WeightFormer
from weightformer.streaming import RowParallel, stream

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


def work(rank: int, folder: Path, size: int) -> None:
    """Everything that is compared with one process."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{size}"), size), rank=rank, world_size=size
    )
    assert dist.group.WORLD is not None
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

    dropping = RowParallel(build(3, drop_path_rate=0.9, drop_rate=0.5).train())
    torch.manual_seed(rank)  # processes need not be seeded alike
    top, bottom = dropping.pixel_rows(64)
    found["dropped"] = torch.stack([dropping(images(64, 40)[:, :, top:bottom], 64).detach() for _ in range(4)])
    found["own noise"] = torch.rand(1)
    try:
        stream(build(3), images(16, 40)[0], progress=False, group=dist.group.WORLD)
    except ValueError as error:
        found["too few"] = str(error)
    torch.save(found, folder / f"{size}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in map(int, sys.argv[2:]):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                work(rank, Path(sys.argv[1]), size)
                os._exit(0)
            children.append(child)
        failures = [os.waitpid(child, 0)[1] for child in children]
        if any(failures):
            sys.exit(1)
