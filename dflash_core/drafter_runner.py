"""One rank of the drafter: turns a DraftPlan into an injection and a block forward pass."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from dflash_core.checkpoint import Checkpoint, load_drafter_config, load_target_config
from dflash_core.config import DrafterConfig
from dflash_core.cpu import kernels
from dflash_core.draft_step import DraftStep, InjectStep
from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.kv_cache import KVCache
from dflash_core.loading import build
from dflash_core.messages import DraftPlan, DraftResult, Features, Span
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.plans import scratch_draft_plan
from dflash_core.runtime import compile_step, compiled, warm_shapes
from dflash_core.shapes import StaticShapes, bucket
from dflash_core.step_shapes import draft_shapes, inject_shapes

logger = logging.getLogger(__name__)


class DrafterRunner:
    """The draft model, the target's borrowed vocabulary, and the context cache.

    Args:
        model: this rank's share of the drafter.
        vocabulary: this rank's share of the target's embedding and head.
        shapes: the static shapes; `num_slots` is the drafter's own number of slots.
        dtype, device: of weights and cache.
    """

    def __init__(
        self,
        model: DFlashDrafter,
        vocabulary: TargetVocabulary,
        shapes: StaticShapes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.config: DrafterConfig = model.config
        self.feature_size = model.feature_size
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.tp = tp
        self.cache = KVCache(
            num_layers=self.config.num_layers,
            num_slots=shapes.num_slots,
            max_len=shapes.max_model_len + self.config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.scratch_slot = self.cache.scratch_slot
        self.inject_step = compile_step(InjectStep(model, self.cache), device)
        self.step = compile_step(
            DraftStep(model, vocabulary, self.cache, shapes.num_drafts, tp), device
        )

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        shapes: StaticShapes,
        *,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),
        tp: TensorParallel = SINGLE,
    ) -> DrafterRunner:
        """Load a drafter and the embedding and head of its target.

        Raises CheckpointError or ConfigError.
        """
        model, vocabulary = load_drafter(
            folder,
            target_folder,
            max_model_len=shapes.max_model_len,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        if tp.size == 1 and kernels.usable(dtype, device) and not compiled(device):
            model.pack()
            vocabulary.pack()
        return cls(model, vocabulary, shapes, dtype=dtype, device=device, tp=tp)

    @torch.inference_mode()
    def draft(self, plan: DraftPlan) -> DraftResult:
        """Run one plan. Every rank computes the same result.

        Raises ValueError: features of another width or dtype.
        """
        began = time.monotonic()
        if plan.features is not None:
            self._check(plan.features)
        sequences, rows = len(plan.tokens), len(plan.row_slots)
        # The rows of a decode step fit into the draft's own graph; a prompt's are injected first.
        batch = bucket(self.shapes.num_seqs_buckets, sequences) if sequences else 0
        own_rows = batch * (self.shapes.num_drafts + 1)
        if rows > own_rows:
            self.inject_step(*self._rows(plan, bucket(self.shapes.draft_row_buckets, rows)))
            rows = 0
        tokens = []
        if sequences:
            drafts_BK = self.step(
                *self._rows(plan if rows else None, own_rows),
                self._padded(plan.tokens, batch, 0),
                self._padded(plan.slots, batch, self.scratch_slot),
                self._padded(plan.starts, batch, 0),
                self._padded(plan.context_starts, batch, 0),
                bucket(self.shapes.context_buckets, max(1, int(plan.starts.max()))),
            )
            tokens = drafts_BK.tolist()[:sequences]
        return DraftResult(tokens, Span(began, time.monotonic()))

    def warm_up(self) -> None:
        """Run every shape once, on the scratch slot."""
        width = self.feature_size
        dtype = str(self.dtype).removeprefix("torch.")
        for shape in inject_shapes(self.shapes):
            data = np.zeros(shape.rows * width * self.dtype.itemsize, dtype=np.uint8)
            features = Features(data, shape.rows, width, dtype)
            self.draft(scratch_draft_plan(self.shapes, 0, features))
        shapes = warm_shapes(draft_shapes(self.shapes), self.device)
        for number, shape in enumerate(shapes, 1):
            if compiled(self.device):
                logger.info("drafter: step %d of %d, %s", number, len(shapes), shape)
            self.draft(scratch_draft_plan(self.shapes, shape.batch, None, start=shape.context))

    def _check(self, features: Features) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        if features.width != self.feature_size or features.dtype != dtype:
            raise ValueError(
                f"features are [{features.rows}, {features.width}] {features.dtype}; this drafter "
                f"takes width {self.feature_size} and {self.dtype}"
            )

    def _rows(self, plan: DraftPlan | None, padded: int) -> tuple[torch.Tensor, ...]:
        """Features, slots and positions of the plan's rows (None: of none), padded."""
        host_RF = torch.zeros((padded, self.feature_size), dtype=self.dtype)
        slots = positions = np.zeros(0, dtype=np.int32)
        if plan is not None:
            slots, positions, data = plan.row_slots, plan.row_positions, plan.features.data
            # The bytes may lie in shared memory that the sender will reuse: this copy is the
            # transfer.
            host_RF.view(torch.uint8).view(-1).numpy()[: data.nbytes] = data
        return (
            host_RF.to(self.device),
            self._padded(slots, padded, self.scratch_slot),
            self._padded(positions, padded, 0),
        )

    def _padded(self, values: np.ndarray, length: int, fill: int) -> torch.Tensor:
        padded = np.full(length, fill, dtype=np.int32)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self.device)


def load_drafter(
    folder: Path,
    target_folder: Path,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> tuple[DFlashDrafter, TargetVocabulary]:
    """This rank's share of a drafter, and of the embedding and head of its target.

    Raises CheckpointError or ConfigError.
    """
    config = load_drafter_config(folder)
    target = load_target_config(target_folder)
    model = build(
        lambda: DFlashDrafter(config, max_model_len=max_model_len, tp=tp),
        Checkpoint(folder),
        dtype=dtype,
        device=device,
    )
    vocabulary = build(
        lambda: TargetVocabulary(
            target.vocab_size, target.hidden_size, target.tie_word_embeddings, tp
        ),
        Checkpoint(target_folder),
        dtype=dtype,
        device=device,
        prefix="model.",
        partial=True,
    )
    return model, vocabulary
