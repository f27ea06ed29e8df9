"""What the running application does besides giving the right tokens.

Target: a tiny random Llama with the packaged tokenizer, so that a deployment costs seconds.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.drafters import RECORD_FILE, REPLAY_FILE, SLOW_SECONDS
from tests.serve.application import Application, application, idle
from tests.serve.tiny_pair import MAX_MODEL_LEN, K, Tiny, prompt_of

LONG = list(range(100, 160))  # longer than any prefill chunk below but the last


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:
    """The tiny pair with its random drafter; a short queue."""
    args = tiny.args(runner="tests.drafters:RecordingDrafter") | {"max_queued_requests": 4}
    with application("tiny", http_port, args) as app:
        yield app


@pytest.fixture(scope="module")
def replayed(http_port: int, tiny: Tiny) -> Iterator[tuple[Application, dict[int, list[int]]]]:
    """An application whose every draft is right, and what it is known to say by prompt length.

    Its target ends a sequence at the token it says tenth after the prompt of length 12.
    """
    prompts = [list(range(200, 200 + n)) for n in (8, 9, 10, 11, 12, 13, MAX_MODEL_LEN - 12)]
    said = {len(p): tiny.continuation(p, 40) for p in prompts}
    folder = tiny.target.parent / "replay"
    target = folder / "target"
    shutil.copytree(tiny.target, target)
    config = json.loads((target / "config.json").read_text())
    config["eos_token_id"] = [said[12][9]]
    (target / "config.json").write_text(json.dumps(config))
    shutil.copytree(tiny.drafter, folder / "drafter")
    replay = {
        "sequences": [prompt + said[len(prompt)] for prompt in prompts],
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    (folder / "drafter" / REPLAY_FILE).write_text(json.dumps(replay))
    args = tiny.args(drafter=str(folder / "drafter"), runner="tests.drafters:ReplayDrafter")
    args["target"] = {"model": str(target)}
    args["stream_batching_interval_ms"] = 0  # so that a stream shows where the blocks end
    with application("replayed", http_port, args) as app:
        yield app, said


# Where an output ends, inside an accepted block.


def ended(app: Application, length: int, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice and the metrics of one completion, whose drafts are all accepted."""
    answer = app.completion(prompt_of(length), **options)
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    metrics = answer["metrics"]
    # Besides the token of the prompt and one bonus token per step, all tokens were drafts.
    assert metrics["num_decode_tokens"] == len(choice["token_ids"]) - 1
    assert metrics["num_accepted_tokens"] <= metrics["num_decode_tokens"]
    return choice, metrics


def test_eos_inside_an_accepted_block(replayed: tuple[Application, dict]) -> None:
    app, said = replayed
    end = said[12].index(said[12][9]) + 1
    assert (end - 1) % (K + 1) not in (0, 1), "the end must fall inside a block"
    choice, metrics = ended(app, 12, max_tokens=40)
    assert choice["token_ids"] == said[12][:end]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert metrics["num_decode_steps"] == -(-(end - 1) // (K + 1))


def test_ignore_eos_goes_on(replayed: tuple[Application, dict]) -> None:
    app, said = replayed
    choice, _ = ended(app, 12, max_tokens=20, ignore_eos=True)
    assert choice["token_ids"] == said[12][:20]


def test_a_stop_string_inside_an_accepted_block(
    replayed: tuple[Application, dict], tiny: Tiny
) -> None:
    app, said = replayed
    stop = tiny.tokenizer.decode(said[9][9:11])
    whole = tiny.tokenizer.decode(said[9][:30])
    choice, _ = ended(app, 9, max_tokens=30, stop=[stop])
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["token_ids"] == said[9][: len(choice["token_ids"])]
    assert len(choice["token_ids"]) == 11


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 9, 13])
def test_max_tokens_inside_an_accepted_block(
    replayed: tuple[Application, dict], max_tokens: int
) -> None:
    app, said = replayed
    choice, metrics = ended(app, 10, max_tokens=max_tokens)
    assert choice["token_ids"] == said[10][:max_tokens]
    assert choice["finish_reason"] == "length"
    assert metrics["num_decode_steps"] == -(-(max_tokens - 1) // (K + 1))


def test_the_context_limit_inside_an_accepted_block(replayed: tuple[Application, dict]) -> None:
    app, said = replayed
    length = MAX_MODEL_LEN - 12
    choice, _ = ended(app, length, max_tokens=None)
    assert choice["token_ids"] == said[length][:12]
    assert choice["finish_reason"] == "length"


# Streaming.


def test_a_stream_says_what_the_whole_answer_says(replayed: tuple[Application, dict]) -> None:
    app, _ = replayed
    whole = app.completion(prompt_of(11), max_tokens=20)
    chunks = list(app.stream(prompt_of(11), max_tokens=20, stream_options={"include_usage": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    # One chunk per accepted block, not per token and not one in all.
    assert 4 <= len(chunks) - 1 <= 6


def test_chat_and_completion_agree(app: Application, tiny: Tiny) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = app.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    prompt = tiny.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"] == tiny.continuation(prompt, 12)


def test_a_trace_shows_where_the_time_of_a_request_went(app: Application) -> None:
    answer = app.completion(prompt_of(30), max_tokens=30, ignore_eos=True)
    events = app.http.get("/trace").raise_for_status().json()["traceEvents"]
    request_id = app.stats()["recent_requests"][-1]["id"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    verified = [event for event in slices if event["name"] in ("prefill", "verify")]
    own = [event for event in verified if request_id in event["args"]["requests"]]
    assert [event["name"] for event in own][:2] == ["prefill", "verify"]
    assert sum(event["args"]["emitted"][0] for event in own) >= 30
    assert len(own) == 1 + answer["metrics"]["num_decode_steps"]
    [track] = [
        event["tid"]
        for event in events
        if event["ph"] == "M" and event["args"]["name"] == f"stream {request_id}"
    ]
    delivered = [event for event in events if event["ph"] == "i" and event["tid"] == track]
    assert sum(event["args"]["tokens"] for event in delivered) == 30
    drafts = [event for event in slices if event["name"] == "draft" and event["ts"] > own[0]["ts"]]
    # The first token leaves when it is there, and does not wait for the draft that follows it;
    # tokens that come faster than they are to be streamed leave together.
    assert own[0]["ts"] + own[0]["dur"] <= delivered[0]["ts"] < drafts[0]["ts"] + drafts[0]["dur"]
    assert len(delivered) <= len(own)
    assert {"send", "receive"} <= {event["name"] for event in slices}


# Drafters that are late, or work in another way.


def test_a_slow_drafter_costs_time_only_and_never_the_first_token(
    http_port: int, tiny: Tiny
) -> None:
    args = tiny.args(runner="tests.drafters:SlowDrafter", draft_timeout_s=0.5)
    with application("slow", http_port, args) as app:
        began = time.monotonic()
        stream = app.stream(prompt_of(9), max_tokens=60, ignore_eos=True)
        first = next(stream)
        waited = time.monotonic() - began
        [drafter] = app.stats()["drafters"].values()
        assert drafter["draft"]["steps"] == 0, "the first draft was finished before the first token"
        assert waited < SLOW_SECONDS
        text = first["choices"][0]["text"] + "".join(c["choices"][0]["text"] for c in stream)
        expected = tiny.continuation(prompt_of(9), 60)
        assert text == tiny.tokenizer.decode(expected, skip_special_tokens=True)
        # Waiting for every draft would have taken two seconds a step.
        assert time.monotonic() - began < 60 * SLOW_SECONDS / 2
        assert app.token_ids(prompt_of(10), max_tokens=30) == tiny.continuation(prompt_of(10), 30)


def test_prompts_longer_than_a_chunk_get_the_same_drafts(
    http_port: int, tiny: Tiny, app: Application
) -> None:
    args = tiny.args(runner="tests.drafters:RecordingDrafter") | {"prefill_chunk_size": 16}
    whole_record, chunked_record = (tiny.drafter / RECORD_FILE.format(chunk) for chunk in (256, 16))
    whole_record.unlink(missing_ok=True)
    tokens = app.token_ids(LONG, max_tokens=20)
    with application("chunked", http_port, args) as chunked:
        assert chunked.token_ids(LONG, max_tokens=20) == tokens
    assert whole_record.read_text() == chunked_record.read_text()
    assert len(set(whole_record.read_text().splitlines())) > 5


def test_tensor_parallel_workers_give_the_same_tokens(http_port: int, tiny: Tiny) -> None:
    args = tiny.args(tensor_parallel_size=2)
    args["target"] = {"model": str(tiny.target), "tensor_parallel_size": 2}
    with application("parallel", http_port, args) as app:
        replicas = [
            part["replica"]
            for group in ("verifiers", "drafters")
            for part in app.stats()[group].values()
        ]
        assert [len(replica["worker_pids"]) for replica in replicas] == [2, 2]
        prompts = [prompt_of(n) for n in (3, 20, 40)]
        answers = app.many_token_ids(prompts, concurrency=3, max_tokens=16)
        assert answers == [tiny.continuation(prompt, 16) for prompt in prompts]
        assert app.stats()["speculation"]["num_draft_tokens"] > 0


def test_an_adaptive_server_stops_asking_for_useless_drafts(http_port: int, tiny: Tiny) -> None:
    with application("adaptive", http_port, tiny.args(adaptive=True)) as app:
        for length in (9, 10):
            tokens = app.token_ids(prompt_of(length), max_tokens=400, ignore_eos=True)
            assert tokens == tiny.continuation(prompt_of(length), 400)
        statistics = app.stats()["speculation"]
        assert 0 < statistics["num_drafts"] < 0.5 * statistics["num_decode_steps"]
        [verifier] = app.stats()["verifiers"].values()
        assert verifier["num_drafts"] == 0


def test_an_adaptive_server_verifies_all_of_good_drafts(
    http_port: int, tiny: Tiny, replayed: tuple[Application, dict[int, list[int]]]
) -> None:
    _, said = replayed
    folder = tiny.target.parent / "replay"
    args = tiny.args(
        drafter=str(folder / "drafter"), runner="tests.drafters:ReplayDrafter", adaptive=True
    )
    with application("adaptive-replay", http_port, args) as app:
        assert app.token_ids(prompt_of(9), max_tokens=37) == said[9][:37]
        statistics = app.stats()["speculation"]
        assert statistics["num_decode_steps"] == 36 / (K + 1)
        assert statistics["num_accepted_tokens"] == statistics["num_draft_tokens"]


# Load and clients that leave.


def test_more_requests_than_slots_wait_and_finish(app: Application, tiny: Tiny) -> None:
    prompts = [prompt_of(n) for n in range(5, 13)]
    answers = app.many_token_ids(prompts, concurrency=8, max_tokens=12)
    assert answers == [tiny.continuation(prompt, 12) for prompt in prompts]
    app.wait_until(idle, 5)


def test_a_full_queue_answers_429_and_loses_nobody_else(app: Application) -> None:
    body = {"prompt": prompt_of(20), "max_tokens": 200, "ignore_eos": True}

    def post(_: int) -> httpx.Response:
        return httpx.post(f"{app.base_url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(post, range(24)))
    accepted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(accepted) >= 8
    assert {answer.json()["usage"]["completion_tokens"] for answer in accepted} == {200}
    assert refused
    for answer in refused:
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
    app.wait_until(idle, 5)


def test_a_request_ends_at_its_deadline_in_the_queue_and_in_the_middle(
    http_port: int, tiny: Tiny
) -> None:
    # Every step waits two seconds for its drafts: sixty tokens would take a minute.
    args = tiny.args(runner="tests.drafters:SlowDrafter", draft_timeout_s=30)
    args |= {"max_num_seqs": 1, "request_timeout_s": 5 * SLOW_SECONDS}
    with application("deadline", http_port, args) as app, ThreadPoolExecutor(1) as pool:
        stream = app.stream(prompt_of(9), max_tokens=60, ignore_eos=True)
        next(stream)
        body = {"prompt": prompt_of(10), "max_tokens": 60}
        waiting = pool.submit(app.http.post, "/v1/completions", json=body)
        *chunks, last = stream
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["code"] == "request_timeout"
        assert "after" in last["error"]["message"]
        answer = waiting.result()
        assert answer.status_code == 408
        assert answer.json()["error"]["type"] == "timeout_error"
        app.wait_until(idle, 2 * SLOW_SECONDS)


def test_a_request_whose_time_ends_in_the_queue_never_gets_a_slot(
    http_port: int, tiny: Tiny
) -> None:
    args = tiny.args() | {"max_num_seqs": 1, "request_timeout_s": 1.0}
    with application("queue", http_port, args) as app, ThreadPoolExecutor(8) as pool:
        body = {"prompt": prompt_of(10), "max_tokens": 400, "ignore_eos": True}
        answers = list(pool.map(lambda _: app.http.post("/v1/completions", json=body), range(8)))
        late = [answer for answer in answers if answer.status_code == 408]
        assert late, "eight requests of 400 tokens were done within a second"
        assert any("in the queue" in answer.json()["error"]["message"] for answer in late)
        app.wait_until(idle, 5)
        assert app.token_ids(prompt_of(5), max_tokens=4) == tiny.continuation(prompt_of(5), 4)


def leave(app: Application, *, stream: bool, wait_for_first: bool) -> None:
    """Send a long request and cut the connection."""
    url = httpx.URL(app.base_url)
    body = json.dumps(
        {"prompt": prompt_of(30), "max_tokens": 400, "ignore_eos": True, "stream": stream}
    )
    head = (
        f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: {url.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + body.encode())
        if wait_for_first:
            while b"data: " not in connection.recv(65536):
                pass


def test_a_client_that_leaves_frees_its_slot_within_a_second(app: Application) -> None:
    app.wait_until(idle, 5)
    leave(app, stream=True, wait_for_first=True)
    app.wait_until(idle, 1.0)


def test_fifty_clients_that_leave_in_a_row_leave_every_slot_idle(
    app: Application, tiny: Tiny
) -> None:
    for i in range(50):
        app.wait_until(lambda stats: stats["requests"]["running"] < 4, 5)
        leave(app, stream=i % 3 != 0, wait_for_first=i % 3 == 1)
    app.wait_until(idle, 2.0)
    prompts = [prompt_of(n) for n in (5, 6, 7, 8)]
    answers = app.many_token_ids(prompts, concurrency=4, max_tokens=8)
    assert answers == [tiny.continuation(prompt, 8) for prompt in prompts]


# Bad input.

BAD_COMPLETIONS: dict[str, Any] = {
    "malformed JSON": b'{"prompt": "x", ',
    "not an object": b"[1, 2]",
    "no prompt": {},
    "prompt of a wrong type": {"prompt": {"text": "x"}},
    "token id outside the vocabulary": {"prompt": [5, 49152]},
    "negative token id": {"prompt": [-1]},
    "empty prompt": {"prompt": ""},
    "negative max_tokens": {"prompt": "x", "max_tokens": -1},
    "zero max_tokens": {"prompt": "x", "max_tokens": 0},
    "max_tokens as text": {"prompt": "x", "max_tokens": "many"},
    "temperature out of range": {"prompt": "x", "temperature": -0.7},
    "temperature of a wrong type": {"prompt": "x", "temperature": "hot"},
    "prompt too long": {"prompt": [5] * MAX_MODEL_LEN},
    "output too long": {"prompt": [5] * 500, "max_tokens": 100},
    "stop of a wrong type": {"prompt": "x", "stop": 7},
    "stream of a wrong type": {"prompt": "x", "stream": "perhaps"},
    "too many choices": {"prompt": "x", "n": 1000},
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_input_is_the_clients_error_and_the_server_goes_on(app: Application, name: str) -> None:
    body = BAD_COMPLETIONS[name]
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = app.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert app.http.get("/health").status_code == 200


def test_an_unknown_model_or_route_is_404(app: Application) -> None:
    answer = app.http.post("/v1/completions", json={"model": "gpt-5", "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert app.http.get("/v1/nothing").status_code == 404
    assert app.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
