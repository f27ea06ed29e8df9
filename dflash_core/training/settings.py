"""All options of a training project, in one typed tree; one YAML file holds them."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash_core.training.errors import TrainingError
from dflash_core.training.generation import GenerationSettings


@dataclass(frozen=True)
class DraftModelSettings:
    """Shape of the drafter; everything else is the target's.

    Attributes:
        mask_token_id: one that never occurs in the target's text (SmolLM2: 16, Llama 3: 128002).
        layers: number of draft layers.
        block_size: L, drafts per step plus one.
        target_layer_ids: tapped layers; None for z-lab's evenly spread ones.
        initial: folder of a drafter to start from; None to start from the target's own layers.
    """

    mask_token_id: int
    layers: int = 3
    block_size: int = 8
    target_layer_ids: tuple[int, ...] | None = None
    initial: str | None = None


@dataclass(frozen=True)
class OptimizationSettings:
    """One training run.

    Attributes:
        steps: optimizer steps in all.
        batch_size: conversations per step.
        anchors: blocks per conversation and step.
        learning_rate: its peak; linear warm-up, then a cosine down to a twentieth.
        warmup: steps.
        weight_decay, clip: AdamW's decay of matrices; largest gradient norm.
        average: the drafter that is kept is an average over the run's last steps; how much of it
            each step keeps (0: the last step's weights alone).
        decay: how fast the weight of later drafts falls, `exp(-(k - 1) / decay)`.
        chain: share of that weight that a draft has only where those before it are right.
        short: share of the steps whose blocks have half of the drafts only: nearly as much is
            learned, in little more than half of the time.
        teacher: share of the target's distribution in the labels (0: only its tokens).
        frequent, sampled: tokens that take part in the loss (see `loss.py`).
        save_every: steps between checkpoints.
        seed: of data order, anchors and initialisation.
    """

    steps: int = 2000
    batch_size: int = 16
    anchors: int = 32
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.0
    decay: float = 4.0
    chain: float = 0.0
    short: float = 0.0
    teacher: float = 0.5
    frequent: int = 8192
    sampled: int = 1024
    save_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class TrainingSettings:
    """A training project.

    Attributes:
        target: hub id, folder or package:// name of the target.
        folder: where everything that is produced goes.
        drafter: what to train.
        conversations: size of the training set.
        held_out: conversations that are kept apart to evaluate with.
        prompts: file with user messages (*.txt, *.jsonl); None to let the target write them.
        corpus: folder of packed conversations (`pack`) to begin with; None to begin with none.
        threads: CPU threads.
    """

    target: str
    folder: str
    drafter: DraftModelSettings
    conversations: int = 10000
    held_out: int = 192
    prompts: str | None = None
    corpus: str | None = None
    threads: int = 2
    seed: int = 0
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


def load_settings(path: Path) -> TrainingSettings:
    """Read a YAML file. Raises TrainingError, naming the field."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise TrainingError(f"{path}: cannot be read as YAML: {error}") from error
    return _typed(TrainingSettings, raw, str(path))


def _typed(cls: type, raw: Any, place: str) -> Any:
    if not isinstance(raw, dict):
        raise TrainingError(f"{place}: is {raw!r}, not a mapping of fields to values")
    types = typing.get_type_hints(cls)
    unknown = sorted(raw.keys() - types.keys())
    if unknown:
        raise TrainingError(
            f"{place}: unknown field {unknown[0]!r}; there are {', '.join(sorted(types))}"
        )
    values = {name: _value(types[name], value, f"{place}: {name}") for name, value in raw.items()}
    for item in dataclasses.fields(cls):
        required = item.default is item.default_factory is dataclasses.MISSING
        if required and item.name not in values:
            raise TrainingError(f"{place}: required field {item.name} is missing")
    return cls(**values)


def _value(wanted: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(wanted):
        return _typed(wanted, value, place)
    choices = typing.get_args(wanted) if type(None) in typing.get_args(wanted) else (wanted,)
    if value is None and type(None) in choices:
        return None
    wanted = choices[0]
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise TrainingError(f"{place} is {value!r}, not a list of integers")
    if wanted is float and type(value) in (int, float):
        return float(value)
    if type(value) is wanted:
        return value
    raise TrainingError(f"{place} is {value!r}, not of type {wanted.__name__}")
