"""AdamW on float32 master weights of a bfloat16 model.

The model itself, which runs, is exactly what will be served; its gradients are bfloat16. Small
updates would be lost in bfloat16 weights, so they accumulate in float32 copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dflash_core.training.settings import OptimizationSettings

# The batches are small (about a thousand tokens): a second moment over 200 of them is steadier than
# over the customary 20 (Marek et al., "Small batch size training for language models", 2025).
BETAS = (0.9, 0.995)
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine


class MasterWeights:
    """Args: model in its compute dtype; masters, the same weights in float32, by name."""

    def __init__(
        self,
        model: nn.Module,
        masters: dict[str, torch.Tensor],
        settings: OptimizationSettings,
    ) -> None:
        self.settings = settings
        self.parameters = dict(model.named_parameters())
        self.masters = {name: masters[name].detach().float().clone() for name in self.parameters}
        matrices = [weight for weight in self.masters.values() if weight.ndim > 1]
        self.averages = {name: weight.clone() for name, weight in self.masters.items()}
        vectors = [weight for weight in self.masters.values() if weight.ndim == 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=BETAS,
            fused=True,
        )
        self.publish(self.masters)

    @torch.no_grad()
    def step(self, step: int, gradients: list[tuple[torch.Tensor, ...]]) -> float:
        """Apply the mean of some gradients, each in the order of the parameters; returns its norm
        before clipping."""
        for master, parts in zip(self.masters.values(), zip(*gradients, strict=True), strict=True):
            master.grad = sum(part.float() for part in parts) / len(parts)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.settings.clip)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        self.adam.step()
        for master in self.masters.values():
            master.grad = None
        self.publish(self.masters)
        # Early on the average is short: what it starts from is worth nothing if it is random.
        kept = min(self.settings.average, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self.averages.values()), list(self.masters.values()), weight=1 - kept
        )
        return float(norm)

    @property
    def result(self) -> Mapping[str, torch.Tensor]:
        """The weights to keep: averaged over the last steps, which serves as a learning rate that
        has come down, whenever the run is stopped."""
        return self.averages

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": self.masters,
            "averages": self.averages,
            "adam": self.adam.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
            self.averages[name].copy_(state["averages"][name])
        self.adam.load_state_dict(state["adam"])
        self.publish(self.masters)

    @torch.no_grad()
    def publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Let the model run with these weights."""
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def learning_rate(step: int, settings: OptimizationSettings) -> float:
    """Linear warm-up, then half a cosine down to FLOOR of the peak."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.learning_rate * (FLOOR + (1 - FLOOR) * cosine)
