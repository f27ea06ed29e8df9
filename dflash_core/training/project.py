"""A training project: its settings and everything that lies in its folder.

- train.jsonl, held_out.jsonl: conversations
- train-<layers>.bf16, held_out-<layers>.bf16: their features for these tapped layers
- checkpoint.pt, log.jsonl: state and reports of the training run
- drafter/: the z-lab-format checkpoint
- evaluation.json, evaluation.png
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dflash_core import package
from dflash_core.checkpoint import Checkpoint, load_drafter_config, load_target_config, resolve
from dflash_core.config import DrafterConfig, TargetConfig, default_target_layer_ids, drafter_config
from dflash_core.drafter import TargetVocabulary
from dflash_core.loading import build
from dflash_core.random_drafter import drafter_json
from dflash_core.target import LlamaTarget
from dflash_core.tokenizer import load_tokenizer
from dflash_core.training.conversations import Conversation, read_conversations
from dflash_core.training.errors import TrainingError
from dflash_core.training.features import FeatureFile
from dflash_core.training.settings import TrainingSettings

CPU = torch.device("cpu")


class Project:
    """Args: settings, and the compute dtype (bfloat16 where it is fast)."""

    def __init__(self, settings: TrainingSettings, dtype: torch.dtype = torch.bfloat16) -> None:
        self.settings = settings
        self.dtype = dtype
        self.folder = settings.path

    @cached_property
    def target_folder(self) -> Path:
        return resolve(self.settings.target)

    @cached_property
    def target_config(self) -> TargetConfig:
        return load_target_config(self.target_folder)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.target_folder)

    @cached_property
    def drafter_json(self) -> dict[str, Any]:
        """The drafter's config.json."""
        wanted, target = self.settings.drafter, self.target_config
        if wanted.mask_token_id >= target.vocab_size:
            raise TrainingError(
                f"drafter.mask_token_id = {wanted.mask_token_id} is not in the target's vocabulary "
                f"of {target.vocab_size}"
            )
        taps = wanted.target_layer_ids
        return drafter_json(
            target,
            layers=wanted.layers,
            block_size=wanted.block_size,
            mask_token_id=wanted.mask_token_id,
            target_layer_ids=taps or default_target_layer_ids(target.num_layers, wanted.layers),
        )

    @cached_property
    def drafter_config(self) -> DrafterConfig:
        return drafter_config(self.drafter_json)

    @property
    def width(self) -> int:
        """Of a row of the feature files: the tapped layers and the final state."""
        return (len(self.drafter_config.target_layer_ids) + 1) * self.target_config.hidden_size

    def path(self, name: str) -> Path:
        return self.folder / name

    def features_path(self, part: str) -> Path:
        layers = "_".join(map(str, self.drafter_config.target_layer_ids))
        return self.path(f"{part}-{layers}.bf16")

    def conversations(self, part: str) -> list[Conversation]:
        """`train` or `held_out`. Raises TrainingError: none there, or a bad line."""
        path = self.path(f"{part}.jsonl")
        conversations = list(read_conversations(path)) if path.exists() else []
        if not conversations:
            raise TrainingError(f"{path}: holds no conversations; run the `data` command first")
        vocabulary = self.target_config.vocab_size
        for number, conversation in enumerate(conversations, start=1):
            if max(conversation.tokens) >= vocabulary:
                raise TrainingError(
                    f"{path}, line {number}: token {max(conversation.tokens)} is not in the "
                    f"target's vocabulary of {vocabulary}; this set is of another target"
                )
        return conversations

    def target(self, *, longest: int, tapped: bool = True) -> LlamaTarget:
        """The target, for sequences of up to `longest` tokens."""
        config = self.target_config
        return build(
            lambda: LlamaTarget(
                config,
                max_model_len=longest,
                tapped_layers=self.drafter_config.target_layer_ids if tapped else (),
            ),
            Checkpoint(self.target_folder),
            dtype=self.dtype,
            device=CPU,
            prefix="model.",
            unused=frozenset({"lm_head.weight"} if config.tie_word_embeddings else ()),
        )

    def vocabulary(self) -> TargetVocabulary:
        config = self.target_config
        return build(
            lambda: TargetVocabulary(
                config.vocab_size, config.hidden_size, config.tie_word_embeddings
            ),
            Checkpoint(self.target_folder),
            dtype=self.dtype,
            device=CPU,
            prefix="model.",
            partial=True,
        )

    def initial_weights(self) -> dict[str, Tensor] | None:
        """Those of the drafter that `drafter.initial` names. Raises TrainingError."""
        if self.settings.drafter.initial is None:
            return None
        folder = resolve(self.settings.drafter.initial)
        config = load_drafter_config(folder)
        if config != self.drafter_config:
            raise TrainingError(
                f"drafter.initial = {folder}: its config.json differs from the drafter that these "
                "settings describe; make layers, block_size, target_layer_ids, mask_token_id agree"
            )
        checkpoint = Checkpoint(folder)
        return {name: checkpoint.read(name) for name in checkpoint.names()}

    def held_out_answers(self, *, greedy: bool) -> Iterator[tuple[Conversation, Tensor]]:
        """Held-out conversations with their features, without the final state."""
        conversations = self.conversations("held_out")
        features = FeatureFile(self.features_path("held_out"), conversations, self.width)
        for index, conversation in enumerate(conversations):
            if conversation.greedy == greedy:
                rows = torch.empty((len(conversation.tokens), self.width), dtype=torch.bfloat16)
                features.read(index, rows)
                yield conversation, rows[:, : -self.target_config.hidden_size]

    def target_digest(self) -> str:
        """SHA-256 of the target's file, or of its safetensors files in order of their names."""
        if self.settings.target.startswith(package.SCHEME):
            files = [package.find(self.settings.target)]
        else:
            files = sorted(self.target_folder.glob("*.safetensors"))
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def export(self, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> Path:
        """Write the z-lab-format checkpoint with a model card. Raises TrainingError."""
        folder = self.path("drafter")
        tensors = {name: weight.detach().bfloat16() for name, weight in weights.items()}
        config = json.dumps(self.drafter_json, indent=2) + "\n"
        replace_file(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        replace_file(folder / "config.json", config.encode())
        replace_file(folder / "README.md", model_card(self.settings, facts).encode())
        return folder


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all. Raises TrainingError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(
            f"{path}: cannot be written ({os.strerror(error.errno or 0)}); the file before it is "
            "kept: make room and run the same command again"
        ) from error
    temporary.replace(path)


def model_card(settings: TrainingSettings, facts: dict[str, Any]) -> str:
    """README.md of a drafter: what it is for and how it came about."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    recipe = asdict(settings)
    recipe.pop("folder")
    return f"""# DFlash drafter for {settings.target}

Trained with `python -m dflash_core.training` for exactly this target, on the target's own words.
Weights are in z-lab's format; embedding and head are the target's and not part of the file.

| fact | value |
| --- | --- |
{rows}

## Settings

```json
{json.dumps(recipe, indent=2)}
```
"""
