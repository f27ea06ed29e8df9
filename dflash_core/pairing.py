"""Whether target, drafter and deployment options fit together, decided before anything starts."""

from __future__ import annotations

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.errors import PairingError


def validate_pair(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    num_speculative_tokens: int,
    target_tp: int,
    drafter_tp: int,
    max_model_len: int,
) -> None:
    """Refuse what could only fail later.

    Args:
        target, drafter: normalised configs; drafter None means no speculation.
        num_speculative_tokens: K, draft tokens per step; 0 without a drafter.
        target_tp, drafter_tp: tensor-parallel ranks.
        max_model_len: positions per sequence, prompt and output together.

    Raises:
        PairingError: names the field, both values, and the remedy.
    """
    if num_speculative_tokens < 0:
        raise PairingError(
            f"num_speculative_tokens is {num_speculative_tokens}; it must be 0 (no speculation) or "
            "more"
        )
    _check_length(target.max_position_embeddings, max_model_len, "target")
    _check_parallel(target, target_tp, "target")
    if drafter is None:
        if num_speculative_tokens:
            raise PairingError(
                f"num_speculative_tokens is {num_speculative_tokens} but there is no drafter; name "
                "a drafter checkpoint or set it to 0"
            )
        return
    _check_drafter(target, drafter)
    if num_speculative_tokens > drafter.block_size - 1:
        raise PairingError(
            f"num_speculative_tokens is {num_speculative_tokens}, but the drafter was trained with "
            f"block_size {drafter.block_size} and drafts at most {drafter.block_size - 1} tokens; "
            f"set num_speculative_tokens <= {drafter.block_size - 1}"
        )
    _check_length(drafter.max_position_embeddings, max_model_len, "drafter")
    _check_parallel(drafter, drafter_tp, "drafter")


def _check_drafter(target: TargetConfig, drafter: DrafterConfig) -> None:
    remedy = "use the drafter that was trained for this target"
    for field, wanted, given in (
        ("hidden_size", target.hidden_size, drafter.hidden_size),
        ("vocab_size", target.vocab_size, drafter.vocab_size),
        ("num_target_layers", target.num_layers, drafter.num_target_layers),
    ):
        if wanted != given:
            raise PairingError(
                f"{field}: the drafter's is {given}, but the target's is {wanted}; {remedy}"
            )
    highest = max(drafter.target_layer_ids)
    if highest >= target.num_layers:
        raise PairingError(
            f"target_layer_ids: the drafter taps layer {highest}, but the target has layers "
            f"0..{target.num_layers - 1}; {remedy}"
        )
    if drafter.mask_token_id >= target.vocab_size:
        raise PairingError(
            f"mask_token_id: the drafter's is {drafter.mask_token_id}, but the target's vocab_size "
            f"is {target.vocab_size}; {remedy}"
        )


def _check_length(max_position_embeddings: int, max_model_len: int, role: str) -> None:
    if max_model_len < 1:
        raise PairingError(f"max_model_len is {max_model_len}; it must be at least 1")
    if max_model_len > max_position_embeddings:
        raise PairingError(
            f"max_model_len is {max_model_len}, but max_position_embeddings of the {role} is "
            f"{max_position_embeddings}; set max_model_len <= {max_position_embeddings}"
        )


def _check_parallel(config: TargetConfig | DrafterConfig, tp: int, role: str) -> None:
    """Every split dimension divides evenly; fewer key/value heads than ranks are replicated."""
    option = f"tensor_parallel_size of the {role}"
    if tp < 1:
        raise PairingError(f"{option} is {tp}; it must be at least 1")
    for field, size in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
    ):
        if size % tp:
            raise PairingError(
                f"{option} is {tp}, but {field} {size} is not a multiple of it; choose a common "
                "divisor of num_attention_heads, intermediate_size and vocab_size"
            )
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        raise PairingError(
            f"{option} is {tp}, but num_key_value_heads {config.num_kv_heads} is neither a "
            "multiple nor a divisor of it; choose a tensor_parallel_size that fits both"
        )
