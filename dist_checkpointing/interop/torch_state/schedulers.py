"""Schedulers whose parameters are grouped in another way than when they were saved."""

from __future__ import annotations

from typing import Final

from torch.optim.lr_scheduler import LRScheduler

from dist_checkpointing.interop.torch_state.optimizer_state import OptimizerTemplate

_OF_GROUPS: Final = ("base_lrs", "min_lrs", "max_lrs")
"""What schedulers keep for each group, beside the last rates."""


def regroup(scheduler: LRScheduler, optimizer: OptimizerTemplate) -> None:
    """Give each group what the scheduler has loaded for the saved groups of its parameters."""
    groups = scheduler.optimizer.param_groups
    sources = [optimizer.saved_groups(group) for group in groups]
    num_saved = len(getattr(scheduler, "_last_lr", groups))
    # With several optimizers the groups of this one are a run of all.
    known = [number for numbers in sources for number in numbers]
    first = min(known) if known and num_saved < optimizer.num_groups else 0
    if sources != [[first + number] for number in range(num_saved)]:
        for name in _OF_GROUPS:
            saved = getattr(scheduler, name, None)
            if not isinstance(saved, list) or len(saved) != num_saved:
                continue
            values = []
            for group, numbers in zip(groups, sources, strict=True):
                own = [saved[number - first] for number in numbers if number - first < num_saved]
                if not own or any(value != own[0] for value in own):
                    own = [group.get("initial_lr", group["lr"]) if name == "base_lrs" else saved[0]]
                values.append(own[0])
            setattr(scheduler, name, values)
        scheduler._last_lr = [group["lr"] for group in groups]  # noqa: SLF001 - there is no setter
    for part in getattr(scheduler, "_schedulers", ()):
        regroup(part, optimizer)
