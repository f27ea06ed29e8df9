"""The trn2 configurations, forced to the CPU, serve a tiny Llama of the same divisibility.

Eight worker processes hold the ranks of the target, one the drafter: groups, shards, plans,
batches and compiled graphs are those of the 8B pair. Only checkpoints, device, dtype (float32, so
that a token does not depend on the block length) and what a rank reserves of the host differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.app import channel_bytes
from deployments.app_args import AppArgs
from dflash_core.neuron.cores import CoreMap
from tests.serve.application import Application, application, idle
from tests.tiny import write_drafter, write_target

CONFIGS = Path(__file__).parents[2] / "configs"
SPECULATIVE, BASELINE = "trn2-llama-3.1-8b.yaml", "trn2-llama-3.1-8b-baseline.yaml"
MAX_TOKENS = 16
TAPS = (0, 1, 2, 3, 4)


def load(name: str) -> dict[str, Any]:
    [app] = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))["applications"]
    return app["args"]


def on_this_machine(name: str, folder: Path) -> dict[str, Any]:
    """The arguments of a configuration with what a laptop cannot have replaced, and no more."""
    args = copy.deepcopy(load(name))
    args["target"]["model"] = str(folder / "target")
    args |= {"device": "cpu", "dtype": "float32"}
    models = [args["target"]]
    if args["speculation"] is not None:
        args["speculation"]["drafter"] = str(folder / "drafter")
        # No step may go without its drafts because the machine is busy.
        args["speculation"]["draft_timeout_s"] = 60
        models.append(args["speculation"])
    for model in models:
        model |= {"num_threads": 1, "cpus_per_rank": 0.1}
    return args


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, packaged_target: Path) -> Path:
    """32 query and 8 key/value heads, five tapped layers, block size 10, llama3 rope: what the 8B
    pair has, on a 32nd of its width and a fifth of its depth (every layer costs eight processes two
    sums over all of them, here on however few cores)."""
    folder = tmp_path_factory.mktemp("trn2")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    target = write_target(
        folder / "target",
        tokenizer_from=packaged_target,
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=4,
        rope_theta=500000.0,
        rope_scaling=scaling,
        max_position_embeddings=131072,
    )
    write_drafter(
        folder / "drafter",
        target,
        layers=2,
        block_size=10,
        target_layer_ids=TAPS,
        intermediate_size=384,
    )
    return folder


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """One within a prefill piece, one of several pieces that crosses a context bucket."""
    texts = ["Name three rivers.", "Say something about the sea. " * 90]
    prompts = [tokenizer.encode(text) for text in texts]
    assert len(prompts[0]) < 32 and len(prompts[1]) > 512
    return prompts


@pytest.fixture(scope="module")
def baseline(http_port: int, pair: Path, prompts: list[list[int]]) -> list[list[int]]:
    with application("trn2-baseline", http_port, on_this_machine(BASELINE, pair)) as app:
        assert app.stats()["drafters"] == {}
        return app.many_token_ids(prompts, concurrency=1, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def speculative(http_port: int, pair: Path) -> Iterator[Application]:
    with application("trn2", http_port, on_this_machine(SPECULATIVE, pair)) as app:
        yield app


@pytest.mark.timeout(900)
def test_eight_ranks_and_a_drafter_give_the_tokens_of_the_baseline(
    speculative: Application, prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    assert [len(tokens) for tokens in baseline] == [MAX_TOKENS] * 2
    answers = speculative.many_token_ids(
        prompts, concurrency=1, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    assert answers == baseline
    stats = speculative.wait_until(idle, 10)
    assert stats["speculation"]["num_draft_tokens"] >= 9 * MAX_TOKENS
    [verifier], [drafter] = stats["verifiers"].values(), stats["drafters"].values()
    pids = [*verifier["replica"]["worker_pids"], *drafter["replica"]["worker_pids"]]
    assert len(verifier["replica"]["worker_pids"]) == 8
    assert len(set(pids)) == 9


def test_only_greedy_requests_are_served(speculative: Application) -> None:
    body = {"prompt": "Hello", "temperature": 0.7, "max_tokens": 4}
    answer = speculative.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "temperature" in answer.text


class TestFiles:
    def test_the_baseline_differs_in_speculation_alone(self) -> None:
        assert load(BASELINE) == load(SPECULATIVE) | {"speculation": None}

    def test_the_values_of_the_published_pair(self) -> None:
        args = AppArgs.model_validate(load(SPECULATIVE))
        assert args.target.model == "meta-llama/Llama-3.1-8B-Instruct"
        assert args.speculation is not None
        assert args.speculation.drafter == "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"
        assert args.speculation.num_speculative_tokens == 9
        assert (args.device, args.dtype, args.all_greedy) == ("neuron", "bfloat16", True)
        assert (args.max_num_seqs, args.max_model_len) == (1, 2048)
        assert args.target.core_map() == CoreMap("0-7", 8, (0,))
        assert args.speculation.core_map() == CoreMap("8", 1, (8,))

    def test_a_prefill_step_sends_ten_megabytes_of_features(self) -> None:
        """256 rows of five layers of 4096 in bfloat16: what the channel is sized for."""
        shapes = AppArgs.model_validate(load(SPECULATIVE)).shapes(1)
        assert shapes.max_draft_rows == 256
        assert channel_bytes(256, 5 * 4096 * 2) == 256 * 40960 + (64 << 10)
