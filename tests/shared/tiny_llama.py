"""A tiny Llama, written down twice: with the weights of Hugging Face, and with those of Megatron.

Both are plain torch, after the papers and the published layouts; they know nothing of recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

LAYERS: Final = 3
HIDDEN: Final = 16
FFN: Final = 24
VOCABULARY: Final = 20
HEADS: Final = 4
GROUPS: Final = 2
HEAD_DIM: Final = 4
EPSILON: Final = 1e-6
IDS: Final = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

Weights = Mapping[str, torch.Tensor]
Queries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hf_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by the names that they have in Hugging Face."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (HEADS * HEAD_DIM, HIDDEN), (GROUPS * HEAD_DIM, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        own = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key,
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM), "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[batch, heads, positions, HEAD_DIM]``; pairs are half a head apart."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attended(queries: Queries) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in queries)
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    found = scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
    return found.transpose(1, 2).flatten(2)


def _logits(
    embedding: torch.Tensor,
    layers: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., torch.Tensor]]],
    norm: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    x = embedding[IDS].double()
    for attention, mlp in layers:
        x = x + attention(x)
        x = x + mlp(x)
    return rms_norm(x, (HIDDEN,), norm.double(), EPSILON) @ head.T.double()


def hf_logits(weights: Weights) -> torch.Tensor:
    """Logits for ``IDS`` of a model with the weights of Hugging Face."""

    def layer(number: int) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        def w(name: str) -> torch.Tensor:
            return weights[f"model.layers.{number}.{name}.weight"].double()

        def attention(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("input_layernorm"), EPSILON)
            q, k, v = (
                (x @ w(f"self_attn.{n}_proj").T).reshape(*x.shape[:2], -1, HEAD_DIM) for n in "qkv"
            )
            return _attended((q, k, v)) @ w("self_attn.o_proj").T

        def mlp(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("post_attention_layernorm"), EPSILON)
            gate, up = (x @ w(f"mlp.{n}_proj").T for n in ("gate", "up"))
            return (silu(gate) * up) @ w("mlp.down_proj").T

        return attention, mlp

    layers = [layer(number) for number in range(LAYERS)]
    embedding = weights["model.embed_tokens.weight"]
    return _logits(embedding, layers, weights["model.norm.weight"], weights["lm_head.weight"])


def megatron_logits(weights: Weights) -> torch.Tensor:
    """The same of a model with the weights of Megatron-Core, the layers stacked."""

    def layer(number: int) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        def w(name: str) -> torch.Tensor:
            return weights[f"decoder.layers.{name}"][number].double()

        def attention(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("self_attention.linear_qkv.layer_norm_weight"), EPSILON)
            # As SelfAttention.get_query_key_value_tensors: a group is its queries, a key, a value.
            size = (HEADS // GROUPS + 2) * HEAD_DIM
            mixed = x @ w("self_attention.linear_qkv.weight").T
            mixed = mixed.reshape(*x.shape[:2], GROUPS, size)
            q, k, v = torch.split(mixed, [size - 2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], -1)
            query = q.reshape(*q.shape[:2], HEADS, HEAD_DIM)
            return _attended((query, k, v)) @ w("self_attention.linear_proj.weight").T

        def mlp(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("mlp.linear_fc1.layer_norm_weight"), EPSILON)
            gate, up = (x @ w("mlp.linear_fc1.weight").T).chunk(2, -1)
            return (silu(gate) * up) @ w("mlp.linear_fc2.weight").T

        return attention, mlp

    layers = [layer(number) for number in range(LAYERS)]
    embedding = weights["embedding.word_embeddings.weight"]
    norm, head = weights["decoder.final_layernorm.weight"], weights["output_layer.weight"]
    return _logits(embedding, layers, norm, head)
