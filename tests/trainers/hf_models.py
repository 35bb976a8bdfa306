"""Tiny models of transformers, made from their configuration."""

from typing import Any, Final

import torch
import transformers  # type: ignore[import-not-found,unused-ignore]

from dist_checkpointing import Recipe
from dist_checkpointing.planning import Concat, Rename, Stack

SMALL: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: Final[dict[str, Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4),
}
EXPERT: Final = "{a*}.block_sparse_moe.experts.{i}"
RECIPES: Final = {
    "mixtral": Recipe(
        Concat([f"{EXPERT}.w1.weight", f"{EXPERT}.w3.weight"], into="{a}.gate_up.{i}"),
        Stack("{a*}.gate_up.{i}", into="{a}.mlp.experts.gate_up_proj"),
        Stack(f"{EXPERT}.w2.weight", into="{a}.mlp.experts.down_proj"),
        Rename("{a*}.block_sparse_moe.gate.weight", to="{a}.mlp.gate.weight"),
    )
}
"""What a model wants whose modules are not those of its files."""


def make(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]())
