"""Features of the frozen target for a whole training set, computed once and memory-mapped.

One row per token, in the order of the conversations: the tapped layers' outputs and, last, the
target's final normed hidden state, from which the head gives its distribution (for distillation).
The file is append-only: an interrupted computation goes on after the last complete conversation,
and more conversations only add rows.

Shape legend: B conversations, L longest of them, T tokens of the set, W width ((taps + 1) * H), C
context, G key/value heads, D head dimension.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_core.kv_cache import KVCache
from dflash_core.target import LlamaTarget
from dflash_core.training.conversations import Conversation
from dflash_core.training.errors import TrainingError
from dflash_core.training.workers import Workers

TOKENS_PER_PASS = 4096
BYTES = 2  # bfloat16, whatever dtype the target runs in


class RowsCache(KVCache):
    """A cache whose slots are the rows of the batch in order: reading it copies nothing."""

    def read(self, layer: int, slots_B: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        rows = len(slots_B)
        return self.keys[layer][:rows, :context_len], self.values[layer][:rows, :context_len]


class FeatureFile:
    """Features of the first `len(conversations)` conversations of a set.

    Raises TrainingError where the file is shorter: compute them first.
    """

    def __init__(self, path: Path, conversations: list[Conversation], width: int) -> None:
        self.ends = np.cumsum([len(conversation.tokens) for conversation in conversations])
        rows = path.stat().st_size // (BYTES * width) if path.exists() else 0
        if rows < self.ends[-1]:
            raise TrainingError(
                f"{path}: {rows} rows of features for {self.ends[-1]} tokens; compute the rest"
            )
        # int16 stands for bfloat16, which numpy does not know.
        self._rows = np.memmap(path, dtype=np.int16, mode="r", shape=(rows, width))

    def read(self, conversation: int, out: Tensor) -> None:
        """Copy the features of one conversation into the first rows of `out`, bfloat16 `[*, W]`."""
        end = int(self.ends[conversation])
        start = int(self.ends[conversation - 1]) if conversation else 0
        out[: end - start].view(torch.int16).numpy()[:] = self._rows[start:end]


def compute_features(
    model: LlamaTarget, conversations: list[Conversation], path: Path, workers: Workers
) -> Iterator[int]:
    """Bring the file up to date; yields the number of conversations done so far.

    Args:
        model: the target, tapped.
        workers: each runs a batch of its own.

    Raises TrainingError on a full disk; what was computed before stays usable.
    """
    width = (len(model.tapped_layers) + 1) * model.config.hidden_size
    ends = np.cumsum([len(conversation.tokens) for conversation in conversations])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = int(np.searchsorted(ends, path.stat().st_size // (BYTES * width), side="right"))
    os.truncate(path, int(ends[done - 1]) * width * BYTES if done else 0)
    yield done
    while done < len(conversations):
        batches: list[list[Conversation]] = []
        end = done
        while end < len(conversations) and len(batches) < workers.threads:
            batches.append(_next_batch(conversations, end))
            end += len(batches[-1])
        data = b"".join(workers.map(partial(_run, model), batches))
        try:
            with path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise TrainingError(
                f"{path}: cannot be written ({os.strerror(error.errno or 0)}); {len(data)} more "
                f"bytes are needed for the next {end - done} conversations: make room and run the "
                "same command again"
            ) from error
        done = end
        yield done


def _next_batch(conversations: list[Conversation], start: int) -> list[Conversation]:
    batch: list[Conversation] = []
    longest = 0
    for conversation in conversations[start:]:
        longest = max(longest, len(conversation.tokens))
        if batch and longest * (len(batch) + 1) > TOKENS_PER_PASS:
            break
        batch.append(conversation)
    return batch


@torch.inference_mode()
def _run(model: LlamaTarget, batch: list[Conversation]) -> bytes:
    """Features of the conversations of a batch, one after the other."""
    config, B = model.config, len(batch)
    L = max(len(conversation.tokens) for conversation in batch)
    cache = RowsCache(
        num_layers=config.num_layers,
        num_slots=B,
        max_len=L,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.norm.weight.dtype,
        device=model.norm.weight.device,
    )
    tokens_BL = torch.zeros((B, L), dtype=torch.int32)
    for row, conversation in zip(tokens_BL, batch, strict=True):
        row[: len(conversation.tokens)] = torch.tensor(conversation.tokens)
    hidden_BLH, features_BLF = model(
        tokens_BL,
        torch.arange(B, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int32),
        torch.tensor([len(conversation.tokens) for conversation in batch], dtype=torch.int32),
        cache,
        L,
    )
    rows_BLW = torch.cat((features_BLF, model.norm(hidden_BLH)), dim=-1).bfloat16()
    return b"".join(
        rows_LW[: len(conversation.tokens)].contiguous().view(torch.uint8).numpy().tobytes()
        for rows_LW, conversation in zip(rows_BLW, batch, strict=True)
    )
