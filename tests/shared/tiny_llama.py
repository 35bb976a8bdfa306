"""A tiny Llama, written down twice: with the weights of Hugging Face, and with those of Megatron.

Both are plain torch, after the papers and the published layouts; they know nothing of recipes.
With biases of query, key and value it is a Qwen2, with experts a Mixtral.
"""

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
EXPERTS: Final = 4
CHOSEN: Final = 2
"""Number of experts that compute a token."""
IDS: Final = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

Weights = Mapping[str, torch.Tensor]
Queries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hf_weights(
    seed: int = 0, *, has_biases: bool = False, has_experts: bool = False
) -> dict[str, torch.Tensor]:
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
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        }  # fmt: skip
        mlp = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
        expert = {"w1": (FFN, HIDDEN), "w3": (FFN, HIDDEN), "w2": (HIDDEN, FFN)}
        if has_experts:
            own["block_sparse_moe.gate"] = (EXPERTS, HIDDEN)
            for number in range(EXPERTS):
                place = f"block_sparse_moe.experts.{number}"
                own |= {f"{place}.{name}": shape for name, shape in expert.items()}
        else:
            own |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if has_biases:
            sizes = {name: own[f"self_attn.{name}_proj"][:1] for name in "qkv"}
            place = f"model.layers.{layer}.self_attn"
            shapes |= {f"{place}.{name}_proj.bias": size for name, size in sizes.items()}
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

        def projected(x: torch.Tensor, name: str) -> torch.Tensor:
            bias = weights.get(f"model.layers.{number}.self_attn.{name}_proj.bias")
            found = x @ w(f"self_attn.{name}_proj").T + (0 if bias is None else bias.double())
            return found.reshape(*x.shape[:2], -1, HEAD_DIM)

        def attention(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("input_layernorm"), EPSILON)
            q, k, v = (projected(x, name) for name in "qkv")
            return _attended((q, k, v)) @ w("self_attn.o_proj").T

        def experts(x: torch.Tensor) -> torch.Tensor:
            # As MixtralSparseMoeBlock: the shares of all experts, and then those of the chosen.
            shares = (x @ w("block_sparse_moe.gate").T).softmax(-1)
            best = shares.topk(CHOSEN, -1)
            chosen = torch.zeros_like(shares).scatter(-1, best.indices, best.values)
            chosen /= chosen.sum(-1, keepdim=True)
            found = torch.zeros_like(x)
            for expert in range(EXPERTS):
                w1, w2, w3 = (w(f"block_sparse_moe.experts.{expert}.w{n}") for n in (1, 2, 3))
                found += chosen[..., expert, None] * ((silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
            return found

        def mlp(x: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, (HIDDEN,), w("post_attention_layernorm"), EPSILON)
            if f"model.layers.{number}.block_sparse_moe.gate.weight" in weights:
                return experts(x)
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
            if "decoder.layers.self_attention.linear_qkv.bias" in weights:
                mixed = mixed + w("self_attention.linear_qkv.bias")
            mixed = mixed.reshape(*x.shape[:2], GROUPS, size)
            q, k, v = torch.split(mixed, [size - 2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], -1)
            query = q.reshape(*q.shape[:2], HEADS, HEAD_DIM)
            return _attended((query, k, v)) @ w("self_attention.linear_proj.weight").T

        def experts(x: torch.Tensor) -> torch.Tensor:
            # As TopKRouter: the logits of the chosen experts, and then their shares.
            logits, numbers = (x @ w("mlp.router.weight").T).topk(CHOSEN, -1)
            shares = logits.softmax(-1)
            fc1, fc2 = (w(f"mlp.experts.experts.linear_fc{n}.weight") for n in (1, 2))
            found = torch.zeros_like(x)
            for place in range(CHOSEN):
                own1, own2 = fc1[numbers[..., place]], fc2[numbers[..., place]]
                gate, up = torch.einsum("btfh,bth->btf", own1, x).chunk(2, -1)
                own = torch.einsum("bthf,btf->bth", own2, silu(gate) * up)
                found += shares[..., place, None] * own
            return found

        def mlp(x: torch.Tensor) -> torch.Tensor:
            norms = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            norm = next(name for name in norms if f"decoder.layers.{name}" in weights)
            x = rms_norm(x, (HIDDEN,), w(norm), EPSILON)
            if "decoder.layers.mlp.router.weight" in weights:
                return experts(x)
            gate, up = (x @ w("mlp.linear_fc1.weight").T).chunk(2, -1)
            return (silu(gate) * up) @ w("mlp.linear_fc2.weight").T

        return attention, mlp

    layers = [layer(number) for number in range(LAYERS)]
    embedding = weights["embedding.word_embeddings.weight"]
    norm, head = weights["decoder.final_layernorm.weight"], weights["output_layer.weight"]
    return _logits(embedding, layers, norm, head)
