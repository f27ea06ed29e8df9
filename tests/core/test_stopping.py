"""What ends an output, and that nothing after the end is kept: design section 2.6."""

from __future__ import annotations

import random

import pytest

from dflash_core.request import GenerationRequest
from dflash_core.sampling import SamplingParams
from dflash_core.stopping import Stopping

EOS = 2


@pytest.fixture
def stopping(tokenizer):
    def build(*, prompt_length=3, max_model_len=1000, max_tokens=100, **options):
        request = GenerationRequest("r", [5] * prompt_length, max_tokens, **options)
        return Stopping(tokenizer, request, eos_token_ids=[EOS], max_model_len=max_model_len)

    return build


def run(stopping, blocks):
    """All kept ids, all text, and the last output."""
    token_ids, text = [], ""
    for block in blocks:
        output = stopping.append(block)
        token_ids += output.token_ids
        text += output.text
        if output.finish_reason:
            break
    return token_ids, text, output


class TestTokens:
    def test_a_stop_token_inside_the_block_comes_before_max_tokens(self, stopping):
        output = stopping(max_tokens=5, stop_token_ids=(77,)).append([110, 111, 77, 20, 21, 22])
        assert output.token_ids == [110, 111, 77]
        assert (output.finish_reason, output.stop_reason) == ("stop", 77)

    def test_eos_is_kept_and_counted_but_has_no_text_and_no_reason(self, stopping, tokenizer):
        state = stopping()
        output = state.append([*tokenizer.encode("Hello"), EOS, *tokenizer.encode(" more")])
        assert output.token_ids == [*tokenizer.encode("Hello"), EOS]
        assert output.text == "Hello"
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert state.num_tokens == 2

    def test_a_stop_token_with_text_does_not_show_it(self, stopping, tokenizer):
        hello, world = tokenizer.encode("Hello world")
        output = stopping(stop_token_ids=(world,)).append([hello, world])
        assert (output.token_ids, output.text) == ([hello, world], "Hello")

    def test_the_earliest_of_several_stop_tokens_counts(self, stopping):
        output = stopping(stop_token_ids=(77, 78)).append([110, 78, EOS, 77])
        assert (output.token_ids, output.stop_reason) == ([110, 78], 78)

    def test_a_stop_token_exactly_at_max_tokens_is_a_stop(self, stopping):
        output = stopping(max_tokens=3).append([110, 111, EOS, 112])
        assert (output.token_ids, output.finish_reason) == ([110, 111, EOS], "stop")

    def test_a_stop_token_after_max_tokens_is_not_reached(self, stopping):
        output = stopping(max_tokens=2).append([110, 111, EOS])
        assert (output.token_ids, output.finish_reason) == ([110, 111], "length")

    def test_ignore_eos_goes_on(self, stopping, tokenizer):
        hello = tokenizer.encode("Hello")
        output = stopping(ignore_eos=True).append([EOS, *hello, EOS])
        assert output.token_ids == [EOS, *hello, EOS]
        assert (output.text, output.finish_reason) == ("Hello", None)

    def test_ignore_eos_leaves_explicit_stop_ids_alone(self, stopping):
        output = stopping(ignore_eos=True, stop_token_ids=(EOS,)).append([110, EOS, 111])
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (
            [110, EOS],
            "stop",
            EOS,
        )


class TestLength:
    def test_max_tokens_cuts_the_block(self, stopping):
        state = stopping(max_tokens=5)
        assert state.append([110, 111, 112]).finish_reason is None
        assert state.remaining_tokens == 2
        output = state.append([113, 114, 115, 116])
        assert (output.token_ids, output.finish_reason) == ([113, 114], "length")
        assert output.stop_reason is None
        assert (state.num_tokens, state.remaining_tokens) == (5, 0)

    def test_prompt_and_output_fit_the_context_exactly(self, stopping):
        state = stopping(prompt_length=8, max_model_len=12)
        output = state.append([110, 111, 112, 113, 114, 115])
        assert (output.token_ids, output.finish_reason) == ([110, 111, 112, 113], "length")

    def test_a_prompt_without_room_is_refused(self, stopping):
        with pytest.raises(ValueError, match="prompt has 8 tokens and max_model_len is 8"):
            stopping(prompt_length=8, max_model_len=8)

    def test_half_a_character_is_shown_when_the_length_ends_it(self, stopping, tokenizer):
        emoji = tokenizer.encode("🦖")
        assert len(emoji) > 1
        output = stopping(max_tokens=1).append(emoji)
        assert (output.text, output.finish_reason) == ("\ufffd", "length")


class TestStrings:
    def test_text_is_cut_and_ids_end_with_the_token_that_completed_it(self, stopping, tokenizer):
        token_ids = tokenizer.encode("one two three four")
        output = stopping(stop=(" three",)).append(token_ids)
        assert output.text == "one two"
        assert output.token_ids == tokenizer.encode("one two three")
        assert (output.finish_reason, output.stop_reason) == ("stop", " three")

    def test_inside_a_token(self, stopping, tokenizer):
        token_ids = tokenizer.encode("one two three")
        kept, text, last = run(stopping(stop=("hre",)), [token_ids])
        assert (kept, text, last.stop_reason) == (token_ids, "one two t", "hre")

    def test_across_blocks_nothing_of_it_is_shown_too_early(self, stopping, tokenizer):
        one, two, three, four = ([i] for i in tokenizer.encode("one two three four"))
        state = stopping(stop=("two three",))
        assert state.append(one).text == "one"
        assert state.append(two).text == " "
        output = state.append(three + four)
        assert (output.token_ids, output.text, output.finish_reason) == (three, "", "stop")

    def test_a_false_beginning_is_shown_once_it_is_decided(self, stopping, tokenizer):
        one, two, three, four = ([i] for i in tokenizer.encode("one two three four"))
        state = stopping(stop=("two twelve",))
        assert state.append(one + two).text == "one "
        assert state.append(three).text == "two three"
        assert state.append(four).text == " four"

    def test_a_beginning_is_shown_when_something_else_ends_the_output(self, stopping, tokenizer):
        token_ids = tokenizer.encode("one two")
        for options, block in [({"max_tokens": 2}, token_ids), ({}, [*token_ids, EOS])]:
            output = stopping(stop=("two three",), **options).append(block)
            assert output.text == "one two"
            assert output.finish_reason in ("stop", "length")

    def test_the_string_that_is_complete_first_wins(self, stopping, tokenizer):
        token_ids = tokenizer.encode("one two three four")
        for stop in [(" four", " two"), (" two", " four")]:
            _, text, last = run(stopping(stop=stop), [token_ids])
            assert (text, last.stop_reason) == ("one", " two")

    def test_of_two_that_end_together_the_longer_one_wins(self, stopping, tokenizer):
        _, text, last = run(stopping(stop=("wo", " two")), [tokenizer.encode("one two")])
        assert (text, last.stop_reason) == ("one", " two")

    def test_a_string_before_a_stop_token_wins(self, stopping, tokenizer):
        token_ids = tokenizer.encode("one two")
        output = stopping(stop=(" two",)).append([*token_ids, EOS, 110])
        assert (output.token_ids, output.stop_reason) == (token_ids, " two")

    def test_at_max_tokens_it_is_a_stop(self, stopping, tokenizer):
        output = stopping(stop=(" two",), max_tokens=2).append(tokenizer.encode("one two three"))
        assert (output.text, output.finish_reason, output.stop_reason) == ("one", "stop", " two")

    def test_within_a_character_of_several_tokens(self, stopping, tokenizer):
        token_ids = tokenizer.encode("ok 🦖 and more")
        kept, text, last = run(stopping(stop=("🦖",)), [[i] for i in token_ids])
        assert (text, last.stop_reason) == ("ok ", "🦖")
        assert tokenizer.decode(kept) == "ok 🦖"


class TestMinTokens:
    """Stop strings do not count in the first `min_tokens` tokens; ids the sampler keeps out."""

    def blocks(self, stopping, tokenizer, text, min_tokens, stop, size):
        sampling = SamplingParams(min_tokens=min_tokens)
        token_ids = tokenizer.encode(text)
        blocks = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        return run(stopping(stop=stop, sampling=sampling), blocks)

    @pytest.mark.parametrize("size", [1, 3, 10])
    def test_a_stop_string_within_them_does_not_stop(self, stopping, tokenizer, size):
        text = "one two three two one two three"
        kept, shown, last = self.blocks(stopping, tokenizer, text, 3, (" two",), size)
        assert (len(kept), shown, last.stop_reason) == (4, "one two three", " two")

    @pytest.mark.parametrize("size", [1, 3, 10])
    def test_one_that_ends_after_them_does(self, stopping, tokenizer, size):
        text = "one two three four"
        kept, shown, last = self.blocks(stopping, tokenizer, text, 2, (" two three",), size)
        assert (len(kept), shown, last.finish_reason) == (3, "one", "stop")

    @pytest.mark.parametrize("size", [1, 3, 10])
    def test_one_that_is_held_back_for_another_is_still_too_early(self, stopping, tokenizer, size):
        """ " two" ends in time to be ignored, while it may be the beginning of the longer one."""
        text = "one two three four"
        stop = (" two", "one two four")
        kept, shown, last = self.blocks(stopping, tokenizer, text, 2, stop, size)
        assert (len(kept), last.finish_reason) == (4, None)
        assert text.startswith(shown)


@pytest.mark.parametrize("seed", range(40))
def test_the_split_into_blocks_never_changes_the_answer(stopping, tokenizer, seed):
    rng = random.Random(seed)
    words = "the cat 🦖 sat on 日本 the mat. STOP\n\n héllo".split(" ")
    token_ids = tokenizer.encode(" ".join(rng.choices(words, k=40)))
    token_ids.insert(rng.randrange(len(token_ids) + 20) % len(token_ids), EOS)
    options = {
        "stop": tuple(rng.sample(["STOP", "the mat", "\n\n", "cat sat", "🦖 日", "zzz"], k=3)),
        "max_tokens": rng.randint(5, 80),
    }
    one_by_one = run(stopping(**options), [[i] for i in token_ids])
    blocks, rest = [], token_ids
    while rest:
        size = rng.randint(1, 8)
        blocks, rest = [*blocks, rest[:size]], rest[size:]
    in_blocks = run(stopping(**options), blocks)
    assert in_blocks[:2] == one_by_one[:2]
    assert in_blocks[2].finish_reason == one_by_one[2].finish_reason
    assert in_blocks[2].stop_reason == one_by_one[2].stop_reason
    kept, text, last = one_by_one
    if not isinstance(last.stop_reason, str):
        assert text == tokenizer.decode(kept, skip_special_tokens=True)
    else:
        assert tokenizer.decode(kept, skip_special_tokens=True).startswith(text + last.stop_reason)


def test_after_the_end_nothing_can_be_added(stopping):
    state = stopping()
    state.append([EOS])
    with pytest.raises(RuntimeError, match="after the output has ended"):
        state.append([110])


def test_an_empty_step_changes_nothing(stopping):
    output = stopping(stop=("x",)).append([])
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", None)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("request_id", ("", [1], 1)),
        ("prompt_token_ids", ("r", [], 1)),
        ("prompt_token_ids", ("r", [1, -1], 1)),
        ("max_tokens", ("r", [1], 0)),
        ("stop", ("r", [1], 1, ("a", ""))),
        ("stop", ("r", [1], 1, "abc")),
    ],
)
def test_a_request_nobody_could_serve_names_its_field(field, arguments):
    with pytest.raises(ValueError, match=f"^{field}"):
        GenerationRequest(*arguments)
