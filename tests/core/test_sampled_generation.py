"""Sampled output has exactly the target's processed distribution, whatever is drafted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflash_core import plans
from dflash_core.request import GenerationRequest, TokenLogprobs
from dflash_core.sampling import SamplingParams
from dflash_core.sequence import Sequence
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.plain_sampling import distribution, processed_logits
from tests.tiny import write_target

V = 8
PROMPT = [3, 5, 3, 1, 6]
EOS = 2
K, SLOTS, SAMPLES, TOKENS = 2, 2500, 20_000, 3
SHAPES = StaticShapes(
    num_slots=SLOTS,
    max_model_len=32,
    num_drafts=K,
    prefill_chunk=3,  # the prompt takes two chunks
    num_seqs_buckets=(1, 8, SLOTS),
    context_buckets=(32,),
)
TOKENIZER = Tokenizer(WordLevel({f"word{i}": i for i in range(V)}, unk_token="word0"))

Drafter = Callable[[list[int], SamplingParams], list[int]]


class Oracle:
    """The target and the exact distribution of what follows a prefix, both remembered."""

    def __init__(self, folder: Path) -> None:
        self.target = TargetRunner.load(folder, SHAPES, dtype=torch.float32)
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        """`[V]` raw logits of the token after these, computed in one piece."""
        key = tuple(tokens)
        if key not in self._logits:
            one = torch.ones(1, dtype=torch.int32)
            with torch.inference_mode():
                hidden, _ = self.target.model(
                    torch.tensor([tokens], dtype=torch.int32),
                    one * SLOTS,
                    one * 0,
                    one * len(tokens),
                    self.target.cache,
                    32,
                )
                self._logits[key] = self.target.model.logits(hidden)[0, -1].double().numpy()
        return self._logits[key]

    def distribution(self, params: SamplingParams, output: list[int]) -> np.ndarray:
        return distribution(self.logits(PROMPT + output), params, PROMPT, output, {EOS})

    def joint(self, params: SamplingParams) -> np.ndarray:
        """Probabilities of the first TOKENS tokens together, `[V, V, V]`."""
        p = np.zeros((V,) * TOKENS)
        for output in np.ndindex(p.shape):
            p[output] = np.prod(
                [
                    self.distribution(params, list(output[:i]))[token]
                    for i, token in enumerate(output)
                ]
            )
        return p


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, vocab_size=V, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    return Oracle(folder)


def good(oracle: Oracle) -> Drafter:
    """The most likely tokens: most drafts are accepted."""

    known: dict[tuple[int, ...], list[int]] = {}

    def draft(output: list[int], params: SamplingParams) -> list[int]:
        if tuple(output) not in known:
            drafts: list[int] = []
            for _ in range(K):
                drafts.append(int(oracle.distribution(params, output + drafts).argmax()))
            known[tuple(output)] = drafts
        return known[tuple(output)]

    return draft


def bad(oracle: Oracle) -> Drafter:
    """Tokens that have nothing to do with the target's."""
    random = np.random.default_rng(1)
    return lambda output, params: random.integers(0, V, K).tolist()


def adversarial(oracle: Oracle) -> Drafter:
    """The newest token over and over, which is what penalties are there to prevent."""
    return lambda output, params: [output[-1]] * K


def nothing(oracle: Oracle) -> Drafter:
    return lambda output, params: []


def run(
    oracle: Oracle,
    params: list[SamplingParams],
    drafters: list[Drafter],
    *,
    prompts: list[list[int]] | None = None,
    slots: list[int] | None = None,
    max_tokens: int = TOKENS + 1,  # so that a block of K drafts is of use
    ignore_eos: bool = True,
) -> tuple[list[list[int]], list[list[TokenLogprobs]], list[Sequence]]:
    """One request per entry of `params`, all in one batch, with the drafters in turn.

    Returns:
        Tokens, log probabilities and sequences.
    """
    prompts = prompts or [PROMPT] * len(params)
    sequences = []
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        request = GenerationRequest(
            "test", prompt, max_tokens, ignore_eos=ignore_eos, sampling=each
        )
        stopping = Stopping(TOKENIZER, request, eos_token_ids=(EOS,), max_model_len=32)
        slot = slots[i] if slots else i
        sequences.append(Sequence(prompt, slot=slot, stopping=stopping, max_model_len=32))
    drafter_of = dict(zip(sequences, itertools.cycle(drafters)))
    logprobs: dict[Sequence, list[TokenLogprobs]] = {sequence: [] for sequence in sequences}
    while running := [sequence for sequence in sequences if not sequence.finished]:
        step = [sequence for sequence in running if sequence.prefilling] or running
        for sequence in step:
            if not sequence.prefilling:
                output = sequence.tokens[len(sequence.prompt) :]
                drafts = drafter_of[sequence](output, sequence.sampling)
                sequence.offer_drafts(sequence.position, drafts)
        plan, blocks = plans.verify_plan(step, SHAPES, with_features=False)
        outputs = plans.commit(step, blocks, oracle.target.verify(plan))
        for sequence, output in zip(step, outputs, strict=True):
            if output is not None and output.logprobs is not None:
                logprobs[sequence] += output.logprobs
    outputs = [sequence.tokens[len(sequence.prompt) :] for sequence in sequences]
    return outputs, list(logprobs.values()), sequences


def p_value(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's chi-square test; cells that expect fewer than 5 are counted as one."""
    expected = probabilities * observed.sum()
    rare = expected < 5
    o = np.append(observed[~rare], observed[rare].sum())
    e = np.append(expected[~rare], expected[rare].sum())
    o, e = o[e > 0], e[e > 0]
    statistic = ((o - e) ** 2 / e).sum()
    return torch.special.gammaincc(
        torch.tensor((len(o) - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2)
    ).item()


SETTINGS = {
    "temperature": SamplingParams(temperature=0.8),
    "high temperature": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.5, top_k=3),
    "top_p": SamplingParams(temperature=1.5, top_p=0.7),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    "repetition_penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "presence_penalty": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "frequency_penalty": SamplingParams(temperature=1.0, frequency_penalty=-1.5),
    "logit_bias": SamplingParams(temperature=1.0, logit_bias={0: -100, 4: 2.0, 6: -1.0}),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=2),
    "all": SamplingParams(
        temperature=1.3, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.4, logit_bias={1: 1.0}, min_tokens=1,
    ),
}  # fmt: skip


def seeded(params: SamplingParams, seeds: range) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in seeds]


@pytest.mark.parametrize("setting", SETTINGS)
def test_three_tokens_together_have_the_targets_distribution(oracle: Oracle, setting: str) -> None:
    """The first token comes from the prompt, the others from blocks of up to three.

    The samples of one batch are drafted for in turn by a good, a bad and an adversarial drafter.
    """
    params = SETTINGS[setting]
    ends = params.min_tokens > 0
    drafters = [kind(oracle) for kind in (good, bad, adversarial)]
    observed = np.zeros((len(drafters),) + (V,) * TOKENS)
    drafted, accepted = np.zeros((2, len(drafters)))
    for begin in range(0, SAMPLES, SLOTS):
        outputs, _, sequences = run(
            oracle, seeded(params, range(begin, begin + SLOTS)), drafters, ignore_eos=not ends
        )
        for i, output in enumerate(outputs):
            # An output that ended early counts as if nothing but EOS had followed.
            observed[(i % len(drafters), *(output + [EOS] * TOKENS)[:TOKENS])] += 1
        for i, sequence in enumerate(sequences):
            drafted[i % len(drafters)] += sequence.statistics.num_draft_tokens
            accepted[i % len(drafters)] += sequence.statistics.num_accepted_tokens
    expected = oracle.joint(params)
    if ends:
        for head in [(i,) for i in range(V)] + [()]:
            tail = expected[(*head, EOS)].sum()
            expected[(*head, EOS)] = 0
            expected[(*head, *[EOS] * (TOKENS - len(head)))] = tail
    assert observed.sum() == SAMPLES
    assert not observed[:, expected == 0].any(), "a token of probability 0 was emitted"
    assert p_value(observed.sum(0), expected) > 0.001
    for counts in observed:
        assert p_value(counts, expected) > 0.001
    assert drafted.min() > SAMPLES / len(drafters)
    assert (accepted < drafted).all() and accepted[0] > accepted[1] > 0


def test_the_chi_square_test_sees_a_small_bias() -> None:
    expected = np.full(8, 1 / 8)
    observed = np.full(8, 2500.0)
    assert p_value(observed, expected) == 1
    observed[:2] += (200, -200)
    assert p_value(observed, expected) < 0.001


# What a request's tokens depend on.

MIXED = [
    replace(params, seed=seed, min_tokens=0)
    for params in [*SETTINGS.values(), SamplingParams(), SamplingParams(frequency_penalty=0.5)]
    for seed in (0, 1, -7)
]


@pytest.fixture(scope="module")
def alone(oracle: Oracle) -> list[list[int]]:
    """Each of MIXED alone, without drafts."""
    return [run(oracle, [params], [nothing(oracle)], max_tokens=20)[0][0] for params in MIXED]


@pytest.mark.parametrize("kind", [nothing, good, bad, adversarial])
def test_a_batch_and_drafts_change_no_token(
    oracle: Oracle, alone: list[list[int]], kind: Callable[[Oracle], Drafter]
) -> None:
    outputs, _, _ = run(oracle, MIXED, [kind(oracle)], max_tokens=20)
    assert outputs == alone
    backwards = list(range(len(MIXED)))[::-1]
    outputs, _, _ = run(oracle, MIXED, [kind(oracle)], max_tokens=20, slots=backwards)
    assert outputs == alone


def test_another_seed_gives_other_tokens(oracle: Oracle) -> None:
    outputs, _, _ = run(oracle, seeded(SETTINGS["temperature"], range(100)), [good(oracle)])
    assert len(set(map(tuple, outputs))) > 50


def test_drafts_of_a_sampled_output_are_accepted_where_they_are_what_it_says(
    oracle: Oracle, alone: list[list[int]]
) -> None:
    known = alone[0]
    replay: Drafter = lambda output, params: known[len(output) : len(output) + K]
    [output], _, [sequence] = run(oracle, MIXED[:1], [replay], max_tokens=20)
    assert output == known
    assert sequence.statistics.num_accepted_tokens == sequence.statistics.num_draft_tokens > 10


def test_an_output_that_is_computed_again_goes_on_as_before(
    oracle: Oracle, alone: list[list[int]]
) -> None:
    """After a failure the prompt and what was emitted are prefilled, perhaps elsewhere."""
    for params, output in zip(MIXED, alone, strict=True):
        request = GenerationRequest("test", PROMPT, 20, ignore_eos=True, sampling=params)
        stopping = Stopping(TOKENIZER, request, eos_token_ids=(EOS,), max_model_len=32)
        stopping.append(output[:7])
        sequence = Sequence(PROMPT + output[:7], slot=5, stopping=stopping, max_model_len=32)
        while not sequence.finished:
            plan, blocks = plans.verify_plan([sequence], SHAPES, with_features=False)
            plans.commit([sequence], blocks, oracle.target.verify(plan))
        assert sequence.tokens == PROMPT + output


def test_a_slot_keeps_nothing_of_its_last_request(oracle: Oracle, alone: list[list[int]]) -> None:
    heavy = SamplingParams(
        temperature=2.0, frequency_penalty=2.0, repetition_penalty=5.0, logit_bias={4: 100}, seed=3
    )
    for params, expected in zip(MIXED[::3], alone[::3], strict=True):
        run(oracle, [heavy], [bad(oracle)], max_tokens=10)
        assert run(oracle, [params], [bad(oracle)], max_tokens=20)[0] == [expected]


def test_plain_greedy_requests_plan_nothing_but_argmax(oracle: Oracle) -> None:
    def plan(params: SamplingParams, chunks: int) -> plans.VerifyPlan:
        request = GenerationRequest("test", PROMPT, 9, sampling=params)
        stopping = Stopping(TOKENIZER, request, eos_token_ids=(EOS,), max_model_len=32)
        sequence = Sequence(PROMPT, slot=0, stopping=stopping, max_model_len=32)
        sequence.num_computed = 3 * chunks
        return plans.verify_plan([sequence], SHAPES, with_features=False)[0]

    assert plan(SamplingParams(top_k=3, top_p=0.5, seed=4), 1).sampling is None
    assert plan(SamplingParams(temperature=1.0), 1).sampling is not None
    assert plan(SamplingParams(temperature=1.0), 0).sampling is None, "the prompt goes on"


# Greedy decoding with parameters that change the logits.

GREEDY_SETTINGS = {
    "repetition_penalty": SamplingParams(repetition_penalty=1.6),
    "presence_penalty": SamplingParams(presence_penalty=1.0),
    "frequency_penalty": SamplingParams(frequency_penalty=0.7),
    "negative penalties": SamplingParams(frequency_penalty=-0.5, repetition_penalty=0.7),
    "logit_bias": SamplingParams(logit_bias={0: 3.0, 5: -100.0}, presence_penalty=0.2),
    "min_tokens": SamplingParams(min_tokens=6, logit_bias={EOS: 8.0}, frequency_penalty=0.1),
}


@pytest.mark.parametrize("kind", [nothing, good, bad, adversarial])
@pytest.mark.parametrize("setting", GREEDY_SETTINGS)
def test_greedy_decoding_equals_one_token_at_a_time(
    oracle: Oracle, setting: str, kind: Callable[[Oracle], Drafter]
) -> None:
    params = GREEDY_SETTINGS[setting]
    expected: list[int] = []
    while len(expected) < 20 and EOS not in expected:
        logits = oracle.logits(PROMPT + expected)
        processed = processed_logits(logits, params, PROMPT, expected, {EOS})
        expected.append(int(np.argmax(processed)))
    [output], _, _ = run(oracle, [params], [kind(oracle)], max_tokens=20, ignore_eos=False)
    assert output == expected
    if setting == "min_tokens":
        assert output.index(EOS) == 6, "the first token that may end it does"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_forbidden_token_is_never_emitted_however_often_it_is_drafted(
    oracle: Oracle, temperature: float
) -> None:
    favourite = int(oracle.distribution(SamplingParams(), []).argmax())
    params = SamplingParams(temperature=temperature, logit_bias={favourite: -100})
    stubborn: Drafter = lambda output, params: [favourite] * K
    outputs, _, sequences = run(oracle, seeded(params, range(200)), [stubborn], max_tokens=20)
    assert not any(favourite in output for output in outputs)
    assert sum(sequence.statistics.num_draft_tokens for sequence in sequences) > 1000


def test_neither_eos_nor_a_stop_id_comes_before_min_tokens(oracle: Oracle) -> None:
    """Requests whose EOS is very likely, drafted as well."""
    params = SamplingParams(temperature=1.0, min_tokens=5, logit_bias={EOS: 20.0})
    eager: Drafter = lambda output, params: [EOS] * K
    outputs, _, _ = run(oracle, seeded(params, range(50)), [eager], max_tokens=20, ignore_eos=False)
    assert {output.index(EOS) for output in outputs} == {5}
    assert {len(output) for output in outputs} == {6}


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e300},
        {"temperature": 1e-5},
        {"temperature": 1.0, "repetition_penalty": 1e300},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "top_p": 1e-300, "min_p": 1e-300},
        {"temperature": 1.0, "top_k": 1 << 40, "min_p": 1.0},
    ],
)
def test_extreme_values_are_served_and_still_forbid(
    oracle: Oracle, extreme: dict[str, float]
) -> None:
    """Nothing becomes NaN, which would let a forbidden token through."""
    params = SamplingParams(**extreme, min_tokens=9, logit_bias={EOS: 100})
    outputs, _, _ = run(
        oracle, seeded(params, range(50)), [bad(oracle)], max_tokens=9, ignore_eos=False
    )
    assert not any(EOS in output for output in outputs)
    assert {len(output) for output in outputs} == {9}


# Log probabilities.


@pytest.mark.parametrize("kind", [nothing, good])
def test_log_probabilities_are_those_of_the_raw_logits_one_entry_per_token(
    oracle: Oracle, kind: Callable[[Oracle], Drafter]
) -> None:
    asked = [replace(params, logprobs=i % 4) for i, params in enumerate(MIXED)]
    neighbours = MIXED[:2]
    outputs, logprobs, _ = run(oracle, asked + neighbours, [kind(oracle)], max_tokens=11)
    assert not any(logprobs[len(asked) :])
    for params, output, entries in zip(asked, outputs[: len(asked)], logprobs, strict=False):
        assert len(entries) == len(output) == 11
        for i, (token, entry) in enumerate(zip(output, entries, strict=True)):
            logits = torch.from_numpy(oracle.logits(PROMPT + output[:i]))
            expected = logits.log_softmax(-1)
            assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-4)
            best = expected.topk(params.logprobs)
            assert [each for each, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )


def test_log_probabilities_end_with_the_output_inside_a_block(oracle: Oracle) -> None:
    params = SamplingParams(temperature=1.0, logprobs=1, logit_bias={EOS: 2.0})
    outputs, logprobs, sequences = run(
        oracle, seeded(params, range(60)), [good(oracle)], max_tokens=9, ignore_eos=False
    )
    assert [len(entries) for entries in logprobs] == [len(output) for output in outputs]
    assert len({len(output) for output in outputs}) > 5
