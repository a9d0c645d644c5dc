"""The hybrid loss equals its formulas: those of the papers in NumPy, and diffusers' scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from weightformer.tasks.generation.diffusion import HybridLoss

STEPS = [0, 1, 500, 999]


@pytest.fixture(scope="module")
def loss() -> HybridLoss:
    return HybridLoss()


@pytest.fixture(scope="module")
def scheduler() -> Any:
    return DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear", beta_start=1e-4, beta_end=0.02)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Four samples, one at each of `STEPS`, with values from -1 to 1, both ends included."""
    clean = draw(4, 2, 3, 5).clamp(-1, 1)
    return {"clean": clean, "noise": draw(4, 2, 3, 5, seed=1), "step": torch.tensor(STEPS)}


@pytest.mark.parametrize("step", STEPS)
def test_variances_are_those_of_diffusers(loss: HybridLoss, scheduler: Any, step: int) -> None:
    small = scheduler._get_variance(step, variance_type="fixed_small")
    assert loss.posterior_variance[step].item() == pytest.approx(small.item(), rel=1e-4, abs=1e-19)
    if step:  # at step 0 the variance is zero, and diffusers' logarithm that of an arbitrary floor
        for v in (-1.0, -0.3, 0.0, 1.0):
            theirs = scheduler._get_variance(step, torch.tensor(v), variance_type="learned_range")
            ours = torch.lerp(loss.posterior_log_variance[step], loss.log_beta[step], (v + 1) / 2)
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


def test_noise_is_added_as_diffusers_does(loss: HybridLoss, scheduler: Any, batch: dict[str, Tensor]) -> None:
    theirs = scheduler.add_noise(batch["clean"], batch["noise"], batch["step"])
    torch.testing.assert_close(loss.add_noise(**batch), theirs, rtol=1e-5, atol=1e-5)


def test_a_perfect_predictor_loses_nothing(loss: HybridLoss, batch: dict[str, Tensor]) -> None:
    """Its variance is the posterior's, and at step 0, where that is zero, far below what can be asked for."""
    variance = torch.full_like(batch["noise"], -1.0)
    variance[0] = -100.0
    losses = loss(torch.cat((batch["noise"], variance), dim=1), **batch)
    for name in ("loss", "mse", "vb"):
        torch.testing.assert_close(losses[name], torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)


def expected(output: np.ndarray, x0: np.ndarray, noise: np.ndarray, t: int) -> tuple[float, float]:
    """MSE and bound of one sample, in the papers' letters."""
    beta = np.linspace(1e-4, 0.02, 1000)
    alpha_bar = np.cumprod(1 - beta)
    last = alpha_bar[t - 1] if t else 1.0
    eps, v = output[:2], output[2:]
    xt = np.sqrt(alpha_bar[t]) * x0 + np.sqrt(1 - alpha_bar[t]) * noise

    def mean(x: np.ndarray) -> np.ndarray:
        a = np.sqrt(last) * beta[t] / (1 - alpha_bar[t])
        return a * x + np.sqrt(1 - beta[t]) * (1 - last) / (1 - alpha_bar[t]) * xt

    tilde = beta[t] * (1 - last) / (1 - alpha_bar[t]) if t else beta[1] * (1 - alpha_bar[0]) / (1 - alpha_bar[1])
    variance = np.exp((v + 1) / 2 * np.log(beta[t]) + (1 - v) / 2 * np.log(tilde))
    guess = mean((xt - np.sqrt(1 - alpha_bar[t]) * eps) / np.sqrt(alpha_bar[t]))
    if t:
        gap = (mean(x0) - guess) ** 2
        nats = 0.5 * (np.log(variance / tilde) + (tilde + gap) / variance - 1)
    else:

        def cdf(x: np.ndarray) -> np.ndarray:
            return (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

        std = np.sqrt(variance)
        upper = np.where(x0 > 0.999, 1.0, cdf((x0 + 1 / 255 - guess) / std))
        lower = np.where(x0 < -0.999, 0.0, cdf((x0 - 1 / 255 - guess) / std))
        nats = -np.log(np.maximum(upper - lower, 1e-12))
    return float(np.mean((noise - eps) ** 2)), float(np.mean(nats) / np.log(2))


@pytest.mark.parametrize("scale", [1.0, 0.05], ids=["random", "close"])
def test_a_random_predictor_loses_what_numpy_says(loss: HybridLoss, batch: dict[str, Tensor], scale: float) -> None:
    output = torch.cat((batch["noise"] + scale * draw(4, 2, 3, 5, seed=2), draw(4, 2, 3, 5, seed=3)), dim=1)
    losses = loss(output, **batch)
    for i, step in enumerate(STEPS):
        mse, vb = expected(output[i].numpy(), batch["clean"][i].numpy(), batch["noise"][i].numpy(), step)
        assert losses["mse"][i].item() == pytest.approx(mse, rel=1e-9)
        assert losses["vb"][i].item() == pytest.approx(vb, rel=1e-4)
        assert losses["loss"][i].item() == pytest.approx(mse + vb, rel=1e-4)


def test_the_bound_trains_the_variance_alone(loss: HybridLoss, batch: dict[str, Tensor]) -> None:
    output = draw(4, 4, 3, 5, seed=4).requires_grad_()
    losses = loss(output, **batch)
    (both,) = torch.autograd.grad(losses["loss"].sum(), output, retain_graph=True)
    (squares,) = torch.autograd.grad(losses["mse"].sum(), output)
    assert torch.equal(both[:, :2], squares[:, :2])
    assert squares[:, 2:].abs().max() == 0
    assert both[1:, 2:].abs().min() > 0


def test_half_precision_is_widened_first(loss: HybridLoss, batch: dict[str, Tensor]) -> None:
    output = draw(4, 4, 3, 5, seed=4).bfloat16()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    losses, wide = loss(output, **batch), loss(output.float(), **batch)
    for name, value in losses.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wide[name])


def test_without_learned_variance_there_are_squares_alone(loss: HybridLoss, batch: dict[str, Tensor]) -> None:
    losses = loss(batch["noise"] + 0.5, **batch)
    assert losses.keys() == {"loss", "mse"}
    torch.testing.assert_close(losses["loss"], torch.full((4,), 0.25, dtype=torch.float64))


def test_an_empty_batch(loss: HybridLoss) -> None:
    empty = torch.zeros(0, 2, 3, 5)
    assert loss(torch.zeros(0, 4, 3, 5), empty, empty, torch.zeros(0, dtype=torch.int64))["loss"].shape == (0,)
