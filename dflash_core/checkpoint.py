"""Checkpoints on disk: what a model's name stands for, and strict reading of its safetensors.

Weights are read from safetensors only: no pickle, no code from the checkpoint. Files are memory
mapped, so a tensor-parallel rank that asks for a slice reads just that slice.

`python -m dflash_core.checkpoint MODEL...` fetches models and reports on each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from dflash_core import gguf, hub, package
from dflash_core.config import DrafterConfig, TargetConfig, drafter_config, target_config
from dflash_core.errors import CheckpointError, ConfigError
from dflash_core.sampling import InvalidSampling, sampling_defaults

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "check_access",
    "load_drafter_config",
    "load_target_config",
    "resolve",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(model: str, *, revision: str | None = None) -> Path:
    """The folder of a model: config.json, safetensors and, for a target, its tokenizer.

    Args:
        model: a local folder, a Hugging Face hub id (downloaded into the hub's own cache), or
            `package://module/path` (in an installed Python package: a folder, or a GGUF file,
            which is converted once).
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: the model is not there or not reachable; the message says what to do.
    """
    local = _local(model)
    if local is None:
        return hub.download(model, revision)
    return gguf.converted(local) if local.is_file() else local


def check_access(models: Sequence[tuple[str, str | None]]) -> None:
    """Make sure that all of these can be had before a byte of weights is fetched for any of them.

    Args:
        models: names and revisions, as for `resolve`.

    Raises:
        CheckpointError: for more than one model, with a line for each: its remedy, or that it is
            accessible.
    """
    lines, failures = [], []
    for model, revision in models:
        try:
            if _local(model) is None:
                hub.check_access(model, revision)
            lines.append(f"{model}: accessible")
        except CheckpointError as error:
            lines.append(str(error))
            failures.append(error)
    if not failures:
        return
    if len(models) == 1:
        raise failures[0]
    summary = f"{len(failures)} of {len(models)} models cannot be used:"
    raise CheckpointError("\n  ".join([summary, *lines])) from failures[0]


def _local(model: str) -> Path | None:
    """The folder or GGUF file that a name stands for; None for a hub id. Raises CheckpointError."""
    if model.startswith(package.SCHEME):
        folder = package.find(model)
        if folder.is_file():
            return folder
    else:
        folder = Path(model).expanduser()
    if model and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: no config.json, so this is no checkpoint")
        return folder.resolve()
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise CheckpointError(
            f"{model}: no such folder. A model is a folder with config.json and *.safetensors, a "
            f"hub id like meta-llama/Llama-3.1-8B-Instruct, or {package.SCHEME}module/file.gguf"
        )
    return None


class Checkpoint:
    """An opened checkpoint folder; tensors are read when asked for.

    All files are opened at once, so that a missing or damaged one is reported before any model is
    built. Raises CheckpointError.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self._files = {}  # tensor name -> the open file that holds it
        index = self.folder / INDEX_NAME
        if index.is_file():
            self._open_shards(index)
        else:
            file = _open(self._single_file())
            self._files = dict.fromkeys(file.keys(), file)

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, name: str, *, dim: int | None = None, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """One tensor in its stored dtype, or its `[start, start + length)` along `dim`.

        `length` None reads to the end. Raises CheckpointError on an unknown name or range.
        """
        if dim is None:
            return self._file(name).get_tensor(name)
        shape = self.shape(name)
        stop = shape[dim] if length is None else start + length
        if not 0 <= start <= stop <= shape[dim]:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(shape)}; [{start}, {stop}) is not within "
                f"its dimension {dim}"
            )
        return self._slice(name)[(slice(None),) * dim + (slice(start, stop),)]

    def _file(self, name: str) -> Any:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: there is no tensor named {name}") from None

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: shard {shard!r} is not a file name")
        missing = [shard for shard in shards if not (self.folder / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(shards)} shards are missing: "
                f"{', '.join(missing[:4])}; download the model again"
            )
        files = {shard: _open(self.folder / shard) for shard in shards}
        held = {shard: frozenset(file.keys()) for shard, file in files.items()}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise CheckpointError(
                    f"{self.folder}: {INDEX_NAME} places {name} in {shard}, which lacks it; the "
                    "files belong to different versions, download the model again"
                )
            self._files[name] = files[shard]

    def _single_file(self) -> Path:
        candidates = sorted(self.folder.glob("*.safetensors"))
        named = self.folder / SINGLE_NAME
        if named in candidates:
            return named
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise CheckpointError(
                f"{self.folder}: {len(candidates)} *.safetensors files but no {INDEX_NAME}"
            )
        pickled = sorted(
            path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")
        )
        reason = (
            f"only {', '.join(pickled[:3])}: pickle files can run code when they are read, so they "
            "are refused; convert the weights to safetensors"
            if pickled
            else "look for a release of the model in safetensors format"
        )
        raise CheckpointError(f"{self.folder}: no *.safetensors file, {reason}")


def load_target_config(folder: str | Path) -> TargetConfig:
    """The target's config; end-of-sequence ids are those of generation_config.json if it has any,
    as in transformers' `generate`. Raises CheckpointError, ConfigError.
    """
    raw = read_json(Path(folder) / "config.json")
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw = raw | {"eos_token_id": eos}
    return _in_folder(folder, target_config, raw)


def load_sampling_defaults(folder: str | Path) -> dict[str, float]:
    """The sampling parameters in generation_config.json, none without that file.

    Raises CheckpointError, ConfigError.
    """
    generation = Path(folder) / "generation_config.json"
    if not generation.is_file():
        return {}
    try:
        return sampling_defaults(read_json(generation))
    except InvalidSampling as error:
        raise ConfigError(f"{generation}: {error}") from error


def load_drafter_config(folder: str | Path) -> DrafterConfig:
    """The drafter's config. Raises CheckpointError, ConfigError."""
    return _in_folder(folder, drafter_config, read_json(Path(folder) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def _in_folder(folder: str | Path, normalise: Any, raw: dict[str, Any]) -> Any:
    try:
        return normalise(raw)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: damaged or incomplete safetensors file ({error}); delete it and fetch the "
            "model again"
        ) from error


if __name__ == "__main__":
    from dflash_core.checkpoint_report import main

    main()
