"""One of two ranks that use the layer without Megatron: ``layer_rank.py PLACE REPORTS``."""

import json
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dist_checkpointing import ShardedObject, ShardedTensor
from dist_checkpointing.interop import megatron
from dist_checkpointing.mapping import is_main_replica
from dist_checkpointing.strategies import LoadShardedStrategy, SaveShardedStrategy

for name in ("megatron", "megatron.core"):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name])["__path__"] = []
megatron.install()


def theirs(name: str = "") -> Any:
    return import_module(f"megatron.core.dist_checkpointing{name}")


dict_utils, validation = theirs(".dict_utils"), theirs(".validation")
fully_parallel, formats = theirs(".strategies.fully_parallel"), theirs(".strategies.torch")


class Writer(SaveShardedStrategy):
    """Notes which shards it is to write."""

    def __init__(self) -> None:
        super().__init__("mock", 1)
        self.keys: set[str] = set()

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del checkpoint_dir
        leaves = dict_utils.nested_values(sharded_state_dict)
        self.keys = {leaf.key for leaf in leaves if is_main_replica(leaf.replica_id)}


class Reader(LoadShardedStrategy):
    """Notes which shards it is the main replica of."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        pass

    def check_version_compatibility(self, loaded_version: int) -> None:
        pass

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        raise NotImplementedError

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        del checkpoint_dir
        leaves = list(dict_utils.nested_values(sharded_state_dict))
        self.keys = {leaf.key for leaf in leaves if is_main_replica(leaf.replica_id)}
        return dict_utils.dict_list_map_outplace(lambda leaf: leaf.data, sharded_state_dict)


def shards(value: float = 0.0) -> dict[str, Any]:
    """Two replicated tensors, a cut one, and an object of each rank."""
    rank = dist.get_rank()
    replicated = {
        key: ShardedTensor.from_rank_offsets(key, torch.full((size,), value), replica_id=rank)
        for key, size in (("large", 100), ("small", 10))
    }
    cut = ShardedTensor.from_rank_offsets("cut", torch.full((4,), value + rank), (0, rank, 2))
    return {**replicated, "cut": cut, "rng": ShardedObject("rng", [rank, value], (2,), (rank,))}


def shared_work(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Each rank has the same view of who writes, and says what it wrote.
    writer, reader = Writer(), Reader()
    saving = fully_parallel.FullyParallelSaveStrategyWrapper(writer, None, True)
    tensors = {key: leaf for key, leaf in shards().items() if key != "rng"}
    saving.save(tensors, place)
    distribution = saving.cached_distribution
    found["writers"] = {
        k[0]: r for k, r in distribution.main_rank_for_shard.items() if k[0] != "cut"
    }
    found["written"] = sorted(writer.keys)
    found["replica_ids"] = {key: leaf.replica_id for key, leaf in tensors.items()}
    loading = fully_parallel.FullyParallelLoadStrategyWrapper(reader, None, True)
    loading.load({key: leaf for key, leaf in shards().items() if key != "rng"}, place)
    found["read"] = sorted(reader.keys)
    planned = {key: leaf for key, leaf in shards(1.0).items() if key != "rng"}
    own = formats.TorchDistSaveShardedStrategy()
    fully_parallel.FullyParallelSaveStrategyWrapper(own, None, True).save(planned, place / "direct")
    found["planned_ids"] = {key: leaf.replica_id for key, leaf in planned.items()}

    return found


def in_memory() -> dict[str, Any]:
    """A checkpoint in memory: each tensor on one rank alone, and on all again."""
    found: dict[str, Any] = {}
    aware = theirs(".tensor_aware_state_dict").MCoreTensorAwareStateDict
    saved, kept = aware.from_state_dict({**shards(5.0), "step": 7}, algo="fully_parallel")
    found["tensors"] = len(list(saved.tensors))
    for algorithm in ("broadcast", "gather_rounds"):
        again, missing, unexpected = saved.to_state_dict(
            shards(), algo="fully_parallel", exchange_algo=algorithm, strict="return_all",
            return_mismatch_keys=True,
        )  # fmt: skip
        assert (missing, unexpected, again["step"]) == (set(), set(), 7)
        expected = dict_utils.dict_list_map_outplace(lambda leaf: leaf.data, shards(5.0))
        assert dict_utils.diff({k: again[k] for k in expected}, expected) == ([], [], [])
    repeated, _ = aware.from_state_dict(shards(6.0), cached_metadata=kept)
    found["tensors_again"] = len(list(repeated.tensors))
    try:
        theirs(".exchange_utils").exchange_by_distribution({}, {}, kept, None, "other")
    except NotImplementedError:
        found["refused"] = True

    return found


def checked(place: Path) -> dict[str, Any]:
    """What differs between ranks is logged on each; what is wrong is raised on rank 0."""
    rank, found = dist.get_rank(), dict[str, Any]()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    validation.logger.addHandler(handler)
    state = {**shards(), "rank": rank, "same": [1]}
    theirs().save(state, str(place / "common"))
    found["logged"], messages[:] = list(messages), []

    def without_rank(common: dict[str, Any]) -> dict[str, Any]:
        del common["rank"]
        return common

    theirs().save(
        state, str(place / "common"), preprocess_common_before_consistancy_check=without_rank
    )
    found["logged_without"] = messages
    queue = theirs(".strategies.async_utils").AsyncCallsQueue()
    queue.schedule_async_request(
        theirs().save(shards(2.0), str(place / "async"), async_sharded_save=True)
    )
    found["finalized"] = queue.maybe_finalize_async_calls(blocking=True)
    found["async"] = theirs().load_plain_tensors(str(place / "async"))["cut"].tolist()
    try:
        own_leaf = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        _, of_ranks = validation.determine_global_metadata({"w": own_leaf})
        validation.validate_sharding_integrity(of_ranks)
    except ValueError as error:
        found["invalid"] = str(error)

    return found


def removed(place: Path) -> dict[str, Any]:
    """Tensors are removed by one rank alone."""
    found: dict[str, Any] = {}
    strategy = formats.TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="cut")
    theirs().save(shards(3.0), str(place / "removed"), strategy)
    if dist.get_rank() == 0:
        theirs().remove_sharded_tensors(str(place / "removed"), "cut")
    dist.barrier()
    found["left"] = sorted(theirs().load_tensors_metadata(str(place / "removed")))
    found["files"] = sorted(path.name for path in (place / "removed").glob("*.distcp"))
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    report = shared_work(folder) | in_memory() | checked(folder) | removed(folder)
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
