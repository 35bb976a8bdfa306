"""Tensor parallelism: how a weight is cut over ranks, and the layers that work on the parts.

A column-parallel layer holds some of the outputs, a row-parallel one some of the inputs; between
the two every rank works alone. ``Cut`` says which it is, once for each weight: the initial values,
the wrapping for the checkpoint and the hand-made check in ``oracle.py`` all follow from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share one model. A single one needs no process group."""

    rank: int = 0
    size: int = 1

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_in_place(self, tensor: Tensor) -> Tensor:
        """The largest ``tensor`` of the ranks, element by element."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started; in a plain process just this one, with no process group."""
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is cut over the ranks.

    Attributes:
        axis: the axis that is cut into equal parts; None if every rank holds it all.
        fused: names of the weights that each rank keeps stacked along axis 0 as one. Each of them
            is cut by itself: rank 0 of 2 holds the first half of every one, not the first half of
            the stack.
    """

    axis: int | None
    fused: tuple[str, ...] = ()

    def part(self, full: Tensor, ranks: Ranks) -> Tensor:
        """What this rank holds of the full weight (the weights in ``fused`` stacked)."""
        if self.axis is None:
            return full
        weights = full.chunk(max(len(self.fused), 1))
        return torch.cat([weight.chunk(ranks.size, self.axis)[ranks.rank] for weight in weights])


class _CopyToRanks(torch.autograd.Function):
    """The way into a column-parallel layer: the gradients of its parts add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.ranks.sum_in_place(grads[0].contiguous().clone()), None


class _SumOverRanks(torch.autograd.Function):
    """The way out of a row-parallel layer: its parts add up, each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:  # noqa: ARG004 - torch passes it
        return ranks.sum_in_place(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # noqa: ARG004 - torch passes it
        return grads[0], None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean of ``-log softmax(logits)[target]`` where each rank has the logits of some tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
        num_rows, num_own = logits.shape
        logits = logits - ranks.max_in_place(logits.amax(-1))[:, None]
        exp = logits.exp()
        total = ranks.sum_in_place(exp.sum(-1))
        column = targets - ranks.rank * num_own
        own = (column >= 0) & (column < num_own)
        column = column.clamp(0, num_own - 1)
        rows = torch.arange(num_rows)
        target_logits = ranks.sum_in_place(logits[rows, column] * own)
        ctx.save_for_backward(exp / total[:, None], rows, column, own)
        return (total.log() - target_logits).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        softmax, rows, column, own = ctx.saved_tensors
        grad = softmax.clone()
        grad[rows, column] -= own.to(grad.dtype)
        return grad * (grads[0] / len(rows)), None, None


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """``x``, used by every rank for its part of the next layer."""
    shared: Tensor = _CopyToRanks.apply(x, ranks)  # type: ignore[no-untyped-call]
    return shared


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' partial results."""
    summed: Tensor = _SumOverRanks.apply(x, ranks)  # type: ignore[no-untyped-call]
    return summed


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
    """Mean cross entropy in nats.

    Args:
        logits: ``[rows, vocabulary / ranks]``, this rank's columns.
        targets: ``[rows]``, indices into the whole vocabulary, the same on every rank.
        ranks: who holds the other columns.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, ranks
    )
    return loss


class CutWeight(nn.Module):
    """A module with one weight and the way it is cut."""

    def __init__(self, shape: tuple[int, int] | tuple[int], cut: Cut, ranks: Ranks) -> None:
        super().__init__()
        own = [
            extent // ranks.size if axis == cut.axis else extent
            for axis, extent in enumerate(shape)
        ]
        self.weight = nn.Parameter(torch.empty(own))
        self.full_shape = shape
        self.cut = cut
        self.ranks = ranks


class ColumnParallelLinear(CutWeight):
    """Each rank computes some of the outputs, from all the inputs."""

    def __init__(
        self, num_in: int, num_out: int, ranks: Ranks, *, fused: tuple[str, ...] = ()
    ) -> None:
        super().__init__((num_out, num_in), Cut(0, fused), ranks)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(copy_to_ranks(x, self.ranks), self.weight)


class RowParallelLinear(CutWeight):
    """Each rank uses some of the inputs; the partial outputs are summed."""

    def __init__(self, num_in: int, num_out: int, ranks: Ranks) -> None:
        super().__init__((num_out, num_in), Cut(1), ranks)

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_ranks(functional.linear(x, self.weight), self.ranks)


class VocabParallelEmbedding(CutWeight):
    """Each rank holds the vectors of some tokens; used a second time as the output head."""

    def __init__(self, vocab_size: int, width: int, ranks: Ranks) -> None:
        super().__init__((vocab_size, width), Cut(0), ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        num_own = len(self.weight)
        row = tokens - self.ranks.rank * num_own
        own = (row >= 0) & (row < num_own)
        vectors = functional.embedding(row.clamp(0, num_own - 1), self.weight)
        return sum_over_ranks(vectors * own[..., None], self.ranks)

    def logits(self, x: Tensor) -> Tensor:
        """Scores of this rank's tokens."""
        return functional.linear(copy_to_ranks(x, self.ranks), self.weight)


class RmsNorm(CutWeight):
    """Every rank holds and computes all of it."""

    def __init__(self, width: int, ranks: Ranks) -> None:
        super().__init__((width,), Cut(None), ranks)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)
