"""The forward pass of Llama, Qwen2 and Qwen3 decoders over one packed batch of prefill and decode tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engines.batch import PackedBatch
from actors.engines.kv_cache import KVCache
from actors.engines.model_config import ModelConfig
from actors.engines.model_weights import Layer, Weights


def forward(config: ModelConfig, weights: Weights, turns: Tensor, cache: KVCache, batch: PackedBatch) -> Tensor:
    """Write the batch's keys and values into `cache`; returns float32 logits [R, vocab] of its `last` rows.

    `turns` is `rotations(…)` for every position. T packed tokens, E hidden, H heads, K KV heads, D head size.
    """
    eps = torch.tensor(config.rms_eps, dtype=torch.float32)
    x_TE = F.embedding(batch.ids, weights.embed)
    turn = turns.index_select(0, batch.positions)
    for i, layer in enumerate(weights.layers):
        attended = _attention(config, layer, i, _norm(x_TE, layer.input_norm, eps), turn, cache, batch)
        if i == config.num_layers - 1 and batch.last is not None:
            # The last layer's output is only wanted where a token will be sampled.
            attended, x_TE = attended.index_select(0, batch.last), x_TE.index_select(0, batch.last)
        x_TE = x_TE + _linear(attended, layer.out, layer.out_bias)
        gate, up = _linear(_norm(x_TE, layer.post_norm, eps), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        x_TE = x_TE + _linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
    return torch.mm(_norm(x_TE, weights.norm, eps), weights.head).float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _norm(x_TE: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """On CPU in float32 these four kernels take 0.6 of the time of rms_norm, which is a chain of six there."""
    if x_TE.dtype != torch.float32 or x_TE.device.type != "cpu":
        return F.rms_norm(x_TE, weight.shape, weight, float(eps))
    norm = torch.linalg.vector_norm(x_TE, dim=-1, keepdim=True)
    return (x_TE * torch.addcmul(eps, norm, norm, value=1 / x_TE.shape[-1]).rsqrt_()).mul_(weight)


def _attention(
    config: ModelConfig, layer: Layer, i: int, x_TE: Tensor, turn: Tensor, cache: KVCache, batch: PackedBatch
) -> Tensor:
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    num = x_TE.shape[0]
    qkv = _linear(x_TE, layer.qkv, layer.qkv_bias)
    turned = (heads + kv_heads) * size
    qk = qkv[:, :turned].view(num, heads + kv_heads, size)
    if layer.qk_norm is not None:
        qk = F.rms_norm(qk, (size,), None, config.rms_eps) * layer.qk_norm
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
    qk = torch.view_as_real(pairs * turn).flatten(-2).to(qkv.dtype)
    cache.write(i, batch.rows, qk[:, heads:].reshape(num, -1), qkv[:, turned:])
    return cache.attend(i, qk[:, :heads], batch)
