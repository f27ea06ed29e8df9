"""The target on neuronx-distributed: all ranks of it in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_core.config import TargetConfig
from dflash_core.kv_cache import KVCache
from dflash_core.nxd.cache import StateCache
from dflash_core.nxd.parallel import NxdParallel
from dflash_core.nxd.program import CompiledProgram, Graph, compile_program, example, named
from dflash_core.parallel import SINGLE
from dflash_core.sampler import SamplerInputs
from dflash_core.shapes import StaticShapes
from dflash_core.step_shapes import TargetShape, target_shapes
from dflash_core.target import LlamaTarget
from dflash_core.target_runner import TargetRunner, load_target
from dflash_core.target_step import PrefillStep, StepOutput, TargetStep

CPU = torch.device("cpu")


class TargetProgram(nn.Module):
    """The verify and prefill steps; see `dflash_core.nxd.program`."""

    shape: TargetShape

    def __init__(self, model: LlamaTarget, cache: KVCache, shapes: StaticShapes) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.static_shapes = shapes
        self.steps = {False: TargetStep(model, cache), True: PrefillStep(model, cache)}

    def forward(
        self, tokens_BL: Tensor, slots_B: Tensor, starts_B: Tensor, lengths_B: Tensor
    ) -> tuple[Tensor, ...]:
        """chosen, accepted and, with tapped layers, features: of `StepOutput`."""
        step = self.steps[self.shape.prefill]
        output = step(tokens_BL, slots_B, starts_B, lengths_B, self.shape.context)
        features = [output.features_BLF] if self.model.tapped_layers else []
        return output.chosen_BL, output.accepted_B, *features

    def graphs(self) -> list[Graph]:
        return [
            Graph(
                shape,
                (example(shape.batch, shape.length), *(example(shape.batch) for _ in range(3))),
            )
            for shape in target_shapes(self.static_shapes)
        ]


class NxdStep:
    """A step of the program, called as `TargetStep` and `PrefillStep` are."""

    def __init__(self, program: CompiledProgram, *, prefill: bool, dtype: torch.dtype) -> None:
        self.program = program
        self.prefill = prefill
        self.dtype = dtype

    def __call__(
        self,
        tokens_BL: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        context_len: int,
        sampling: SamplerInputs | None = None,
    ) -> StepOutput:
        if sampling is not None:
            raise ValueError("no graph samples; set all_greedy: true, which refuses such requests")
        shape = TargetShape(self.prefill, *tokens_BL.shape, context_len)
        output = self.program(shape, tokens_BL, slots_B, starts_B, lengths_B)
        chosen_BL, accepted_B, *features = output
        none_BLF = torch.empty((*tokens_BL.shape, 0), dtype=self.dtype)
        return StepOutput(chosen_BL, accepted_B, features[0] if features else none_BLF)


class NxdTargetRunner(TargetRunner):
    """`TargetRunner`, whose steps are the graphs of a `TargetProgram`."""

    def __init__(
        self,
        program: CompiledProgram,
        config: TargetConfig,
        shapes: StaticShapes,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.dtype = dtype
        self.device = CPU  # of what goes in and comes out
        self.careful = False
        self.scratch_slot = shapes.num_slots
        self.step = self.sampled_step = NxdStep(program, prefill=False, dtype=dtype)
        self.prefill_step = NxdStep(program, prefill=True, dtype=dtype)
        self.sampled_prefill_step = self.prefill_step

    @classmethod
    def load(
        cls,
        folder: Path,
        shapes: StaticShapes,
        *,
        tapped_layers: tuple[int, ...] = (),
        dtype: torch.dtype,
        device: torch.device = CPU,
        tp: NxdParallel,
    ) -> NxdTargetRunner:
        """Load a checkpoint folder on all cores, compiled. Raises CheckpointError, ConfigError."""
        options = {"max_model_len": shapes.max_model_len, "tapped_layers": tapped_layers}
        whole = load_target(folder, **options, dtype=dtype, device=device, tp=SINGLE)
        config = whole.config

        def make() -> TargetProgram:
            model = LlamaTarget(config, **options, tp=tp)
            cache = StateCache(
                num_layers=config.num_layers,
                num_slots=shapes.num_slots,
                max_len=shapes.max_model_len,
                num_kv_heads=model.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
            )
            return TargetProgram(model, cache, shapes)

        return cls(
            compile_program(make, named(model=whole), dtype=dtype, tp=tp, name="target"),
            config,
            shapes,
            dtype,
        )
