"""Everything a training run must find again: what is saved, and how it is put back."""

from __future__ import annotations

from dataclasses import asdict
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from dist_checkpointing import LocalNonpersistentObject, ShardedObject
from tensor_parallel import Ranks
from tensor_parallel_gpt import GPT, GPTConfig

BATCH_SIZE = 8
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
MOMENTS = ("exp_avg", "exp_avg_sq")


class Text:
    """The language reference that every Python has with it, as bytes: one byte is one token."""

    def __init__(self) -> None:
        pages = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.tokens = torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8)

    def batch(self, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, both ``[BATCH_SIZE, length]``."""
        starts = torch.randint(len(self.tokens) - length, (BATCH_SIZE, 1), generator=random)
        rows = self.tokens[starts + torch.arange(length + 1)].long()
        return rows[:, :-1], rows[:, 1:]


class TrainingState:
    """Model, optimizer, position in the data and number of steps done."""

    def __init__(self, config: GPTConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        self.config = config
        self.model = GPT(config, ranks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        # Every rank draws the same batches: tensor parallel ranks work on the same tokens.
        self.data_random = torch.Generator().manual_seed(config.seed)
        self.iteration = 0

    def moments(self, name: str) -> dict[str, Tensor]:
        """One of AdamW's two moments of every weight; zeros before the first step."""
        moments = {}
        for parameter_name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            moments[parameter_name] = state[name]
        return moments

    def sharded_state_dict(self) -> dict[str, Any]:
        """What to save, and equally where to load to."""
        return {
            "model": self.model.sharded_state_dict(),
            "optimizer": {
                moment: self.model.shard_all(self.moments(moment), f"optimizer.{moment}.")
                for moment in MOMENTS
            },
            # The same on every rank, so any number of ranks can load it; rank 0's is written.
            "data_random": ShardedObject(
                "data_random", self.data_random.get_state(), (1,), (0,), replica_id=self.ranks.rank
            ),
            # Plain values are common state.
            "iteration": self.iteration,
            "config": asdict(self.config),
            # True of this run only: a resumed run must not find that of the one before.
            "run": LocalNonpersistentObject({"tensor_parallel": self.ranks.size}),
        }

    @torch.no_grad()
    def restore(self, loaded: dict[str, Any]) -> None:
        """Put back what ``load`` returned for ``sharded_state_dict()``.

        ``load`` has filled the weights and moments in place. What a factory merged is a new tensor,
        and plain values are never changed in place: these are taken over here.
        """
        for name, weight in self.model.named_parameters():
            _take_over(weight, loaded["model"][name])
        for moment in MOMENTS:
            for name, tensor in self.moments(moment).items():
                _take_over(tensor, loaded["optimizer"][moment][name])
        self.data_random.set_state(loaded["data_random"])
        self.iteration = loaded["iteration"]
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(self.iteration))

    def train_step(self, text: Text) -> float:
        """One step of AdamW; the loss before it, in nats a byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.iteration + 1) / WARMUP_STEPS)
        tokens, targets = text.batch(self.config.context_length, self.data_random)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.iteration += 1
        return loss.item()


def _take_over(own: Tensor, loaded: Tensor) -> None:
    if loaded.data_ptr() != own.data_ptr():
        own.copy_(loaded)
