"""Ready-made recipes between the names of Llama in Hugging Face and those of GPT in Megatron-Core.

The values are the same; query, key and value, and gate and up, are one tensor each in Megatron.
Both turn halves of a head in rotary embeddings, so that no rows change places within a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from dist_checkpointing.planning.recipe import Recipe
from dist_checkpointing.planning.recipe_rules import Drop, Keep, Missing, Rename, Rule
from dist_checkpointing.planning.recipe_shapes import Concat, Resize, Split, Stack, Unstack

Layers = Literal["stacked", "apart"]

_HF = "model.layers.{i}"
_MEGATRON = "decoder.layers.{i}"
_NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    f"{_HF}.input_layernorm.weight": f"{_MEGATRON}.self_attention.linear_qkv.layer_norm_weight",
    f"{_HF}.post_attention_layernorm.weight": f"{_MEGATRON}.mlp.linear_fc1.layer_norm_weight",
    f"{_HF}.self_attn.o_proj.{{x}}": f"{_MEGATRON}.self_attention.linear_proj.{{x}}",
    f"{_HF}.self_attn.q_norm.weight": f"{_MEGATRON}.self_attention.q_layernorm.weight",
    f"{_HF}.self_attn.k_norm.weight": f"{_MEGATRON}.self_attention.k_layernorm.weight",
    f"{_HF}.mlp.down_proj.{{x}}": f"{_MEGATRON}.mlp.linear_fc2.{{x}}",
}
_QKV = [f"{_HF}.self_attn.{name}_proj.{{x}}" for name in "qkv"]
_MEGATRON_QKV = f"{_MEGATRON}.self_attention.linear_qkv.{{x}}"
_GATE_UP = [f"{_HF}.mlp.{name}_proj.{{x}}" for name in ("gate", "up")]
_MEGATRON_FC1 = f"{_MEGATRON}.mlp.linear_fc1.{{x}}"
_VOCABULARY = r"embedding\.word_embeddings\.weight|output_layer\.weight"
_HF_VOCABULARY = r"model\.embed_tokens\.weight|lm_head\.weight"


def llama_to_megatron(
    num_query_groups: int, *, layers: Layers = "stacked", vocab_size: int | None = None
) -> Recipe:
    """From a Llama-style model of Hugging Face to a GPT model of Megatron-Core.

    Args:
        num_query_groups: ``num_key_value_heads`` of the model.
        layers: ``"stacked"`` for one tensor of all layers, as Megatron saves layers that are alike;
            ``"apart"`` for one tensor a layer.
        vocab_size: Rows of the embedding, which Megatron pads; by default those of the template,
            or as many as there are if there is no template.

    Example:
        >>> from dist_checkpointing.planning.llama_recipes import llama_to_megatron
        >>> len(llama_to_megatron(8).rules)
        15
    """
    rules: list[Rule] = [
        # Megatron asks for a state of each linear layer, which only Transformer Engine has.
        Missing("{module*}._extra_state", fill="template"),
        Drop(f"{_HF}.self_attn.rotary_emb.inv_freq"),
        *(Rename(theirs, to=ours) for theirs, ours in _NAMES.items()),
        Concat(_QKV, into=_MEGATRON_QKV, groups=num_query_groups),
        Concat(_GATE_UP, into=_MEGATRON_FC1),
    ]
    if layers == "stacked":
        rules.append(Stack("decoder.layers.{i}.{rest*}", into="decoder.layers.{rest}"))
    return Recipe(*rules, Resize(_VOCABULARY, size=vocab_size))


def megatron_to_llama(
    num_attention_heads: int,
    num_query_groups: int,
    *,
    layers: Layers = "stacked",
    vocab_size: int | None = None,
) -> Recipe:
    """From a GPT model of Megatron-Core to a Llama-style model of Hugging Face.

    Only the weights of the model are taken, without the optimizer.

    Args:
        num_attention_heads: ``num_attention_heads`` of the model.
        num_query_groups: ``num_key_value_heads`` of the model.
        layers: How the layers are stored, see ``llama_to_megatron``.
        vocab_size: Rows of the embedding; by default those of the template, or as many as there
            are if there is no template.

    Example:
        >>> from dist_checkpointing.planning.llama_recipes import megatron_to_llama
        >>> len(megatron_to_llama(32, 8).rules)
        14
    """
    rules: list[Rule] = [Keep([_VOCABULARY, r"decoder\.(layers|final_layernorm)\..*(weight|bias)"])]
    if layers == "stacked":
        rules.append(Unstack("decoder.layers.{rest*}", into="decoder.layers.{i}.{rest}"))
    heads = (num_attention_heads // num_query_groups, 1, 1)
    return Recipe(
        *rules,
        # Before the split, whose pattern matches the weight of the norm too.
        *(Rename(ours, to=theirs) for theirs, ours in _NAMES.items()),
        Split(_MEGATRON_QKV, into=_QKV, sizes=heads, groups=num_query_groups),
        Split(_MEGATRON_FC1, into=_GATE_UP),
        Resize(_HF_VOCABULARY, size=vocab_size),
    )


READY_MADE: Final[Mapping[str, Callable[..., Recipe]]] = {
    "llama_to_megatron": llama_to_megatron,
    "megatron_to_llama": megatron_to_llama,
}
"""The ready-made recipes by the names that they have in files."""
