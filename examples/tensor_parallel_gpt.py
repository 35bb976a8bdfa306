"""A small GPT with tensor parallelism: rotary attention, gated MLP, tied embedding and head.

What makes it ready for any number of ranks is ``GPT.shard``: it says for one weight, or for
anything of a weight's shape such as an optimizer's moments, which part of which global tensor this
rank holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dist_checkpointing import ShardedTensor
from dist_checkpointing.mapping import ReplicaId, ShardedBase, ShardedTensorFactory
from tensor_parallel import (
    ColumnParallelLinear,
    Cut,
    CutWeight,
    Ranks,
    RmsNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

GATE_UP = ("gate", "up")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model; ranks share the heads, the vocabulary and the width of the MLP."""

    vocab_size: int = 256
    width: int = 128
    num_layers: int = 3
    num_heads: int = 8
    mlp_width: int = 384
    context_length: int = 128
    seed: int = 1234


class Attention(nn.Module):
    """Causal self-attention; each rank has some of the heads.

    The rows of ``qkv`` are grouped by head, so that a plain cut along axis 0 gives whole heads.
    """

    def __init__(self, config: GPTConfig, ranks: Ranks) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.qkv = ColumnParallelLinear(config.width, 3 * config.width, ranks)
        self.out = RowParallelLinear(config.width, config.width, ranks)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.head_width).transpose(1, 2)
        query, key = _rotate(heads[..., 0, :], angles), _rotate(heads[..., 1, :], angles)
        mixed = functional.scaled_dot_product_attention(
            query, key, heads[..., 2, :], is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, eq. 34): pairs of features turned."""
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _angles(length: int, head_width: int) -> Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    return torch.outer(torch.arange(length), frequencies)


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up computed by one fused weight."""

    def __init__(self, config: GPTConfig, ranks: Ranks) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(
            config.width, 2 * config.mlp_width, ranks, fused=GATE_UP
        )
        self.down = RowParallelLinear(config.mlp_width, config.width, ranks)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, config: GPTConfig, ranks: Ranks) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.width, ranks)
        self.attention = Attention(config, ranks)
        self.mlp_norm = RmsNorm(config.width, ranks)
        self.mlp = GatedMlp(config, ranks)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """The model, or this rank's part of it."""

    def __init__(self, config: GPTConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, ranks)
        self.layers = nn.ModuleList([Block(config, ranks) for _ in range(config.num_layers)])
        self.final_norm = RmsNorm(config.width, ranks)
        self.cuts = {
            f"{name}.weight": module.cut
            for name, module in self.named_modules()
            if isinstance(module, CutWeight)
        }
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """The same model on any number of ranks: the whole weight is drawn, then cut."""
        for name, module in self.named_modules():
            if isinstance(module, RmsNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, CutWeight):
                random = torch.Generator().manual_seed(self.config.seed ^ zlib.crc32(name.encode()))
                full = 0.02 * torch.randn(module.full_shape, generator=random)
                module.weight.copy_(module.cut.part(full, self.ranks))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats of ``targets`` after ``tokens``, both ``[batch, length]``."""
        x = self.embedding(tokens)
        angles = _angles(tokens.shape[1], self.config.width // self.config.num_heads)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.embedding.logits(self.final_norm(x))
        return vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten(), self.ranks)

    def sharded_state_dict(self) -> dict[str, ShardedBase]:
        """Like ``state_dict()``, each weight wrapped with its place in the global tensor."""
        return self.shard_all(dict(self.named_parameters()))

    def shard_all(self, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, ShardedBase]:
        """Wrap tensors that are shaped like the weights they are named after."""
        return {name: self.shard(name, tensor, prefix) for name, tensor in tensors.items()}

    def shard(self, name: str, tensor: Tensor, prefix: str = "") -> ShardedBase:
        """Wrap this rank's ``tensor``, shaped like the weight ``name``.

        The layers of the model become one global tensor with an axis for the layer in front.
        """
        cut, data = self.cuts[name], tensor.detach()
        key, layer = prefix + name, None
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            key, layer = f"{prefix}layers.{rest}", int(number)
        if not cut.fused:
            return self._shard_plain(key, data, cut, layer)

        def build(
            key: str,
            data: Tensor,
            _replica_id: ReplicaId,
            _flattened_range: slice | None,
        ) -> dict[str, ShardedTensor]:
            parts = zip(cut.fused, data.chunk(len(cut.fused)), strict=True)
            return {
                part: self._shard_plain(key.replace("_".join(cut.fused), part), rows, cut, layer)
                for part, rows in parts
            }

        def merge(parts: dict[str, Tensor]) -> Tensor:
            return torch.cat([parts[part] for part in cut.fused])

        return ShardedTensorFactory(key, data, build, merge)

    def _shard_plain(self, key: str, data: Tensor, cut: Cut, layer: int | None) -> ShardedTensor:
        ranks, axes_in_front = self.ranks, 0 if layer is None else 1
        offsets = [] if layer is None else [(0, layer, self.config.num_layers)]
        if cut.axis is not None:
            offsets.append((cut.axis + axes_in_front, ranks.rank, ranks.size))
        return ShardedTensor.from_rank_offsets(
            key,
            data,
            *offsets,
            replica_id=0 if cut.axis is not None else ranks.rank,
            prepend_axis_num=axes_in_front,
        )
