"""Data loading that resumes exactly: order and randomness of every item are functions of (seed, epoch, index)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["EpochSampler", "Key", "ResumableLoader", "as_collated", "build_loader", "derive_seed", "item_rng"]

Key = tuple[int, int]  # (epoch, index): what a dataset is asked for


def derive_seed(*key: int) -> int:
    """A 64-bit seed for the integers of ``key``: the same everywhere, unrelated for any other key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


@contextmanager
def item_rng(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Random numbers for one item: Python's, numpy's and torch's (CPU) global streams, put back afterwards.

    What is drawn inside depends on the three arguments alone: not on the worker, the rank, the batch or a restart.
    """
    key = derive_seed(seed, epoch, index)
    # numpy's global stream, not a Generator: it is the one that augmentation libraries draw from
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(key)
        np.random.seed([key >> 32, key & 0xFFFFFFFF])  # noqa: NPY002
        torch.default_generator.manual_seed(key)  # torch.manual_seed would reseed the GPU's stream as well
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


class EpochSampler(Sampler[Key]):
    """This rank's share of one epoch, as (epoch, index) pairs: every ``world_size``-th item of a shared order.

    Args:
        num_items: size of the dataset.
        seed: of the shuffle; each epoch has its own order.
        shuffle: permute the items, or keep their order.
        rank: of this process.
        world_size: number of processes.
        drop_uneven: give every rank the same number of items, as training needs to stay in step. The remainder (less
            than ``world_size`` items, others in each epoch) is left out rather than repeated, so that no item counts
            twice. ``False`` serves every item exactly once, as evaluation needs; ranks may differ by one item.

    Raises:
        ValueError: a rank outside the world, or too few items for ``drop_uneven``.
    """

    def __init__(
        self,
        num_items: int,
        *,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        drop_uneven: bool,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1} for {world_size} processes, got {rank}")
        if drop_uneven and num_items < world_size:
            raise ValueError(f"{num_items} training items cannot be shared by {world_size} processes; use fewer")
        self.num_items, self.seed, self.shuffle = num_items, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.num_shared = num_items - num_items % world_size if drop_uneven else num_items
        self.epoch = 0
        self.start = 0
        """Items of this rank's share to pass over in the next iteration."""

    def __iter__(self) -> Iterator[Key]:
        epoch = self.epoch
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            order = torch.randperm(self.num_items, generator=generator)
        else:
            order = torch.arange(self.num_items)
        share = order[: self.num_shared][self.rank :: self.world_size]
        return ((epoch, index) for index in share[self.start :].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.num_shared, self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose position can be saved and restored in mid-epoch, with any number of workers.

    The position is the same on every rank (Lightning stores rank 0's alone) and counts the batches handed out, not
    those that workers have fetched ahead. A restored position holds for its own epoch and is used once; every other
    iteration starts at the epoch's first batch.

    Every rank serves as many batches, since processes that take part in different numbers of steps wait for each other
    for ever. Where ranks have uneven shares (evaluation), one that has run out serves an empty batch: what the dataset
    answers to no keys.

    Args:
        dataset: items by (epoch, index), one by one or, with ``__getitems__``, a batch at a time. An exception in
            place of a batch is raised as it is: one raised in a worker would arrive wrapped in that worker's traceback.
        sampler: the order.
        batch_size: items in a batch of this process.
        **options: of ``torch.utils.data.DataLoader``.
    """

    sampler: EpochSampler

    def __init__(self, dataset: Dataset[Any], sampler: EpochSampler, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, sampler=sampler, **options)
        self._epoch, self._batches, self._restored = sampler.epoch, 0, False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: Lightning calls iter() before set_epoch(), so nothing may be settled until the first batch.
        if not (self._restored and self._epoch == self.sampler.epoch):
            self._epoch, self._batches = self.sampler.epoch, 0
        self._restored = False
        self.sampler.start = self._batches * (self.batch_size or 1)
        for batch in super().__iter__():
            if isinstance(batch, Exception):
                try:
                    raise batch
                finally:
                    del batch  # a cycle through its traceback, collected late, would leave workers waiting for 10 s
            self._batches += 1
            yield batch
        while self._batches < len(self):
            self._batches += 1
            yield self.collate_fn(self.dataset.__getitems__([]))  # type: ignore[attr-defined]

    def __len__(self) -> int:
        size, longest = self.batch_size or 1, len(range(0, self.sampler.num_shared, self.sampler.world_size))
        return longest // size if self.drop_last else -(-longest // size)

    def state_dict(self) -> dict[str, int]:
        """The position, and the sizes that give it its meaning."""
        return {"epoch": self._epoch, "batches": self._batches, **self._sizes()}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from a saved position.

        Raises:
            ValueError: the position was saved with another dataset size or another batch size over all processes, so
                that it names other items here.
        """
        for name, here in self._sizes().items():
            if state_dict.get(name) != here:
                raise ValueError(
                    f"cannot resume the data order: {name} is {here}, in the checkpoint {state_dict.get(name)}. Resume "
                    "with the same data and total batch size, or start a new run from the weights"
                )
        self._epoch, self._batches, self._restored = state_dict["epoch"], state_dict["batches"], True
        self.sampler.set_epoch(self._epoch)

    def _sizes(self) -> dict[str, int]:
        return {
            "num_items": self.sampler.num_items,
            "total_batch_size": (self.batch_size or 1) * self.sampler.world_size,
        }


def build_loader(
    dataset: Any, batch_size: int, *, train: bool, seed: int, rank: int, world_size: int, num_workers: int
) -> ResumableLoader:
    """Batches of a data set that collates them itself (``__getitems__``).

    For training shuffled, and as many on every rank; the last, smaller batch of an epoch is left out, unless it is the
    only one. Else every item once, in order; a batch may be smaller than others, or empty.

    Args:
        dataset: see `ResumableLoader`; it has a length.
        batch_size: items in a batch of this process.
        train: which of the two.
        seed: of the order.
        rank: of this process.
        world_size: number of processes.
        num_workers: processes that prepare batches ahead; 0 prepares them in this one.
    """
    sampler = EpochSampler(len(dataset), seed=seed, shuffle=train, rank=rank, world_size=world_size, drop_uneven=train)
    return ResumableLoader(
        dataset,
        sampler,
        batch_size,
        drop_last=train and len(sampler) >= batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=as_collated,
    )


def as_collated(batch: Any) -> Any:
    """A batch as its data set collated it."""
    return batch
