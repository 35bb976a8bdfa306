"""Ready-made recipes between names of Hugging Face and those of GPT in Megatron-Core.

Llama, Mistral, Qwen2 and Qwen3 are named alike, and Mixtral but for its experts. The values are the
same; query, key and value, and gate and up, are one tensor each in Megatron. Both turn halves of a
head in rotary embeddings, so that no rows change places within a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from dist_checkpointing.planning.recipe import Recipe, ready_made
from dist_checkpointing.planning.recipe_rules import (
    Concat,
    Drop,
    Keep,
    Missing,
    Rename,
    Resize,
    Rule,
    Split,
    Stack,
    Unstack,
)

Layers = Literal["stacked", "apart"]
TransformerImpl = Literal["transformer_engine", "local"]

_HF = "model.layers.{i}"
_MEGATRON = "decoder.layers.{i}"
_NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    f"{_HF}.input_layernorm.weight": f"{_MEGATRON}.self_attention.linear_qkv.layer_norm_weight",
    f"{_HF}.self_attn.o_proj.{{x}}": f"{_MEGATRON}.self_attention.linear_proj.{{x}}",
    f"{_HF}.self_attn.q_norm.weight": f"{_MEGATRON}.self_attention.q_layernorm.weight",
    f"{_HF}.self_attn.k_norm.weight": f"{_MEGATRON}.self_attention.k_layernorm.weight",
}
_HF_NORM = f"{_HF}.post_attention_layernorm.weight"
_FUSED_NORM = f"{_MEGATRON}.mlp.linear_fc1.layer_norm_weight"
_NORMS = {"transformer_engine": f"{_MEGATRON}.pre_mlp_layernorm.weight", "local": _FUSED_NORM}
_LLAMA = {
    **_NAMES,
    _HF_NORM: _FUSED_NORM,
    f"{_HF}.mlp.down_proj.{{x}}": f"{_MEGATRON}.mlp.linear_fc2.{{x}}",
}
_QKV = [f"{_HF}.self_attn.{name}_proj.{{x}}" for name in "qkv"]
_MEGATRON_QKV = f"{_MEGATRON}.self_attention.linear_qkv.{{x}}"
_GATE_UP = [f"{_HF}.mlp.{name}_proj.{{x}}" for name in ("gate", "up")]
_MEGATRON_FC1 = f"{_MEGATRON}.mlp.linear_fc1.{{x}}"
# Megatron puts the experts of a layer into one tensor, whichever way it computes them.
_EXPERT = f"{_MEGATRON}.mlp.experts.experts.{{expert}}"
_MIXTRAL = {
    **_NAMES,
    f"{_HF}.block_sparse_moe.gate.weight": f"{_MEGATRON}.mlp.router.weight",
    f"{_HF}.block_sparse_moe.experts.{{expert}}.w2.{{x}}": f"{_EXPERT}.linear_fc2.{{x}}",
}
_W1_W3 = [f"{_HF}.block_sparse_moe.experts.{{expert}}.{name}.{{x}}" for name in ("w1", "w3")]
_EXPERTS = "decoder.layers.{layer}.mlp.experts"
_VOCABULARY = r"embedding\.word_embeddings\.weight|output_layer\.weight"
_HF_VOCABULARY = r"model\.embed_tokens\.weight|lm_head\.weight"


@ready_made
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

    Raises:
        ValueError: for a number that is not positive, or ``layers`` that do not exist.

    Example:
        >>> from dist_checkpointing.planning.model_recipes import llama_to_megatron
        >>> len(llama_to_megatron(8).rules)
        15
    """
    mlp = [Concat(_GATE_UP, into=_MEGATRON_FC1)]
    return _to_megatron(_LLAMA, mlp, num_query_groups, layers, vocab_size)


@ready_made
def mixtral_to_megatron(
    num_query_groups: int,
    *,
    layers: Layers = "stacked",
    vocab_size: int | None = None,
    transformer_impl: TransformerImpl = "transformer_engine",
) -> Recipe:
    """From a Mixtral-style model of Hugging Face to a GPT model with experts of Megatron-Core.

    As ``llama_to_megatron``, and ``transformer_impl`` is that of Megatron: the norm before the
    experts has another name in each.

    Example:
        >>> from dist_checkpointing.planning.model_recipes import mixtral_to_megatron
        >>> len(mixtral_to_megatron(8).rules)
        17
    """
    _require_one_of("transformer_impl", transformer_impl, TransformerImpl)
    mlp = [
        Concat(_W1_W3, into=f"{_EXPERT}.linear_fc1.{{x}}"),
        Stack(f"{_EXPERTS}.experts.{{i}}.{{x*}}", into=f"{_EXPERTS}.experts.{{x}}"),
    ]
    names = {**_MIXTRAL, _HF_NORM: _NORMS[transformer_impl]}
    return _to_megatron(names, mlp, num_query_groups, layers, vocab_size)


@ready_made
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

    Raises:
        ValueError: for numbers that are not positive or do not divide each other, or ``layers``
            that do not exist.

    Example:
        >>> from dist_checkpointing.planning.model_recipes import megatron_to_llama
        >>> len(megatron_to_llama(32, 8).rules)
        14
    """
    heads = (num_attention_heads, num_query_groups)
    gate_up = Split(_MEGATRON_FC1, into=_GATE_UP)
    return _from_megatron(_LLAMA, [], gate_up, heads, layers, vocab_size)


@ready_made
def megatron_to_mixtral(
    num_attention_heads: int,
    num_query_groups: int,
    *,
    layers: Layers = "stacked",
    vocab_size: int | None = None,
) -> Recipe:
    """From a GPT model with experts of Megatron-Core to a Mixtral-style model of Hugging Face.

    Takes the experts of a checkpoint, and those of a ``state_dict()`` that ``torch.save`` wrote:
    ``experts.linear_fc1.weight0`` or ``experts.local_experts.0.linear_fc1.weight``. The arguments
    are those of ``megatron_to_llama``.

    Example:
        >>> from dist_checkpointing.planning.model_recipes import megatron_to_mixtral
        >>> len(megatron_to_mixtral(32, 8).rules)
        20
    """
    experts = [
        Rename(f"{_EXPERTS}.local_experts.{{x*}}", to=f"{_EXPERTS}.experts.{{x}}"),
        Rename(
            r"decoder\.layers\.{layer}\.mlp\.experts\.linear_{fc}\.(?P<kind>weight|bias)(?P<e>\d+)",
            to=f"{_EXPERTS}.experts.{{e}}.linear_{{fc}}.{{kind}}",
        ),
        Unstack(f"{_EXPERTS}.experts.linear_{{x*}}", into=f"{_EXPERTS}.experts.{{i}}.linear_{{x}}"),
        Rename(_NORMS["transformer_engine"], to=_HF_NORM),
        Rename(f"{_MEGATRON}.input_layernorm.weight", to=f"{_HF}.input_layernorm.weight"),
    ]
    heads = (num_attention_heads, num_query_groups)
    w1_w3 = Split(f"{_EXPERT}.linear_fc1.{{x}}", into=_W1_W3)
    names = {**_MIXTRAL, _HF_NORM: _FUSED_NORM}
    return _from_megatron(names, experts, w1_w3, heads, layers, vocab_size)


def _to_megatron(
    names: Mapping[str, str],
    mlp: Sequence[Rule],
    num_query_groups: int,
    layers: Layers,
    vocab_size: int | None,
) -> Recipe:
    _require(layers, num_query_groups=num_query_groups)
    rules: list[Rule] = [
        # Megatron asks for a state of each linear layer, which only Transformer Engine has.
        Missing("{module*}._extra_state", fill="template"),
        Drop(f"{_HF}.self_attn.rotary_emb.inv_freq"),
        *(Rename(theirs, to=ours) for theirs, ours in names.items()),
        Concat(_QKV, into=_MEGATRON_QKV, groups=num_query_groups),
        *mlp,
    ]
    if layers == "stacked":
        rules.append(Stack("decoder.layers.{i}.{rest*}", into="decoder.layers.{rest}"))
    return Recipe(*rules, Resize(_VOCABULARY, size=vocab_size))


def _from_megatron(
    names: Mapping[str, str],
    experts: Sequence[Rule],
    gate_up: Rule,
    heads: tuple[int, int],
    layers: Layers,
    vocab_size: int | None,
) -> Recipe:
    num_heads, num_groups = heads
    _require(layers, num_attention_heads=num_heads, num_query_groups=num_groups)
    if num_heads % num_groups:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_query_groups, not {num_heads} of "
            f"{num_groups}"
        )
    rules: list[Rule] = [
        Keep([_VOCABULARY, r"decoder\.(layers|final_layernorm)\..*(weight|bias)\d*"])
    ]
    if layers == "stacked":
        rules.append(Unstack("decoder.layers.{rest*}", into="decoder.layers.{i}.{rest}"))
    sizes = (num_heads // num_groups, 1, 1)
    return Recipe(
        *rules,
        *experts,
        # Before the split, whose pattern matches the weight of the norm too.
        *(Rename(ours, to=theirs) for theirs, ours in names.items()),
        Split(_MEGATRON_QKV, into=_QKV, sizes=sizes, groups=num_groups),
        gate_up,
        Resize(_HF_VOCABULARY, size=vocab_size),
    )


def _require(layers: object, **numbers: object) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive number, not {value!r}")
    _require_one_of("layers", layers, Layers)


def _require_one_of(name: str, value: object, choices: object) -> None:
    names = get_args(choices)
    if value not in names:
        raise ValueError(f"{name} must be {' or '.join(map(repr, names))}, not {value!r}")
