"""The order and the random numbers of every item, and a position that survives a restart."""

# ruff: noqa: NPY002 - the global stream of numpy is what is tested

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset

from weightformer.training.loader import EpochSampler, Key, ResumableLoader, derive_seed, item_rng


class Noise(Dataset[Any]):
    """Items that say which they are and carry one number of each random stream."""

    def __init__(self, num_items: int = 10, seed: int = 0) -> None:
        self.num_items, self.seed = num_items, seed

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, key: Key) -> torch.Tensor:
        with item_rng(self.seed, *key):
            drawn = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([*key, *drawn], dtype=torch.float64)


def make_loader(num_items: int = 10, batch_size: int = 3, rank: int = 0, world_size: int = 1, **kwargs: Any) -> Any:
    sampler = EpochSampler(num_items, seed=5, shuffle=True, rank=rank, world_size=world_size, drop_uneven=True)
    return ResumableLoader(Noise(num_items), sampler, batch_size, **kwargs)


def take(loader: ResumableLoader, count: int) -> list[torch.Tensor]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def epochs(loader: ResumableLoader, first: int, last: int) -> list[torch.Tensor]:
    batches = []
    for epoch in range(first, last + 1):
        loader.sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


# Random numbers of an item


def test_derived_seeds_are_fixed_and_tell_keys_apart() -> None:
    assert derive_seed(0, 1, 2) == 3545498880833913751
    keys = [(0,), (0, 0), (1,), (0, 1), (1, 0), (2**32,), (-1,), (0, 2**32)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)


def test_item_rng_depends_on_its_arguments_alone() -> None:
    first = Noise()[1, 7]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert torch.equal(Noise()[1, 7], first)
    others = torch.stack([Noise()[1, 7], Noise()[1, 8], Noise()[2, 7], Noise(seed=1)[1, 7]])
    for stream in others[:, 2:].T:
        assert len(stream.unique()) == 4


def test_item_rng_puts_every_stream_back_even_after_an_error() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = draw()
    seed()
    with pytest.raises(ZeroDivisionError), item_rng(0, 0, 0):
        draw()[0] / 0
    assert draw() == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("num_workers", [0, 4])
def test_no_item_shares_a_stream_and_a_rerun_is_equal(num_workers: int) -> None:
    def run() -> torch.Tensor:
        ranks = [make_loader(16, 2, rank, 2, num_workers=num_workers) for rank in range(2)]
        return torch.cat([batch for loader in ranks for batch in epochs(loader, 0, 1)])

    items = run()
    assert len(items) == 32
    assert len(items[:, :2].unique(dim=0)) == 32
    for stream in items[:, 2:].T:
        assert len(stream.unique()) == 32
    assert torch.equal(items, run())


# Order


def order(num_items: int = 21, epoch: int = 0, **kwargs: Any) -> list[int]:
    sampler = EpochSampler(num_items, **{"seed": 0, "shuffle": True, "drop_uneven": True, **kwargs})
    sampler.set_epoch(epoch)
    keys = list(sampler)
    assert len(keys) == len(sampler)
    assert {e for e, _ in keys} <= {epoch}
    return [index for _, index in keys]


def test_each_epoch_and_seed_has_its_own_order_of_all_items() -> None:
    orders = [order(epoch=0), order(epoch=1), order(seed=1), order(seed=1, epoch=1)]
    assert all(sorted(o) == list(range(21)) for o in orders)
    assert len({tuple(o) for o in orders}) == 4  # seed 0 in epoch 1 is not seed 1 in epoch 0
    assert order() == orders[0]
    assert order(shuffle=False) == list(range(21))


def test_training_ranks_get_equal_disjoint_shares() -> None:
    shares = [order(epoch=e, rank=r, world_size=4) for e in range(9) for r in range(4)]
    assert {len(share) for share in shares} == {5}
    for e in range(9):
        assert len(set().union(*shares[4 * e : 4 * e + 4])) == 20
    left_out = [set(range(21)) - set().union(*shares[4 * e : 4 * e + 4]) for e in range(9)]
    assert len(set().union(*left_out)) > 1  # not the same image in every epoch


@pytest.mark.parametrize(("num_items", "world_size"), [(21, 2), (21, 4), (1, 3), (0, 2)])
def test_evaluation_serves_every_item_once(num_items: int, world_size: int) -> None:
    shares = [
        order(num_items, shuffle=False, drop_uneven=False, rank=r, world_size=world_size) for r in range(world_size)
    ]
    assert sorted(index for share in shares for index in share) == list(range(num_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="2 training items cannot be shared by 3 processes"):
        order(2, world_size=3)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1"):
        order(5, rank=2, world_size=2)


# Position

WORKERS = [
    pytest.param({}, id="no-workers"),
    pytest.param({"num_workers": 2}, id="workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent-workers"),
]


@pytest.mark.parametrize("options", WORKERS)
def test_a_restored_position_continues_exactly(options: dict[str, Any]) -> None:
    whole = epochs(make_loader(), 0, 2)
    stopped = make_loader(**options)
    before = epochs(stopped, 0, 0)
    stopped.sampler.set_epoch(1)
    before += take(stopped, 2)
    state = stopped.state_dict()
    assert state == {"epoch": 1, "batches": 2, "num_items": 10, "total_batch_size": 3}  # not what workers fetched ahead

    resumed = make_loader(**options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert_same(before + epochs(resumed, 1, 2), whole)


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_what_is_left_of_an_epoch(batches: int) -> None:
    whole = epochs(make_loader(), 3, 3)
    resumed = make_loader()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 3, "batches": batches})
    assert_same(list(resumed), whole[batches:])
    assert_same(list(resumed), whole)  # a position is used once
    assert len(resumed) == 4


def test_a_position_in_another_epoch_does_not_apply() -> None:
    resumed = make_loader()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 3, "batches": 2})
    assert_same(epochs(resumed, 4, 4), epochs(make_loader(), 4, 4))


@pytest.mark.parametrize("options", WORKERS)
def test_an_abandoned_iteration_does_not_move_the_next(options: dict[str, Any]) -> None:
    loader = make_loader(**options)
    take(loader, 2)
    assert_same(list(loader), epochs(make_loader(), 0, 0))


def test_the_epoch_may_be_set_after_iter_is_called() -> None:
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batches": 4})
    iterator = iter(loader)  # as Lightning does
    loader.sampler.set_epoch(1)
    assert_same(list(iterator), epochs(make_loader(), 1, 1))


def test_the_state_of_rank_0_restores_every_rank() -> None:
    first = make_loader(rank=0, world_size=2, batch_size=2)
    take(first, 1)
    second = make_loader(rank=1, world_size=2, batch_size=2)
    whole = list(second)
    second.load_state_dict(first.state_dict())
    assert_same(list(second), whole[1:])


def test_a_position_with_another_meaning_is_refused() -> None:
    state = make_loader(batch_size=4).state_dict()
    make_loader(batch_size=2, world_size=2).load_state_dict(state)  # the same global batches
    with pytest.raises(ValueError, match="total_batch_size is 3, in the checkpoint 4"):
        make_loader(batch_size=3).load_state_dict(state)
    with pytest.raises(ValueError, match="num_items is 11, in the checkpoint 10"):
        make_loader(11, batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="num_items is 10, in the checkpoint None"):
        make_loader().load_state_dict({"epoch": 1, "batches": 2})


class Whole(Noise):
    def __getitems__(self, keys: list[Key]) -> list[Key]:
        return keys


@pytest.mark.parametrize(("num_items", "world_size", "batch_size"), [(9, 2, 4), (9, 2, 5), (1, 3, 2), (0, 2, 2)])
def test_ranks_that_run_out_serve_empty_batches(num_items: int, world_size: int, batch_size: int) -> None:
    ranks = []
    for rank in range(world_size):
        sampler = EpochSampler(num_items, seed=0, shuffle=False, rank=rank, world_size=world_size, drop_uneven=False)
        loader = ResumableLoader(Whole(), sampler, batch_size, collate_fn=lambda batch: batch)
        ranks.append(list(loader))
        assert len(ranks[-1]) == len(loader) == -(-num_items // (world_size * batch_size))
    assert sorted(index for rank in ranks for batch in rank for _, index in batch) == list(range(num_items))


class Broken(Noise):
    def __getitems__(self, keys: list[Key]) -> ValueError:
        return ValueError("cannot read a.png")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_from_a_worker_is_raised_as_it_is(num_workers: int) -> None:
    sampler = EpochSampler(4, seed=0, shuffle=False, drop_uneven=True)
    loader = ResumableLoader(Broken(), sampler, 2, num_workers=num_workers, collate_fn=lambda batch: batch)
    with pytest.raises(ValueError, match=r"\Acannot read a\.png\Z"):
        next(iter(loader))


# Lightning


class Recorder(L.LightningModule):
    """Trains one weight on random numbers and remembers every batch that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.clone())
        return (self.weight * batch[:, 2:].mean() - batch[0, 4]) ** 2

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder: Any, checkpoints: ModelCheckpoint | None, ckpt_path: Any, options: dict[str, Any]) -> Recorder:
    module = Recorder()
    trainer = L.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        accelerator="cpu",
        use_distributed_sampler=False,
        callbacks=[checkpoints] if checkpoints else [],
        enable_checkpointing=checkpoints is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validation = ResumableLoader(Noise(4), EpochSampler(4, seed=0, shuffle=False, drop_uneven=False), 2)
    trainer.fit(module, make_loader(**options), validation, ckpt_path=ckpt_path, weights_only=True)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "steps"), [({}, range(1, 12)), *((w.values[0], (6,)) for w in WORKERS[1:])])
def test_lightning_resumes_exactly_after_any_step(options: dict[str, Any], steps: Any, tmp_path: Any) -> None:
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(tmp_path, checkpoints, None, options)
    assert len(whole.seen) == 12
    for step in steps:
        resumed = fit(tmp_path, None, tmp_path / f"step={step}.ckpt", options)
        assert_same(resumed.seen, whole.seen[step:])
        assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after_validation", [False, True])
def test_lightning_resumes_exactly_after_an_epoch(after_validation: bool, tmp_path: Any) -> None:
    checkpoints = ModelCheckpoint(
        tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=not after_validation
    )
    whole = fit(tmp_path, checkpoints, None, {})
    resumed = fit(tmp_path, None, tmp_path / "epoch=1.ckpt", {})
    assert_same(resumed.seen, whole.seen[8:])
    assert torch.equal(resumed.weight, whole.weight)


UNEVEN = """
import pathlib, sys, lightning, torch, torchmetrics
from weightformer.training.loader import EpochSampler, ResumableLoader

class Images(torch.utils.data.Dataset):
    def __getitems__(self, keys):
        return torch.ones(len(keys), 3, 2, 2)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)  # its buffers are shared before every step
        self.counts = torch.nn.ModuleList([torchmetrics.SumMetric() for _ in range(2)])
    def training_step(self, batch, _):
        return self.norm(batch).sum()
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.norm(batch)
        self.counts[dataloader_idx].update(len(batch))
    def on_validation_epoch_end(self):
        seen = [int(count.compute()) for count in self.counts]
        pathlib.Path(sys.argv[1], f"seen_{self.global_rank}").write_text(str(seen))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0, default_root_dir=sys.argv[1])

def loader(num_items, train):
    sampler = EpochSampler(
        num_items, seed=0, shuffle=train, rank=trainer.global_rank, world_size=2, drop_uneven=train
    )
    return ResumableLoader(Images(), sampler, 1, collate_fn=lambda batch: batch)

trainer.fit(Module(), loader(4, True), [loader(1, False), loader(21, False)])
torch.distributed.destroy_process_group()  # its threads must not outlive the interpreter
"""


def test_two_processes_evaluate_uneven_shares_without_waiting(tmp_path: Path) -> None:
    """One image on two processes, and 21, with a model whose every step is collective."""
    (tmp_path / "run.py").write_text(UNEVEN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    assert [(tmp_path / f"seen_{rank}").read_text() for rank in range(2)] == ["[1, 21]"] * 2
