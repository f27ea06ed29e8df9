"""Every graph that the server compiles: the steps of both models at all of their static shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.draft_step import DraftStep, InjectStep
from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.kv_cache import KVCache
from dflash_core.parallel import TensorParallel
from dflash_core.shapes import StaticShapes
from dflash_core.step_shapes import draft_shapes, inject_shapes, target_shapes
from dflash_core.target import LlamaTarget
from dflash_core.target_step import PrefillStep, TargetStep

META = torch.device("meta")


@dataclass(frozen=True)
class Graph:
    """A step and the shapes it is compiled for.

    Attributes:
        kind: "verify", "prefill", "inject" or "draft".
        sizes: what distinguishes it from others of its kind, e.g. {"B": 1, "L": 10, "C": 512}.
        step: the module, on the meta device.
        args: meta tensors and the context length.
    """

    kind: str
    sizes: dict[str, int]
    step: nn.Module
    args: tuple[Tensor | int, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {' '.join(f'{name}={size}' for name, size in self.sizes.items())}"


def target_graphs(
    config: TargetConfig,
    shapes: StaticShapes,
    tapped_layers: tuple[int, ...],
    *,
    dtype: torch.dtype,
    tp: TensorParallel,
) -> list[Graph]:
    """The graphs of one rank of the target. Greedy requests only: sampling runs beside them."""
    with META:
        model = LlamaTarget(
            config, max_model_len=shapes.max_model_len, tapped_layers=tapped_layers, tp=tp
        )
    _on_meta(model, dtype)
    cache = _cache(model, config, shapes.num_slots, shapes.max_model_len, dtype)
    verify, prefill = TargetStep(model, cache), PrefillStep(model, cache)
    graphs = []
    for shape in target_shapes(shapes):
        sizes = {"B": shape.batch, "L": shape.length, "C": shape.context}
        sequences = (_int32(shape.batch) for _ in range(3))
        args = (_int32(shape.batch, shape.length), *sequences, shape.context)
        kind, step = ("prefill", prefill) if shape.prefill else ("verify", verify)
        graphs.append(Graph(kind, sizes, step, args))
    return graphs


def drafter_graphs(
    config: DrafterConfig,
    target: TargetConfig,
    shapes: StaticShapes,
    *,
    dtype: torch.dtype,
    tp: TensorParallel,
) -> list[Graph]:
    """The graphs of one rank of the drafter.

    Args:
        target: whose embedding and head it borrows.
        shapes: the drafter's own: its slots are those of all Verifiers that share it.
    """
    with META:
        model = DFlashDrafter(config, max_model_len=shapes.max_model_len, tp=tp)
        vocabulary = TargetVocabulary(
            target.vocab_size, target.hidden_size, target.tie_word_embeddings, tp
        )
    _on_meta(model, dtype)
    _on_meta(vocabulary, dtype)
    length = shapes.max_model_len + config.block_size  # room for the last block
    cache = _cache(model, config, shapes.num_slots, length, dtype)
    inject = InjectStep(model, cache)
    draft = DraftStep(model, vocabulary, cache, shapes.num_drafts, tp)
    width = model.feature_size

    def context_rows(rows: int) -> tuple[Tensor, ...]:
        features = torch.empty((rows, width), dtype=dtype, device=META)
        return features, _int32(rows), _int32(rows)

    graphs = [
        Graph("inject", {"R": shape.rows}, inject, context_rows(shape.rows))
        for shape in inject_shapes(shapes)
    ]
    for shape in draft_shapes(shapes):
        sequences = (_int32(shape.batch) for _ in range(4))
        args = (*context_rows(shape.rows), *sequences, shape.context)
        sizes = {"B": shape.batch, "R": shape.rows, "C": shape.context}
        graphs.append(Graph("draft", sizes, draft, args))
    return graphs


def _cache(
    model: LlamaTarget | DFlashDrafter,
    config: TargetConfig | DrafterConfig,
    num_slots: int,
    max_len: int,
    dtype: torch.dtype,
) -> KVCache:
    heads = model.layers[0].self_attn.num_kv_heads
    return KVCache(
        num_layers=config.num_layers,
        num_slots=num_slots,
        max_len=max_len,
        num_kv_heads=heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=META,
    )


def _on_meta(model: nn.Module, dtype: torch.dtype) -> None:
    """As loading does it: parameters in the model's dtype, buffers in their own."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    model.to(META).eval()


def _int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
