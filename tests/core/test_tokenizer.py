"""The packaged model's tokenizer survives its conversion; SmolLM's split rule is restored."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from dflash_core import package
from dflash_core.errors import CheckpointError
from dflash_core.tokenizer import load_tokenizer
from tests.conftest import PACKAGED_TARGET
from tests.tiny import write_target


def test_end_of_sequence_ends_a_chat_turn(tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192


def test_every_special_token_is_one_id(tokenizer):
    tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    assert sorted(tokens) == list(range(17))
    for token_id, token in tokens.items():
        assert tokenizer.encode(token.content) == [token_id]
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    assert tokenizer.encode("a<|im_end|>b")[1:-1] == [2]


def test_plain_text_gets_no_special_tokens_and_comes_back(tokenizer):
    text = "Grüße, 世界! 🦖\n\n\tdef f(x):\n        return x + 10\n"
    ids = tokenizer.encode(text)
    assert min(ids) > 16
    assert tokenizer.decode(ids) == text


def test_the_chat_template_is_chatml_with_a_default_system_message(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert (ids.count(1), ids.count(2)) == (3, 2)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Steps:\n\n1. Go", ["Steps", ":", "ĊĊ", "1", ".", "ĠGo"]),
        ("if x:\n    42", ["if", "Ġx", ":", "ĊĠĠĠĠ", "4", "2"]),
    ],
)
def test_digits_split_before_anything_else(tokenizer, text, tokens):
    """transformers' GGUF import alone encodes these differently from the model's training."""
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens
    source = package.find(PACKAGED_TARGET)
    imported = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert imported.convert_ids_to_tokens(imported.encode(text)) != tokens


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no tokenizer\.json"):
        load_tokenizer(write_target(tmp_path))


def test_a_damaged_tokenizer(tmp_path):
    write_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
