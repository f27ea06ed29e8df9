"""Fill a model with its checkpoint's weights, strictly, each rank reading only its slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dflash_core.checkpoint import Checkpoint
from dflash_core.errors import CheckpointError
from dflash_core.parallel import Shard

WHOLE = Shard()
COMPUTED = "rotary_emb.inv_freq"  # old Llama exports carry this table; it follows from the config


@dataclass(frozen=True)
class Piece:
    """What one parameter of a rank takes from a checkpoint.

    Attributes:
        parameter: name in the module.
        tensor: name in the checkpoint.
        shard: which slice of it.
        shape: of the slice.
    """

    parameter: str
    tensor: str
    shard: Shard
    shape: tuple[int, ...]


def shard_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    prefix: str = "",
    partial: bool = False,
    unused: frozenset[str] = frozenset(),
) -> list[Piece]:
    """The slices that fill this rank's module, checked in name and shape; nothing is read.

    Args:
        model: the rank's module, on the meta device, say.
        prefix, partial, unused: see `build`.

    Raises:
        CheckpointError: a missing, unexpected or wrongly shaped tensor.
    """
    parameters = dict(model.named_parameters())
    names = {
        name.removeprefix(prefix): name
        for name in checkpoint.names()
        if not name.endswith(COMPUTED)
    }
    missing = sorted(parameters.keys() - names.keys())
    unexpected = [] if partial else sorted(names.keys() - parameters.keys() - unused)
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.folder}: weights do not match the architecture of its config.json; "
            f"missing: {missing[:8] or 'none'}, unexpected: {unexpected[:8] or 'none'}. "
            "Check that the folder holds the model that the config describes."
        )
    plan = []
    for name, parameter in parameters.items():
        shard = getattr(parameter, "shard", WHOLE)
        expected = list(parameter.shape)
        actual = list(checkpoint.shape(names[name]))
        if shard.dim is not None and len(actual) == len(expected):
            whole = actual[shard.dim]
            actual[shard.dim] = min(shard.length, max(0, whole - shard.start))
        if expected != actual:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {names[name]} gives this rank shape {actual}, "
                f"its config.json implies {expected}"
            )
        plan.append(Piece(name, names[name], shard, tuple(expected)))
    return plan


def build(
    make: Callable[[], nn.Module],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    prefix: str = "",
    partial: bool = False,
    unused: frozenset[str] = frozenset(),
) -> nn.Module:
    """Construct a model without allocating it, then load it tensor by tensor.

    Args:
        make: builds the module; called under the meta device.
        checkpoint: where the weights come from.
        dtype: of the parameters; buffers (rotary tables) keep their own.
        prefix: what the checkpoint puts before the names of the module's parameters.
        partial: the module is a part of the checkpoint's model; what it lacks is not unexpected.
        unused: checkpoint names (without prefix) that the module rightly has no use for.

    Raises:
        CheckpointError: a missing, unexpected or wrongly shaped tensor.
    """
    with torch.device("meta"):
        model = make()
    for piece in shard_plan(model, checkpoint, prefix=prefix, partial=partial, unused=unused):
        shard = piece.shard
        weight = checkpoint.read(
            piece.tensor, dim=shard.dim, start=shard.start, length=shard.length or None
        )
        owner_name, _, leaf = piece.parameter.rpartition(".")
        # A copy in any case: one tensor that lies in the file's mapping would keep all of it, also
        # what has been laid out anew since.
        weight = weight.to(device=device, dtype=dtype, copy=True)
        loaded = nn.Parameter(weight, requires_grad=False)
        setattr(model.get_submodule(owner_name), leaf, loaded)
    return model.to(device).eval()
