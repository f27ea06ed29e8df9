"""A tiny pair of checkpoints to deploy in seconds, with the in-process engine as its oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.tiny import write_drafter, write_target

K = 5
MAX_MODEL_LEN = 512


class Tiny:
    """A pair of checkpoints, and the in-process engine as the oracle of its target."""

    def __init__(self, folder: Path, packaged_target: Path, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.target = write_target(
            folder / "target", tokenizer_from=packaged_target, vocab_size=49152
        )
        self.drafter = write_drafter(folder / "drafter", self.target, block_size=K + 1)
        shapes = StaticShapes.create(
            num_slots=1, max_model_len=MAX_MODEL_LEN, num_drafts=0, prefill_chunk=512
        )
        self.oracle = TargetRunner.load(self.target, shapes, dtype=torch.float32)

    def continuation(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What the target alone says, with no token that ends it."""

        def stopping(ids: list[int]) -> Stopping:
            request = GenerationRequest("oracle", ids, max_tokens)
            return Stopping(self.tokenizer, request, eos_token_ids=(), max_model_len=MAX_MODEL_LEN)

        return generate(self.oracle, None, [prompt], stopping)[0].token_ids

    def args(self, **speculation: Any) -> dict[str, Any]:
        return {
            "target": {"model": str(self.target)},
            "speculation": {
                "drafter": str(self.drafter),
                "num_speculative_tokens": K,
                "draft_timeout_s": 30,
            }
            | speculation,
            "served_model_name": "tiny",
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_model_len": MAX_MODEL_LEN,
        }


def prompt_of(length: int) -> list[int]:
    return list(range(200, 200 + length))
