"""Static key/value cache, addressed by slot and position.

One tensor pair per layer (a single tensor for all layers would make a compiler copy it whole), of
`[slots + 1, max_len, G, D]`, buffers of a module, so that a captured graph knows them as state that
it updates in place. The extra slot is scratch: padded rows of a fixed-shape batch write there, so
that every write has a fixed shape and no write needs a condition.

Shape legend: B batch, L block length, R rows (B * L), C context length, G key/value heads of this
rank, D head dimension.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from dflash_core.cpu import kernels


class LayerCache(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        # Zeros, not empty: a masked key still meets 0 * value, and NaN garbage would survive that.
        for name in ("keys", "values"):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)


class KVCache(nn.Module):
    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.max_len = max_len
        shape = (num_slots + 1, max_len, num_kv_heads, head_dim)
        self.layers = nn.ModuleList(LayerCache(shape, dtype, device) for _ in range(num_layers))

    @property
    def keys(self) -> list[Tensor]:
        return [layer.keys for layer in self.layers]

    @property
    def values(self) -> list[Tensor]:
        return [layer.values for layer in self.layers]

    @functools.cached_property
    def packed(self) -> kernels.Caches:
        """As the CPU kernels know it."""
        return kernels.Caches(list(zip(self.keys, self.values, strict=True)))

    @property
    def scratch_slot(self) -> int:
        """The slot that padded rows use; its content is never read by a real sequence."""
        return self.num_slots

    def rows(self, slots: Tensor, positions: Tensor, valid: Tensor | None = None) -> Tensor:
        """Flat cache row of each (slot, position); invalid ones go to the scratch slot.

        All arguments broadcast to one shape; returns int64 of that shape.
        """
        row = slots.long() * self.max_len + positions.long()
        if valid is None:
            return row
        scratch = self.scratch_slot * self.max_len + positions.long().clamp(0, self.max_len - 1)
        return torch.where(valid, row, scratch)

    def write(self, layer: int, rows_R: Tensor, keys_RGD: Tensor, values_RGD: Tensor) -> None:
        """Store keys and values of R rows (duplicates may occur in the scratch slot only)."""
        cache = self.layers[layer]
        cache.keys.flatten(0, 1).index_copy_(0, rows_R, keys_RGD)
        cache.values.flatten(0, 1).index_copy_(0, rows_R, values_RGD)

    def read(self, layer: int, slots_B: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0..context_len-1, each `[B, C, G, D]`."""
        cache = self.layers[layer]
        keys, values = cache.keys[:, :context_len], cache.values[:, :context_len]
        return keys.index_select(0, slots_B), values.index_select(0, slots_B)
