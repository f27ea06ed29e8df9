"""One rank of the target: turns a VerifyPlan into one fixed-shape forward pass."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from dflash_core import sampler
from dflash_core.checkpoint import Checkpoint, load_target_config
from dflash_core.config import TargetConfig
from dflash_core.cpu import kernels
from dflash_core.cpu.rounding import MIN_PRODUCT_ROWS, attention_length, rounding_differs
from dflash_core.kv_cache import KVCache
from dflash_core.loading import build
from dflash_core.messages import Features, Span, VerifyPlan, VerifyResult
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.plans import scratch_verify_plan
from dflash_core.runtime import compile_step, compiled, warm_shapes
from dflash_core.shapes import StaticShapes, bucket
from dflash_core.step_shapes import target_shapes
from dflash_core.target import LlamaTarget
from dflash_core.target_step import PrefillStep, TargetStep

logger = logging.getLogger(__name__)


class TargetRunner:
    """The target model with its KV cache.

    Args:
        model: this rank's share of the target.
        shapes: the static shapes.
        dtype, device: of weights and cache.
    """

    def __init__(
        self,
        model: LlamaTarget,
        shapes: StaticShapes,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model = model
        self.config: TargetConfig = model.config
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.careful = model.packed_layers is None and rounding_differs(dtype, device)
        self.cache = KVCache(
            num_layers=self.config.num_layers,
            num_slots=shapes.num_slots,
            max_len=self._attention_length(shapes.max_model_len),
            num_kv_heads=model.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.scratch_slot = self.cache.scratch_slot
        plain = TargetStep(model, self.cache), PrefillStep(model, self.cache)
        self.step, self.prefill_step = (compile_step(step, device) for step in plain)
        # The sampler looks at as many candidates as the logits call for: no static graph.
        self.sampled_step, self.sampled_prefill_step = plain

    @classmethod
    def load(
        cls,
        folder: Path,
        shapes: StaticShapes,
        *,
        tapped_layers: tuple[int, ...] = (),
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),
        tp: TensorParallel = SINGLE,
    ) -> TargetRunner:
        """Load a checkpoint folder. Raises CheckpointError or ConfigError."""
        model = load_target(
            folder,
            max_model_len=shapes.max_model_len,
            tapped_layers=tapped_layers,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        if tp.size == 1 and kernels.usable(dtype, device) and not compiled(device):
            model.pack()
        return cls(model, shapes, dtype=dtype, device=device)

    @torch.inference_mode()
    def verify(self, plan: VerifyPlan) -> VerifyResult:
        """Run one plan. Every rank computes the same result."""
        began = time.monotonic()
        sequences = len(plan.slots)
        tokens_BL, slots_B, starts_B, lengths_B = self._inputs(plan)
        context_len = bucket(
            self.shapes.context_buckets,
            min(int((plan.starts + plan.lengths).max()), self.shapes.max_model_len),
        )
        context_len = self._attention_length(context_len)
        sampling = None
        if plan.sampling is not None:
            sampling = sampler.sampler_inputs(
                plan.sampling, len(tokens_BL), self.config.vocab_size, self.device
            )
        if sampling is None:
            step = self.prefill_step if plan.prefill else self.step
        else:
            step = self.sampled_prefill_step if plan.prefill else self.sampled_step
        output = step(tokens_BL, slots_B, starts_B, lengths_B, context_len, sampling)
        emitted = (output.accepted_B[:sequences] + 1).tolist()
        chosen = output.chosen_BL[:sequences].tolist()
        tokens = [row[:count] for row, count in zip(chosen, emitted, strict=True)]
        committed = plan.lengths.tolist() if plan.prefill else emitted
        logprobs = None
        if plan.sampling is not None and plan.sampling.num_logprobs.max() >= 0:
            logprobs = sampler.logprobs(
                output.logits_BLV[:sequences], tokens, plan.sampling.num_logprobs
            )
        features = self._pack(output.features_BLF, committed) if plan.with_features else None
        return VerifyResult(tokens, features, Span(began, time.monotonic()), logprobs)

    def warm_up(self) -> None:
        """Run every shape once, on the scratch slot."""
        shapes = warm_shapes(target_shapes(self.shapes), self.device)
        for number, shape in enumerate(shapes, 1):
            if compiled(self.device):
                logger.info("target: step %d of %d, %s", number, len(shapes), shape)
            plan = scratch_verify_plan(
                self.shapes,
                shape.batch,
                shape.length,
                prefill=shape.prefill,
                start=shape.context - shape.length,
            )
            self.verify(plan)

    def _attention_length(self, positions: int) -> int:
        return attention_length(positions) if self.careful else positions

    def _inputs(self, plan: VerifyPlan) -> tuple[torch.Tensor, ...]:
        """Pad the plan to its bucket; padding sequences live in the scratch slot."""
        sequences, length = plan.tokens.shape
        batch = sequences if plan.prefill else bucket(self.shapes.num_seqs_buckets, sequences)
        if self.careful:
            length = max(length, -(-MIN_PRODUCT_ROWS // batch))
        tokens = np.zeros((batch, length), dtype=np.int32)
        slots = np.full(batch, self.scratch_slot, dtype=np.int32)
        starts = np.zeros(batch, dtype=np.int32)
        lengths = np.ones(batch, dtype=np.int32)
        tokens[:sequences, : plan.tokens.shape[1]] = plan.tokens
        slots[:sequences] = plan.slots
        starts[:sequences] = plan.starts
        lengths[:sequences] = plan.lengths
        return tuple(
            torch.from_numpy(array).to(self.device) for array in (tokens, slots, starts, lengths)
        )

    def _pack(self, features_BLF: torch.Tensor, committed: list[int]) -> Features:
        """The first `committed[b]` rows of each sequence as one byte string."""
        width = features_BLF.shape[-1]
        rows = [features_BLF[b, :count] for b, count in enumerate(committed)]
        packed = torch.cat(rows).contiguous().cpu()
        data = packed.view(torch.uint8).reshape(-1).numpy()
        return Features(data, len(packed), width, str(self.dtype).removeprefix("torch."))


def load_target(
    folder: Path,
    *,
    max_model_len: int,
    tapped_layers: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> LlamaTarget:
    """This rank's share of a checkpoint folder. Raises CheckpointError or ConfigError."""
    config = load_target_config(folder)
    tied = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
    return build(
        lambda: LlamaTarget(
            config, max_model_len=max_model_len, tapped_layers=tapped_layers, tp=tp
        ),
        Checkpoint(folder),
        dtype=dtype,
        device=device,
        prefix="model.",
        unused=tied,
    )
