"""The drafter on neuronx-distributed: all ranks of it in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_core.config import DrafterConfig
from dflash_core.draft_step import DraftStep, InjectStep
from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.drafter_runner import DrafterRunner, load_drafter
from dflash_core.kv_cache import KVCache
from dflash_core.nxd.cache import StateCache
from dflash_core.nxd.parallel import NxdParallel
from dflash_core.nxd.program import CompiledProgram, Graph, compile_program, example, named
from dflash_core.parallel import SINGLE
from dflash_core.shapes import StaticShapes
from dflash_core.step_shapes import DraftShape, InjectShape, draft_shapes, inject_shapes

CPU = torch.device("cpu")


class DrafterProgram(nn.Module):
    """The inject and draft steps; see `dflash_core.nxd.program`."""

    shape: InjectShape | DraftShape

    def __init__(
        self,
        model: DFlashDrafter,
        vocabulary: TargetVocabulary,
        cache: KVCache,
        shapes: StaticShapes,
        tp: NxdParallel,
    ) -> None:
        super().__init__()
        self.model = model
        self.vocabulary = vocabulary
        self.cache = cache
        self.static_shapes = shapes
        draft = DraftStep(model, vocabulary, cache, shapes.num_drafts, tp)
        self.steps = {InjectShape: InjectStep(model, cache), DraftShape: draft}

    def forward(
        self,
        features_RF: Tensor,
        row_slots_R: Tensor,
        row_positions_R: Tensor,
        tokens_B: Tensor | None = None,
        slots_B: Tensor | None = None,
        starts_B: Tensor | None = None,
        context_starts_B: Tensor | None = None,
    ) -> Tensor:
        """Drafts `[B, K]`; of an injection a result that nobody reads, as a graph needs one."""
        rows = features_RF, row_slots_R, row_positions_R
        step = self.steps[type(self.shape)]
        if isinstance(self.shape, InjectShape):
            step(*rows)
            return row_slots_R + row_positions_R
        sequences = tokens_B, slots_B, starts_B, context_starts_B
        return step(*rows, *sequences, self.shape.context)

    def graphs(self) -> list[Graph]:
        """Injections first. Every one of them writes all of the cache, so that the first graph's
        state is that of all."""
        width, dtype = self.model.feature_size, self.model.fc.weight.dtype

        def rows(number: int) -> tuple[Tensor, ...]:
            return example(number, width, dtype=dtype), example(number), example(number)

        graphs = [Graph(shape, rows(shape.rows)) for shape in inject_shapes(self.static_shapes)]
        for shape in draft_shapes(self.static_shapes):
            sequences = (example(shape.batch) for _ in range(4))
            graphs.append(Graph(shape, (*rows(shape.rows), *sequences)))
        return graphs


class NxdDrafterRunner(DrafterRunner):
    """`DrafterRunner`, whose steps are the graphs of a `DrafterProgram`."""

    def __init__(
        self,
        program: CompiledProgram,
        config: DrafterConfig,
        feature_size: int,
        shapes: StaticShapes,
        dtype: torch.dtype,
    ) -> None:
        self.program = program
        self.config = config
        self.feature_size = feature_size
        self.shapes = shapes
        self.dtype = dtype
        self.device = CPU  # of what goes in and comes out
        self.scratch_slot = shapes.num_slots

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        shapes: StaticShapes,
        *,
        dtype: torch.dtype,
        device: torch.device = CPU,
        tp: NxdParallel,
    ) -> NxdDrafterRunner:
        """Load both checkpoints on all cores, compiled. Raises CheckpointError, ConfigError."""
        whole, borrowed = load_drafter(
            folder,
            target_folder,
            max_model_len=shapes.max_model_len,
            dtype=dtype,
            device=device,
            tp=SINGLE,
        )
        config = whole.config
        vocab_size, hidden_size = borrowed.embed_tokens.weight.shape
        tied = borrowed.lm_head is None

        def make() -> DrafterProgram:
            model = DFlashDrafter(config, max_model_len=shapes.max_model_len, tp=tp)
            cache = StateCache(
                num_layers=config.num_layers,
                num_slots=shapes.num_slots,
                max_len=shapes.max_model_len + config.block_size,
                num_kv_heads=model.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
            )
            vocabulary = TargetVocabulary(vocab_size, hidden_size, tied, tp)
            return DrafterProgram(model, vocabulary, cache, shapes, tp)

        weights = named(model=whole, vocabulary=borrowed)
        program = compile_program(make, weights, dtype=dtype, tp=tp, name="drafter")
        return cls(program, config, whole.feature_size, shapes, dtype)

    def inject_step(self, *rows: Tensor) -> None:
        self.program(InjectShape(len(rows[0])), *rows)

    def step(self, features_RF: Tensor, *args: Tensor | int) -> Tensor:
        """As `DraftStep.forward`."""
        *tensors, context_len = args
        batch = len(tensors[-1])
        return self.program(DraftShape(batch, len(features_RF), context_len), features_RF, *tensors)
