"""The forward process of a diffusion model and the loss that its denoiser is trained with.

Papers: "Denoising Diffusion Probabilistic Models" (arXiv 2006.11239), "Improved DDPM" (arXiv 2102.09672); the schedule
and the choice of terms are DiT's (arXiv 2212.09748).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from weightformer.tasks.generation.pipeline import create_scheduler

__all__ = ["HybridLoss"]


class HybridLoss(nn.Module):
    """``|eps - eps_hat|^2 + num_steps / 1000 * L_vlb`` per sample (Improved DDPM, section 3.1, for one sampled step).

    L_vlb is the bound's term of that step in bits a dimension: the divergence between the true posterior of x_{t-1} and
    the predicted one, and at step 0 the likelihood of the data in bins of 1/127.5. It trains the variance alone: the
    predicted mean is detached in it. The variance is an exponent between those of beta_t (output 1) and of the true
    posterior (output -1). Everything is computed in float32 at least.

    Tables over the steps, each (num_steps,):
        signal, noise: sqrt(alpha_bar), sqrt(1 - alpha_bar).
        posterior_variance: of x_{t-1} given x_t and x_0.
        posterior_log_variance: its logarithm; that of step 1 also at step 0, whose variance is 0.
        posterior_clean, posterior_noisy: weights of x_0 and x_t in the posterior's mean.
    """

    signal: Tensor
    noise: Tensor
    log_beta: Tensor
    posterior_variance: Tensor
    posterior_log_variance: Tensor
    posterior_clean: Tensor
    posterior_noisy: Tensor

    def __init__(self) -> None:
        super().__init__()
        schedule: Any = create_scheduler("ddpm")
        beta = schedule.betas.double()
        alpha_bar = (1 - beta).cumprod(0)
        before = torch.cat((alpha_bar.new_ones(1), alpha_bar[:-1]))
        variance = beta * (1 - before) / (1 - alpha_bar)
        tables = {
            "signal": alpha_bar.sqrt(),
            "noise": (1 - alpha_bar).sqrt(),
            "log_beta": beta.log(),
            "posterior_variance": variance,
            "posterior_log_variance": torch.cat((variance[1:2], variance[1:])).log(),
            "posterior_clean": beta * before.sqrt() / (1 - alpha_bar),
            "posterior_noisy": (1 - before) * (1 - beta).sqrt() / (1 - alpha_bar),
        }
        self.num_steps = len(beta)
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def add_noise(self, clean: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """x_t (B, C, H, W) from clean samples, standard normal noise and steps (B,)."""
        return _at(self.signal, step) * clean + _at(self.noise, step) * noise

    def forward(self, output: Tensor, clean: Tensor, noise: Tensor, step: Tensor) -> dict[str, Tensor]:
        """The loss of each sample.

        Args:
            output: of the denoiser on `add_noise`'s x_t: the noise (B, C, H, W), with learned variance (B, 2 C, H, W).
            clean: x_0 (B, C, H, W).
            noise: what x_t was made with.
            step: t, (B,).

        Returns:
            ``loss`` (B,) and its parts: ``mse``, and with learned variance ``vb``, in bits a dimension.
        """
        output, clean, noise = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (output, clean, noise))
        predicted, *variance = output.split(clean.shape[1], dim=1)
        mse = (noise - predicted).square().mean(dim=(1, 2, 3))
        if not variance:
            return {"loss": mse, "mse": mse}
        vb = self._bound(predicted.detach(), variance[0], clean, noise, step)
        return {"loss": mse + self.num_steps / 1000 * vb, "mse": mse, "vb": vb}

    def _bound(self, predicted: Tensor, variance: Tensor, clean: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        noisy = self.add_noise(clean, noise, step)
        guess = (noisy - _at(self.noise, step) * predicted) / _at(self.signal, step)
        weight = _at(self.posterior_clean, step)
        mean = weight * guess + _at(self.posterior_noisy, step) * noisy
        true_log = _at(self.posterior_log_variance, step)
        log = true_log + (variance + 1) / 2 * (_at(self.log_beta, step) - true_log)
        gap = weight * (clean - guess)
        divergence = 0.5 * (log - true_log - 1 + (true_log - log).exp() + gap.square() * (-log).exp())
        nats = torch.where(step.view(-1, 1, 1, 1) == 0, -_log_likelihood(clean, mean, log / 2), divergence)
        return nats.mean(dim=(1, 2, 3)) / math.log(2)


def _log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Of values in [-1, 1] in 256 bins, the outer two open, under a Gaussian; its CDF by DDPM's tanh formula."""
    upper, lower = (_normal_cdf((x - mean + side) * (-log_std).exp()) for side in (1 / 255, -1 / 255))
    upper = upper.masked_fill(x > 0.999, 1)
    lower = lower.masked_fill(x < -0.999, 0)
    return (upper - lower).clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _at(table: Tensor, step: Tensor) -> Tensor:
    """A table's values at steps (B,), to multiply maps with."""
    return table[step].view(-1, 1, 1, 1)
