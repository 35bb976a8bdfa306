"""megatron-core, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench_contestants import Calls, Contestant
from bench_state import LocalTensor, Work


class Megatron(Contestant):
    """Its default strategy, which writes with two processes a rank and always fsyncs.

    It knows no ranks but all of them, and cannot take part where ranks reshard.
    """

    name = "megatron-core"
    family = "megatron"
    max_calls = 1

    def __init__(self) -> None:
        self.detail = f"{version('megatron-core')}, always durable"

    def open(self, work: Work) -> Calls:
        allow_cpu_only()
        megatron = import_module("megatron.core.dist_checkpointing")
        source = _state(megatron, work.saved)
        target = _state(megatron, work.target)
        memory = {tensor.key: tensor.data for tensor in work.target}

        def load(folder: Path) -> None:
            loaded = megatron.load(target, str(folder))
            for key, data in memory.items():
                if loaded[key].data_ptr() != data.data_ptr():
                    data.copy_(loaded[key])

        return Calls(lambda folder: megatron.save(source, str(folder)), load)


def megatron_contestants() -> list[Contestant]:
    return [Megatron()] if megatron_is_installed() else []


def megatron_is_installed() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def allow_cpu_only() -> None:
    """It calls these two whatever device the tensors are on."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def _state(megatron: Any, tensors: Sequence[LocalTensor]) -> dict[str, Any]:
    return {
        tensor.key: megatron.ShardedTensor.from_rank_offsets(
            tensor.key,
            tensor.data,
            *([] if tensor.axis is None else [(tensor.axis, tensor.position, tensor.count)]),
        )
        for tensor in tensors
    }
