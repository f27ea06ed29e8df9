"""The detokenizer hands out text as early as it is certain, and never a different text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from dflash_core.detokenizer import MAX_PENDING, Detokenizer

TEXTS = [
    "Hello, world! How are you?",
    "  leading spaces,\n\n\tand\tothers   ",
    "naïve café — “quoted” … €5",
    "日本語のテキストと中文文本、한국어도",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🤷🏽‍♀️ shrug, 🇩🇪",
    "ⴰⵎⴰⵣⵉⵖ ᚠᚢᚦᚨᚱᚲ 𝕳𝖊𝖑𝖑𝖔 𒀀𒀁",
    "a legitimate \ufffd replacement \ufffd\ufffd character",
]


@pytest.fixture(scope="module")
def byte_fallback_tokenizer():
    """As in Llama 2: pieces with a space mark, and a token per byte for what has no piece."""
    vocabulary = {"<unk>": 0, "▁": 1, "▁Hello": 2, "▁world": 3, "!": 4, "a": 5}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def pieces(detokenizer, token_ids, rng=None):
    """The deltas when `token_ids` arrive one by one, or in blocks of random sizes."""
    deltas, start = [], 0
    while start < len(token_ids):
        size = rng.randint(1, 8) if rng else 1
        deltas.append(detokenizer.append(token_ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.flush()]


def whole(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_token_by_token_and_in_blocks(tokenizer, text):
    token_ids = tokenizer.encode(text)
    assert "".join(pieces(Detokenizer(tokenizer), token_ids)) == text
    assert "".join(pieces(Detokenizer(tokenizer), token_ids, random.Random(0))) == text


def test_a_character_is_never_shown_in_halves(tokenizer):
    token_ids = tokenizer.encode("a 👩‍👩‍👧 b")
    assert len(token_ids) > 6  # the emoji span several tokens
    deltas = pieces(Detokenizer(tokenizer), token_ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""  # nothing was left for the end


def test_plain_text_is_shown_at_once(tokenizer):
    token_ids = tokenizer.encode("The quick brown fox jumps")
    deltas = pieces(Detokenizer(tokenizer), token_ids)
    assert deltas[:-1] == [whole(tokenizer, [token_id]) for token_id in token_ids]


def test_an_unfinished_character_is_shown_at_the_end(tokenizer):
    token_ids = tokenizer.encode("ok 🦖")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.append(token_ids[:-1]) == "ok"
    assert detokenizer.flush() == " \ufffd"


def test_special_tokens_and_unknown_ids_have_no_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    hello = tokenizer.encode("Hello")
    assert detokenizer.append([1, *hello, 2, len(tokenizer) + 7]) == "Hello"


def test_tokens_without_text_do_not_split_a_character(tokenizer):
    first, *rest = tokenizer.encode("🦖")
    token_ids = [first, *[2] * 50, *[len(tokenizer) + 7] * 50, *rest]
    deltas = pieces(Detokenizer(tokenizer), token_ids)
    assert "".join(deltas) == whole(tokenizer, token_ids) == "🦖"


@pytest.mark.parametrize("seed", range(30))
def test_any_ids_add_up_to_the_whole_decoding(tokenizer, seed):
    rng = random.Random(seed)
    decode = tokenizer.backend_tokenizer.decode
    broken = [i for i in range(len(tokenizer)) if "\ufffd" in decode([i])]
    assert len(broken) > 100  # ids that are parts of characters
    emoji = tokenizer.encode("🦖日本👩‍👩‍👧")
    token_ids: list[int] = []
    while len(token_ids) < 300:
        token_ids += rng.choice(
            [
                [rng.randrange(len(tokenizer))],
                rng.choices(broken, k=rng.randint(1, 40)),
                rng.sample(emoji, rng.randint(1, len(emoji))),
                emoji,
                [rng.randrange(17)],
            ]
        )
    assert "".join(pieces(Detokenizer(tokenizer), token_ids)) == whole(tokenizer, token_ids)
    assert "".join(pieces(Detokenizer(tokenizer), token_ids, rng)) == whole(tokenizer, token_ids)


@pytest.mark.parametrize("run", ["invalid", "special", "unknown", "words"])
def test_a_step_costs_the_same_however_long_the_output(tokenizer, run):
    token_ids = {
        "invalid": [tokenizer.convert_tokens_to_ids("Ģ")] * 500,  # a lone continuation byte
        "special": [2] * 500,
        "unknown": [len(tokenizer) + 1] * 500,
        "words": tokenizer.encode("word " * 500),
    }[run]
    assert None not in token_ids
    detokenizer = Detokenizer(tokenizer)
    decoded: list[int] = []
    decode = detokenizer._decode
    detokenizer._decode = lambda ids: decoded.append(len(ids)) or decode(ids)
    text = "".join(pieces(detokenizer, token_ids))
    assert text == whole(tokenizer, token_ids)
    assert max(decoded) <= MAX_PENDING + 2


@pytest.mark.parametrize("seed", range(20))
def test_byte_fallback_characters_are_whole(byte_fallback_tokenizer, seed):
    rng = random.Random(seed)
    vocabulary = byte_fallback_tokenizer.get_vocab()
    token_ids: list[int] = []
    for _ in range(60):
        character = rng.choice("é€日🦖")
        encoded = [vocabulary[f"<0x{byte:02X}>"] for byte in character.encode()]
        token_ids += rng.choice([encoded, [rng.choice([1, 2, 3, 4, 5])]])
    expected = byte_fallback_tokenizer.decode(token_ids)
    for blocks in (None, rng):
        deltas = pieces(Detokenizer(byte_fallback_tokenizer), token_ids, blocks)
        assert "".join(deltas) == expected
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("seed", range(20))
def test_byte_fallback_survives_invalid_bytes(byte_fallback_tokenizer, seed):
    rng = random.Random(seed)
    token_ids = [rng.randrange(byte_fallback_tokenizer.get_vocab_size()) for _ in range(200)]
    deltas = pieces(Detokenizer(byte_fallback_tokenizer), token_ids, rng)
    visible = "".join(deltas).replace("\ufffd", "")
    assert visible.count("Hello") == token_ids.count(2)


def test_the_space_before_the_first_word_is_dropped_only_there(byte_fallback_tokenizer):
    deltas = pieces(Detokenizer(byte_fallback_tokenizer), [2, 3, 1, 2, 4])
    assert deltas == ["Hello", " world", " ", " Hello", "!", ""]
