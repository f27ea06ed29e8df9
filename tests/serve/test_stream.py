"""Tokens that come fast travel together; nothing that a step has brought is lost or late."""

from __future__ import annotations

from deployments.stream import Delivery, Stream
from dflash_core.request import GenerationOutput, TokenLogprobs


def stream(interval: float) -> tuple[Stream, list[Delivery]]:
    sent: list[Delivery] = []
    return Stream("request", None, sent.append, interval), sent


def output(token: int, finish_reason: str | None = None) -> GenerationOutput:
    logprobs = [TokenLogprobs(-float(token), ())]
    return GenerationOutput([token], chr(token), finish_reason, logprobs=logprobs)


def test_without_an_interval_every_output_is_sent_as_it_comes() -> None:
    running, sent = stream(0.0)
    running.deliver(output(65))
    running.deliver(output(66))
    assert [item.token_ids for item in sent] == [[65], [66]]


def test_within_the_interval_outputs_are_put_together() -> None:
    running, sent = stream(1e9)
    running.deliver(output(65))
    assert sent == [output(65)], "the first token does not wait"
    running.deliver(output(66))
    running.deliver(output(67))
    assert len(sent) == 1
    running.deliver(output(68, "stop"))
    assert sent[1:] == [
        GenerationOutput(
            [66, 67, 68],
            "BCD",
            "stop",
            logprobs=[TokenLogprobs(-float(token), ()) for token in (66, 67, 68)],
        )
    ], "the last output does not wait"


def test_what_is_held_goes_before_an_error() -> None:
    running, sent = stream(1e9)
    running.deliver(output(65))
    running.deliver(output(66))
    error = RuntimeError()
    running.fail(error)
    assert sent == [output(65), output(66), error]
