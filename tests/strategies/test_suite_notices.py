"""The conformance suite fails for backends that do not conform: each of these breaks one rule."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format import Index
from dist_checkpointing.planning import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from dist_checkpointing.storage import WriteResult, WriteResults, done
from dist_checkpointing.strategies import (
    Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrV3Reader,
    ZarrV3Writer,
)
from dist_checkpointing.testing import StrategyConformance

Test = Callable[[StrategyConformance, Path], object]


class Sound(StrategyConformance):
    """The base of all broken ones, which passes."""

    backend = ("zarr", 2)
    writer: type[ZarrV3Writer] = ZarrV3Writer
    reader: type[ZarrV3Reader] = ZarrV3Reader

    def save_strategy(self) -> Zarr3SaveShardedStrategy:
        strategy = Zarr3SaveShardedStrategy()
        strategy.make_writer = self.writer  # type: ignore[method-assign]
        return strategy

    def load_strategy(self) -> Zarr3LoadShardedStrategy:
        strategy = Zarr3LoadShardedStrategy()
        strategy.make_reader = self.reader  # type: ignore[method-assign]
        return strategy


class ForgetsAnItem(Sound):
    class writer(ZarrV3Writer):  # noqa: N801 - the attribute it overrides
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
            return super().write_data(plan.with_items(plan.items[:-1]), planner)


class SwapsTwoItems(Sound):
    class writer(ZarrV3Writer):  # noqa: N801
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
            results = super().write_data(plan, planner).result()
            return done([*results][::-1])


class CommitsByItself(Sound):
    class writer(ZarrV3Writer):  # noqa: N801
        def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
            (self.checkpoint_dir / "metadata.json").write_text("{}")
            super().finish(metadata, results)


class LeavesAFile(Sound):
    class writer(ZarrV3Writer):  # noqa: N801
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
            (self.checkpoint_dir / "notes.txt").write_text("hello")
            return super().write_data(plan, planner)


class StoresWhereItIs(Sound):
    class writer(ZarrV3Writer):  # noqa: N801
        def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
            super().finish(metadata, results)
            (self.checkpoint_dir / ".dckpt" / "home").write_text(str(self.checkpoint_dir))


class ReadsNothing(Sound):
    class reader(ZarrV3Reader):  # noqa: N801
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            del plan, planner
            return done(None)


class ReadsZerosForLostData(Sound):
    class reader(ZarrV3Reader):  # noqa: N801
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            try:
                super().read_data(plan, planner).result()
            except CheckpointingException:
                for item in plan.items:
                    planner.apply_tensor(item, torch.zeros(item.lengths))
            return done(None)


class ReadsTheIndexOnEveryRank(Sound):
    class reader(ZarrV3Reader):  # noqa: N801
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            self.read_metadata()
            return super().read_data(plan, planner)


class TakesAnyVersion(Sound):
    def load_strategy(self) -> Zarr3LoadShardedStrategy:
        strategy = super().load_strategy()
        strategy.reads = frozenset({("zarr", 2), ("zarr", 10**6)})  # type: ignore[misc]
        return strategy


class ListsTooLittle(Sound):
    class reader(ZarrV3Reader):  # noqa: N801
        def read_metadata(self) -> Index:
            index = super().read_metadata()
            return index.without(list(index)[:1])


class StoresFloat64AsFloat32(Sound):
    class writer(ZarrV3Writer):  # noqa: N801
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            def data_of(plan: SavePlan) -> Any:
                exact: Any = type(planner).data_of(planner, plan)
                return lambda row: (
                    exact(row).float().double() if exact(row).dtype == torch.float64 else exact(row)
                )

            with mock.patch.object(planner, "data_of", data_of):
                return super().write_data(plan, planner)


BROKEN: list[tuple[type[Sound], Test]] = [
    (ForgetsAnItem, lambda s, p: s.test_every_dtype_bit_for_bit(p, 2)),
    (SwapsTwoItems, lambda s, p: s.test_a_result_for_every_item(p, 2)),
    (CommitsByItself, lambda s, p: s.test_order_of_writer_calls(p, 1)),
    (LeavesAFile, lambda s, p: s.test_created_names_cover_every_file(p)),
    (StoresWhereItIs, lambda s, p: s.test_moved_folder(p)),
    (ReadsNothing, lambda s, p: s.test_views_as_sources_and_destinations(p, 1, "strided")),
    (ReadsNothing, lambda s, p: s.test_direct_calls(p)),
    (
        ReadsZerosForLostData,
        lambda s, p: s.test_missing_data_is_an_error(p, 1, "by_rows", "damage"),
    ),
    (ReadsTheIndexOnEveryRank, lambda s, p: s.test_order_of_reader_calls(p, 2)),
    (TakesAnyVersion, lambda s, p: s.test_unknown_backend_or_version(p)),
    (ListsTooLittle, lambda s, p: s.test_metadata_lists_what_was_saved(p, 1)),
    (StoresFloat64AsFloat32, lambda s, p: s.test_every_dtype_bit_for_bit(p, 2)),
]


@pytest.mark.parametrize(("suite", "test"), BROKEN)
def test_a_broken_backend_fails(tmp_path: Path, suite: type[Sound], test: Test) -> None:
    test(Sound(), tmp_path / "sound")
    (tmp_path / "broken").mkdir()
    with pytest.raises((AssertionError, Exception, pytest.fail.Exception)):
        test(suite(), tmp_path / "broken")
