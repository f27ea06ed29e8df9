"""Sampling on two ranks: the vocabulary is split, the tokens are those of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.runtime import open_store
from dflash_core.sampling import SamplingParams
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_tensor_parallel import json_tokenizer
from tests.ranks import rank_of_group
from tests.tiny import write_drafter, write_target

SHAPES = StaticShapes.create(num_slots=4, max_model_len=64, num_drafts=5, prefill_chunk=16)
PROMPTS = [[3, 4, 5, 6, 7, 8], list(range(20, 50)), [9], [200, 100]]
SETTINGS = [
    SamplingParams(temperature=1.0, seed=1, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.8, top_k=50, seed=2, repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.5, logit_bias={255: 3.0, 0: 3.0}),
    SamplingParams(),
]


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    """One process of the group; every rank writes what came out."""
    with rank_of_group(rank, size, port) as tp:
        root = Path(folder)
        target = TargetRunner.load(
            root / "target", SHAPES, tapped_layers=(1, 3), dtype=torch.float32, tp=tp
        )
        drafter = DrafterRunner.load(root / "drafter", root / "target", SHAPES, dtype=torch.float32)
        seen, verify = [], target.verify

        def recording(plan):
            result = verify(plan)
            seen.append([result.tokens, result.logprobs])
            return result

        target.verify = recording

        def make(prompt: list[int]) -> Stopping:
            sampling = SETTINGS[PROMPTS.index(prompt)]
            request = GenerationRequest("test", prompt, 16, sampling=sampling)
            return Stopping(json_tokenizer(), request, eos_token_ids=(), max_model_len=64)

        outputs = generate(target, drafter, PROMPTS, make)
        result = {
            "tokens": [output.token_ids for output in outputs],
            "seen": json.dumps(seen, default=lambda entry: [entry.logprob, entry.top]),
        }
        (root / f"{size}-{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target")
    write_drafter(folder / "drafter", folder / "target", target_layer_ids=(1, 3))
    return folder


def test_two_ranks_sample_the_tokens_of_one_and_agree_on_every_step(folder: Path) -> None:
    run_rank(0, 1, 0, str(folder))
    store = open_store()
    multiprocessing.spawn(run_rank, (2, store.port, str(folder)), nprocs=2)
    single, first, second = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")
    )
    assert first["tokens"] == single["tokens"]
    assert first == second
    assert len(set(single["tokens"][0])) > 8
