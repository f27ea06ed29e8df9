"""A Llama model shipped as a GGUF file inside a Python package, converted once to a checkpoint.

The result (config.json, bfloat16 safetensors, tokenizer, chat template) lies
in the cache root: DFLASH_CACHE, by default ~/.cache/dflash. It is keyed by the file's content.

Weights are stored in bfloat16, the dtype that they are served in. Measured on the packaged model
against exact float32 weights: the rounding moves next-token distributions by a mean KL divergence
of 1e-4, computing in bfloat16 moves them by 1.6e-3, and the file is half as large.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from dflash_core.errors import CheckpointError

if TYPE_CHECKING:
    import gguf

LAYOUT_VERSION = 1  # of the converted folder; part of its name
DTYPE = torch.bfloat16
NAMES = {  # GGUF tensor name -> checkpoint name; blk.N and model.layers.N are handled apart
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
logger = logging.getLogger(__name__)


def cache_root() -> Path:
    return Path(os.environ.get("DFLASH_CACHE") or "~/.cache/dflash").expanduser()


def converted(source: Path) -> Path:
    """The checkpoint folder of a GGUF file, made on first use.

    Safe to call from several processes at once. Raises CheckpointError.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_root() / f"{source.stem}-{digest[:12]}-v{LAYOUT_VERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                logger.info("converting %s once into %s", source.name, folder)
                _convert_atomically(source, folder)
    except OSError as error:
        raise CheckpointError(
            f"{source}: cannot be converted into {folder.parent} ({error.strerror}); set "
            "DFLASH_CACHE to a folder that can be written and has 300 MB free"
        ) from error
    return folder


def _convert_atomically(source: Path, folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        convert(source, unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint of one GGUF file into an existing folder. Raises CheckpointError."""
    import gguf
    from rich.console import Console
    from rich.progress import track
    from safetensors.torch import save_file

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source}: damaged or not a GGUF file ({error})") from error
    config = _config(reader, source)
    console = Console(stderr=True)
    weights = {}
    for tensor in track(
        reader.tensors,
        f"Dequantising {source.name}",
        console=console,
        disable=not console.is_terminal,
    ):
        name = _checkpoint_name(tensor.name, source)
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            weight = _half_split(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _half_split(weight, config["num_key_value_heads"])
        weights[name] = weight.to(DTYPE)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in special})
    _save_tokenizer(reader, source, folder, config["max_position_embeddings"])


def _config(reader: gguf.GGUFReader, source: Path) -> dict[str, Any]:
    """A config.json as transformers writes it, from the metadata of the file."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{source}: general.architecture is {architecture!r}, not 'llama'")
    scaling = value("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(f"{source}: llama.rope.scaling.type {scaling!r} is not supported")
    hidden_size, num_heads = value("llama.embedding_length"), value("llama.attention.head_count")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "vocab_size": value("llama.vocab_size") or len(value("tokenizer.ggml.tokens")),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": _shortest(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(value("llama.rope.freq_base")),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": str(DTYPE).removeprefix("torch."),
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 of the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _checkpoint_name(name: str, source: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in NAMES:
        raise CheckpointError(f"{source}: tensor {name} has no counterpart in a Llama checkpoint")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.weight"


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's interleaving of rotary pairs: a head's rows become (0, 2, .., 1, 3, ..)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _save_tokenizer(
    reader: gguf.GGUFReader, source: Path, folder: Path, model_max_length: int
) -> None:
    """Tokenizer and chat template, through transformers' reader of GGUF files.

    It ignores the split rule that `tokenizer.ggml.pre` names; without SmolLM's (every digit on its
    own, before the byte-level rule) a line break or indentation in front of a number would encode
    differently from what the model was trained on.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    field = reader.get_field("tokenizer.ggml.pre")
    split_rule = None if field is None else field.contents()
    if split_rule != "smollm":
        raise CheckpointError(
            f"{source}: tokenizer.ggml.pre is {split_rule!r}; only 'smollm' is supported, use the "
            "safetensors release of the model"
        )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model_max_length
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # how it was loaded just now, not what it is
        settings.pop(name, None)
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
