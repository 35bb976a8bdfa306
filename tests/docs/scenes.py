"""What the listings of a page take for granted: the names that they use and do not define.

A listing shows the call that matters. A function here sets the scene for one page: it is called
before each listing with its number, in a new folder which is the working directory, and one process
is all ranks.
"""

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import tensorstore
import torch
from torch.distributed import checkpoint as dcp

import dist_checkpointing
from dist_checkpointing import CheckpointManager, ShardedTensor, interop
from dist_checkpointing.storage import StorageReader, StorageWriter
from dist_checkpointing.strategies import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.tools.convert import convert
from make_deepspeed import Net
from samples import GOLDEN
from tiny_llama import hf_weights

Names = dict[str, Any]
Scene = Callable[[int, Names], None]


def _public() -> Names:
    return {name: getattr(dist_checkpointing, name) for name in dist_checkpointing.__all__}


def _interop() -> Names:
    # Alternatives in one listing save to one place.
    overwriting = {
        "save": partial(dist_checkpointing.save, overwrite=True),
        "DCPWriter": partial(interop.DCPWriter, overwrite=True),
    }
    storages = {name: getattr(dcp, name) for name in ("FileSystemReader", "FileSystemWriter")}
    return {name: getattr(interop, name) for name in interop.__all__} | storages | overwriting


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def _weight() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("decoder.w", torch.arange(96.0).reshape(8, 12))


def readme(number: int, names: Names) -> None:
    if number == 0:
        model = _model()
        names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def looking(number: int, names: Names) -> None:
    del names
    if number == 0:
        dist_checkpointing.save({"w": _weight(), "step": 1000}, "ckpt/1000")


def asynchronous(number: int, names: Names) -> None:
    model = _model()
    state = {"w": _weight(), "step": 0}
    names |= _public() | {"root": "run", "steps": 600, "signal": signal, "state": lambda: state}
    names |= {"train_step": lambda: None, "model": model, "batch": torch.ones(2, 4)}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    if number == 1:
        names |= {"manager": CheckpointManager("second"), "step": 10}
    if number == 2:
        names["manager"].close()
        names["manager"] = CheckpointManager("went_back")
        for step in (1000, 1500, 2000):
            names["manager"].save(step, state)


def incremental(number: int, names: Names) -> None:
    del number
    names |= _public() | {"root": "run", "train_step": lambda: None, "shutil": shutil}
    names |= {"state": {"w": _weight()}, "shard": ShardedTensor.from_rank_offsets, "torch": torch}


def converting(number: int, names: Names) -> None:
    del number, names
    weight = ShardedTensor.from_rank_offsets("model.w", torch.ones(4, 2))
    dist_checkpointing.save({"w": weight, "step": 1000}, "ckpt/1000")


def recipes(number: int, names: Names) -> None:
    whole = ShardedTensor.from_rank_offsets
    if number == 0:
        stored = {f"transformer.h.0.{name}.weight": torch.ones(2, 2) for name in "qkv"}
        stored["wte.weight"] = torch.ones(3, 2)
        dist_checkpointing.save({k: whole(k, own) for k, own in stored.items()}, "ckpt/1000")
        wanted = {"layers.0.qkv.weight": 6, "wte.weight": 4, "reward_head.weight": 1}
        names["template"] = {k: whole(k, torch.zeros(rows, 2)) for k, rows in wanted.items()}
    else:
        hf = hf_weights()
        dist_checkpointing.save({key: whole(key, own) for key, own in hf.items()}, "hf/0")
        vocabulary = torch.empty(24, 16)
        names["model_template"] = {"wte": whole("embedding.word_embeddings.weight", vocabulary)}


@dataclass
class Config:
    """A class of the user's."""

    depth: int = 12


class Mode(Enum):
    """Another one."""

    WARM = 1


def concepts(number: int, names: Names) -> None:
    names |= {"Config": Config, "Mode": Mode, "config": Config(5), "mode": Mode.WARM}
    names |= {"tp_rank": 0, "tp_size": 1, "layer": 1, "num_layers": 2, "first_row": 50_000}
    names |= {"part": torch.ones(4, 768), "a": 700, "b": 800, "flat": torch.ones(100)}
    if number == 0:
        names |= {"w": _weight().data, "new_w": torch.empty(8, 12), "vocabulary": ["a", "b"]}
        names["dp_rank"] = 0


def planning(number: int, names: Names) -> None:
    del number
    names |= {"PlannedSaveStrategy": PlannedSaveStrategy, "BinsWriter": StorageWriter}
    names |= {"PlannedLoadStrategy": PlannedLoadStrategy, "BinsReader": StorageReader}


def formats(number: int, names: Names) -> None:
    weight = torch.arange(96.0).reshape(8, 12)
    if number == 0:
        names |= _public() | {"state": {"w": _weight()}, "template": {"w": _weight()}}

    def opened(spec: Any) -> None:
        base = spec["kvstore"]["base"].replace("file:///", f"file://{Path.cwd()}/")
        array = tensorstore.open(spec | {"kvstore": spec["kvstore"] | {"base": base}}).result()
        assert torch.equal(torch.from_numpy(array.read().result()), weight)

    names["ts"] = SimpleNamespace(open=opened)


def fully_parallel(number: int, names: Names) -> None:
    del number
    names |= _public() | {"state": {"w": _weight()}, "template": {"w": _weight()}}
    names |= {"path": "ckpt/1", "dp_group": None}
    names["TensorStoreSaveShardedStrategy"] = TensorStoreSaveShardedStrategy
    names["TensorStoreLoadShardedStrategy"] = TensorStoreLoadShardedStrategy


def torch_dcp(number: int, names: Names) -> None:
    model = _model()
    names |= _public() | _interop() | {"partial": partial, "path": "ckpt/1", "step": 7}
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for name in ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"):
        names[name] = getattr(dcp, name)
    names["old_path"] = "old"
    if number in (0, 1):
        names["state"] = {"model": model.state_dict(), "step": 7}
    if number == 3:
        names["state"] = names["template"] = {"w": _weight()}


def partial_loads(number: int, names: Names) -> None:
    names |= _public() | _interop() | {"torch": torch}
    if number == 0:
        model = _model()
        state = {"model": {"body": model.state_dict()}, "optim": {"step": torch.tensor(1)}}
        table = ShardedTensor.from_rank_offsets("table.weight", torch.ones(10, 4))
        wrapped = interop.shard_state_dict(state)
        dist_checkpointing.save({**wrapped, "table": table}, "ckpt/1000")
        names |= {"body": model, "model": torch.nn.ModuleDict({"body": model})}


def torch_state(number: int, names: Names) -> None:
    if number:
        return
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names |= {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    names["train_step"] = train_step


def elastic(number: int, names: Names) -> None:
    torch_state(number, names)
    names["dataset"] = torch.utils.data.TensorDataset(torch.ones(60, 4))
    if number == 0:
        train_step = names["train_step"]
        names["train_step"] = lambda _: train_step()
    names["FilePositions"] = interop.FilePositions


def trainers(number: int, names: Names) -> None:
    del number
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    names |= _public() | _interop() | {"model": model, "optimizer": optimizer}
    names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    # tests/trainers has the real one.
    names["accelerator"] = SimpleNamespace(prepare=lambda *given: given, scaler=None)


def hugging_face(number: int, names: Names) -> None:
    model: Any = _model().bfloat16()
    names |= {"torch": torch, "model": model}
    model.config = SimpleNamespace(to_json_string=lambda: "{}")
    key = "embedding.word_embeddings.weight"
    embedding = ShardedTensor.from_rank_offsets(key, torch.ones(128256, 1))
    model.sharded_state_dict = lambda: {"embedding": embedding}
    state = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in model.state_dict().items()}
    scales = {f"{key}_scale_inv": torch.ones([1] * own.ndim) for key, own in state.items()}
    folder = {3: "DeepSeek-V3", 4: "model-bf16"}.get(number, "pretrained")
    shutil.rmtree("out", ignore_errors=True)
    tensors = {**state, **scales} if number == 3 else model.state_dict()
    shards = interop.shard_state_dict(tensors)
    dist_checkpointing.save(shards, folder, "safetensors", overwrite=True)


def from_megatron(number: int, names: Names) -> None:
    del number
    names |= {"state": {"w": _weight()}, "path": "ckpt/1"}


def from_torch_save(number: int, names: Names) -> None:
    if number == 0:
        names |= {"torch": torch, "model": _model(), "step": 3}


def why(number: int, names: Names) -> None:
    del number
    names |= _public() | {"state": {"w": _weight()}, "template": {"w": _weight()}}


def nothing(number: int, names: Names) -> None:
    """The page defines all that it uses."""
    del number, names


def from_deepspeed(number: int, names: Names) -> None:
    del number
    convert(GOLDEN / "deepspeed0.19.8" / "zero3", "ckpt/1000")
    names |= {"torch": torch, "model": Net()}


SCENES: Final[dict[str, Scene]] = {
    "README.md": readme,
    "docs/async.md": asynchronous,
    "docs/backend.md": nothing,
    "docs/concepts.md": concepts,
    "docs/converting.md": converting,
    "docs/recipes.md": recipes,
    "docs/formats.md": formats,
    "docs/elastic.md": elastic,
    "docs/fully_parallel.md": fully_parallel,
    "docs/hugging_face.md": hugging_face,
    "docs/incremental.md": incremental,
    "docs/looking.md": looking,
    "docs/migrating/deepspeed.md": from_deepspeed,
    "docs/migrating/megatron.md": from_megatron,
    "docs/migrating/torch_save.md": from_torch_save,
    "docs/partial.md": partial_loads,
    "docs/object_stores.md": nothing,
    "docs/reference/planning.md": planning,
    "docs/torch_dcp.md": torch_dcp,
    "docs/torch_state.md": torch_state,
    "docs/trainers.md": trainers,
    "docs/why.md": why,
}
