"""Which rows of the token grid this process holds, and what it asks of the processes that hold the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from weightformer.streaming.errors import PeerError

__all__ = ["Rows", "launched", "least", "split_rows", "together"]


def least(number: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The smallest of every process's numbers."""
    if group is None:
        return number
    value = torch.tensor(number, device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN, group=group)
    return int(value)


@contextmanager
def together(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Leave the block on every process, or raise on every process: none waits for one that failed.

    Raises:
        PeerError: the block succeeded here and failed elsewhere.
    """
    try:
        yield
    except Exception:
        least(0, group, device)
        raise
    if not least(1, group, device):
        raise PeerError("another process that shares this image failed; its own message says why")


def split_rows(height: int, parts: int) -> list[int]:
    """Bounds of ``parts`` runs of rows, about equal; each starts on an even row, so no 2 x 2 pool is cut.

    Returns:
        ``parts + 1`` numbers from 0 to ``height``.

    Raises:
        ValueError: a part would be empty.
    """
    pairs = height // 2
    bounds = [2 * (pairs * part // parts) for part in range(parts)] + [height]
    if any(start >= stop for start, stop in pairwise(bounds)):
        raise ValueError(
            f"{height} token rows cannot be split over {parts} processes: use {max(pairs, 1)} at most for this image"
        )
    return bounds


@dataclass
class Rows:
    """Rows ``start`` to ``stop`` of a grid of ``height``, shared over a process group or, without one, all of them.

    Attributes:
        sent: bytes that this process sent, by what for.
    """

    height: int
    group: dist.ProcessGroup | None = None
    start: int = 0
    stop: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"halo": 0, "statistics": 0})

    def __post_init__(self) -> None:
        if self.group is None:
            self.start, self.stop = 0, self.height
            return
        rank = dist.get_rank(self.group)
        self._bounds = split_rows(self.height, dist.get_world_size(self.group))
        self.start, self.stop = self._bounds[rank : rank + 2]

    def __len__(self) -> int:
        return self.stop - self.start

    def sum(self, total: Tensor) -> Tensor:
        """The sum of every process's tensor, the same bits on each."""
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
            self.sent["statistics"] += total.numel() * total.element_size()
        return total

    def neighbours(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Exchange rows with the processes above and below.

        Args:
            first: this process's first rows (h, W, C).
            last: its last rows, as many.

        Returns:
            The last rows of the process above and the first rows of the one below; ``None`` at the grid's border.
        """
        if self.group is None:
            return None, None
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        received: dict[int, Tensor] = {}
        operations = []
        for other, mine in ((rank - 1, first), (rank + 1, last)):
            if 0 <= other < size:
                peer = dist.get_global_rank(self.group, other)
                received[other] = torch.empty_like(mine, memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.isend, mine.contiguous(), peer, group=self.group))
                operations.append(dist.P2POp(dist.irecv, received[other], peer, group=self.group))
                self.sent["halo"] += mine.numel() * mine.element_size()
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return received.get(rank - 1), received.get(rank + 1)

    def check_halo(self, halo: int) -> None:
        """Raise ValueError if a process holds fewer rows than its neighbour needs of it."""
        if self.group is None:
            return
        fewest = min(stop - start for start, stop in pairwise(self._bounds))
        if fewest < halo:
            raise ValueError(
                f"{self.height} token rows are too few for {dist.get_world_size(self.group)} processes: "
                f"each must hold at least {halo}"
            )


@contextmanager
def launched() -> Iterator[tuple[dist.ProcessGroup | None, int]]:
    """The processes that ``torchrun`` started, and which of them this is; none if it started only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None, 0
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    sent, log = logging.StreamHandler(), logging.getLogger("weightformer.streaming")
    if dist.get_rank() == 0:  # say what crosses between the processes
        log.addHandler(sent)
        log.setLevel(logging.INFO)
    try:
        yield dist.group.WORLD, dist.get_rank()
    finally:
        log.removeHandler(sent)
        dist.destroy_process_group()
