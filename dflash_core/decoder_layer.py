"""The decoder layer of Llama and Qwen3: what the target and the drafter are made of.

Shape legend: B batch, L block length, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.attention import Attention, AttentionInputs
from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.kv_cache import KVCache
from dflash_core.norm import RMSNorm
from dflash_core.parallel import SINGLE, TensorParallel


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, tp: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.gate_proj = tp.layers.ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.up_proj = tp.layers.ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.down_proj = tp.layers.RowParallelLinear(intermediate_size, hidden_size, bias, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Args: as `Attention`, and whether the linear layers of the MLP have biases."""

    def __init__(
        self,
        config: TargetConfig | DrafterConfig,
        layer: int,
        tp: TensorParallel,
        *,
        qk_norm: bool = False,
        mlp_bias: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, tp, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, mlp_bias, tp)

    def forward(self, x_BLH: Tensor, inputs: AttentionInputs, cache: KVCache) -> Tensor:
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), inputs, cache)
        return x_BLH + self.mlp(self.post_attention_layernorm(x_BLH))
