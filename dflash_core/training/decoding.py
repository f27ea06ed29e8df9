"""One token for each of many conversations: the target's decode step laid out for throughput.

The served target attends with an additive mask over gathered slots, for few rows of several tokens
each. Here rows are many, slots are the rows in order and every row has one token, so attention is
two batched products over the whole cache, which is contiguous per key/value head: measured on one
core with 192 rows, 2.5 ms a layer where `scaled_dot_product_attention` needs 11.

Shape legend: R rows, H hidden, G key/value heads, M query heads per key/value head, C positions of
the cache, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_core.target import LlamaTarget


class RowsDecoder:
    """The target with a key/value cache of one slot per row.

    Args:
        model: unsharded; its layers' own weights are used.
        rows: R.
        max_len: C, positions per row.
    """

    def __init__(self, model: LlamaTarget, *, rows: int, max_len: int) -> None:
        config, weight = model.config, model.norm.weight
        self.model = model
        self.head_dim = config.head_dim
        self.groups = config.num_kv_heads
        self.max_len = max_len
        shape = (rows * self.groups, max_len, self.head_dim)
        # Zeros, not empty: a masked key still meets 0 * value, and NaN garbage would survive that.
        self.keys = [weight.new_zeros(shape) for _ in model.layers]
        self.values = [weight.new_zeros(shape) for _ in model.layers]

    @torch.inference_mode()
    def fill(self, tokens: tuple[int, ...]) -> None:
        """Let all rows begin with the same tokens, at position 0."""
        for position, token in enumerate(tokens):
            self.step(torch.tensor([token]), torch.tensor([position]))
        for cache in (*self.keys, *self.values):
            rows = cache.view(-1, self.groups, self.max_len, self.head_dim)
            rows[1:] = rows[:1].clone()

    @torch.inference_mode()
    def step(self, tokens_R: Tensor, positions_R: Tensor) -> Tensor:
        """Hidden states `[R, H]` before the final norm; the cache gains these tokens.

        Args:
            tokens_R, positions_R: int64, of the first R rows; positions below `max_len`.
        """
        x_RH = self.model.embed_tokens(tokens_R)
        rotary = self.model.rotary(positions_R, x_RH.dtype)
        heads = torch.arange(len(tokens_R) * self.groups)
        slots = heads * self.max_len + positions_R.repeat_interleave(self.groups)
        unseen = torch.arange(self.max_len) > positions_R[:, None]
        mask_R1C = torch.zeros(unseen.shape).masked_fill(unseen, -math.inf)
        mask_R1C = mask_R1C.repeat_interleave(self.groups, 0)[:, None]
        for index, layer in enumerate(self.model.layers):
            x_RH = x_RH + self._attention(
                index, layer.input_layernorm(x_RH), rotary, slots, mask_R1C
            )
            x_RH = x_RH + layer.mlp(layer.post_attention_layernorm(x_RH))
        return x_RH

    def _attention(
        self,
        index: int,
        x_RH: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor,
    ) -> Tensor:
        R, D = len(x_RH), self.head_dim
        module = self.model.layers[index].self_attn
        q, k, v = module.project(x_RH, rotary)
        q = q.reshape(R * self.groups, -1, D)
        keys, values = self.keys[index], self.values[index]
        keys.view(-1, D).index_copy_(0, slots, k.reshape(-1, D))
        values.view(-1, D).index_copy_(0, slots, v.reshape(-1, D))
        keys, values = keys[: R * self.groups], values[: R * self.groups]
        # Softmax in float32, whatever the products' dtype is.
        scores = torch.bmm(q / math.sqrt(D), keys.transpose(1, 2)).float().add_(mask)
        weights = scores.softmax(-1).to(x_RH.dtype)
        return module.o_proj(torch.bmm(weights, values).view(R, -1))
