"""Served speculation gives the baseline application's tokens, at both extremes of acceptance.

Target: the packaged 135M model in float32, where a token does not depend on how many rows are
computed together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PACKAGED_TARGET
from tests.drafters import REPLAY_FILE
from tests.serve.application import Application, application, idle
from tests.tiny import write_drafter

K = 7
MAX_TOKENS = 17
ARGS: dict[str, Any] = {
    "target": {"model": PACKAGED_TARGET, "num_threads": 2},
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 512,
}
TOPICS = (
    "the sea", "a list of three fruits", "Python", "a proof", "the number seven", "rain", "Paris",
    "a recipe for bread", "prime numbers", "an old house", "how to tie a knot", "the moon",
    "a letter to a friend", "chess", "the word 'blue'", "a short poem", "sorting an array", "cats",
    "the history of tea", "a train", "what a verb is", "two plus two", "winter", "the end",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """24 chat prompts of 24 different lengths."""
    prompts = []
    for topic in TOPICS:
        messages = [{"role": "user", "content": f"Write one sentence about {topic}."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text)
        while any(len(ids) == len(other) for other in prompts):
            ids = ids[:1] + ids
        prompts.append(ids)
    return prompts


@pytest.fixture(scope="module")
def baseline(http_port: int, prompts: list[list[int]]) -> list[list[int]]:
    with application("baseline", http_port, ARGS) as app:
        assert app.stats()["drafters"] == {}
        answers = app.many_token_ids(prompts, concurrency=8, max_tokens=MAX_TOKENS)
        assert answers == app.many_token_ids(prompts, concurrency=1, max_tokens=MAX_TOKENS)
    assert len(set(map(tuple, answers))) > 20
    return answers


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory, packaged_target: Path) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"), packaged_target, block_size=K + 1)


def speculation(folder: Path, **options: Any) -> dict[str, Any]:
    return ARGS | {
        "speculation": {
            "drafter": str(folder),
            "num_speculative_tokens": K,
            "num_threads": 2,
            # Every step of these runs is to carry drafts, however busy the machine is.
            "draft_timeout_s": 60,
        }
        | options
    }


@pytest.fixture(scope="module")
def random(http_port: int, drafter_folder: Path) -> Iterator[Application]:
    with application("random", http_port, speculation(drafter_folder)) as app:
        yield app


@pytest.fixture(scope="module")
def replay(
    http_port: int,
    drafter_folder: Path,
    prompts: list[list[int]],
    baseline: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Application]:
    folder = tmp_path_factory.mktemp("replay") / "drafter"
    shutil.copytree(drafter_folder, folder)
    replay = {
        "sequences": [prompt + output for prompt, output in zip(prompts, baseline, strict=True)],
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    (folder / REPLAY_FILE).write_text(json.dumps(replay))
    args = speculation(folder, runner="tests.drafters:ReplayDrafter")
    with application("replay", http_port, args) as app:
        yield app


@pytest.mark.parametrize("concurrency", [1, 8])
def test_useless_drafts_cost_no_token(
    random: Application, prompts: list[list[int]], baseline: list[list[int]], concurrency: int
) -> None:
    before = random.stats()["speculation"]
    answers = random.many_token_ids(prompts, concurrency=concurrency, max_tokens=MAX_TOKENS)
    assert answers == baseline
    after = random.wait_until(idle, 5)["speculation"]
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    assert drafted > 1000
    assert accepted < 0.02 * drafted


@pytest.mark.parametrize("concurrency", [1, 8])
def test_perfect_drafts_are_all_accepted_and_save_their_steps(
    replay: Application, prompts: list[list[int]], baseline: list[list[int]], concurrency: int
) -> None:
    before = replay.stats()["speculation"]
    answers = replay.many_token_ids(prompts, concurrency=concurrency, max_tokens=MAX_TOKENS)
    assert answers == baseline
    after = replay.wait_until(idle, 5)["speculation"]
    counted = {
        name: after[name] - before[name]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_decode_steps")
    }
    assert counted["num_accepted_tokens"] == counted["num_draft_tokens"] > 0
    # The prompt gives the first token; the others come in blocks of K + 1.
    expected = sum(-(-(len(output) - 1) // (K + 1)) for output in baseline)
    assert counted["num_decode_steps"] == expected
    assert (
        after["num_accepted_tokens_per_pos"][0] >= after["num_accepted_tokens_per_pos"][K - 1] > 0
    )


def test_the_three_deployments_and_their_workers_are_processes_of_their_own(
    random: Application,
) -> None:
    stats = random.stats()
    [verifier], [drafter] = stats["verifiers"].values(), stats["drafters"].values()
    pids = [stats["router_pid"]]
    for part in (verifier, drafter):
        pids += [part["replica"]["pid"], *part["replica"]["worker_pids"]]
    assert len(set(pids)) == 5


def test_features_travel_once_and_only_those_of_accepted_rows(
    random: Application, prompts: list[list[int]]
) -> None:
    def moved(stats: dict[str, Any]) -> tuple[int, int]:
        [verifier], [drafter] = stats["verifiers"].values(), stats["drafters"].values()
        return verifier["verify"]["feature_bytes"], drafter["draft"]["feature_bytes"]

    before = moved(random.wait_until(idle, 5))
    answer = random.completion(prompts[0], max_tokens=9)
    assert answer["usage"]["completion_tokens"] == 9
    after = moved(random.wait_until(idle, 5))
    row = 2 * 576 * 4  # two tapped layers, hidden size, float32
    # The last token is never computed; of the last step nothing is injected any more.
    assert after[0] - before[0] == (len(prompts[0]) + 8) * row
    assert len(prompts[0]) * row <= after[1] - before[1] <= (len(prompts[0]) + 7) * row
    [verifier], [drafter] = (random.stats()[part].values() for part in ("verifiers", "drafters"))
    for stage in (verifier["verify"], drafter["draft"]):
        assert stage["transfer_ms_per_step"] > 0
        assert stage["model_ms_per_step"] > 0
