"""The key/value cache as state of traced graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_core.kv_cache import KVCache


class StateCache(KVCache):
    """A graph's state is every registered, persistent buffer that its trace assigns anew: NxD makes
    it an input and an output that are the same memory, zero at first, and common to all graphs of
    a program (`SimpleAliasedModel` in NxD's `test/integration/inference/test_nxd_model.py`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for layer in self.layers:
            for name, buffer in list(layer.named_buffers()):
                layer.register_buffer(name, buffer, persistent=True)

    def write(self, layer: int, rows_R: Tensor, keys_RGD: Tensor, values_RGD: Tensor) -> None:
        cache = self.layers[layer]
        for name, new_RGD in (("keys", keys_RGD), ("values", values_RGD)):
            old = getattr(cache, name)
            written = old.flatten(0, 1).index_copy(0, rows_R, new_RGD)
            setattr(cache, name, written.view(old.shape))
