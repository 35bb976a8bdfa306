"""Fingerprints of what is written: summed as a writer asks for it, and joined on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dist_checkpointing.format.fingerprints import fingerprint_of
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning import SavePlan, SavePlanner, WriteItem
from dist_checkpointing.planning.part_sums import sums_of_tensor

_ROW = np.dtype([("row", "<i4"), ("sums", "<u8", (2,))])


class SummingPlanner(SavePlanner):
    """Answers like another planner, and sums what it gives.

    Args:
        planner: Answers for the data.
        plan: Plan whose rows are written.
    """

    def __init__(self, planner: SavePlanner, plan: SavePlan) -> None:
        self._planner, self._plan = planner, plan
        self._sums = np.zeros((len(plan.table), 2), dtype=np.uint64)
        self._is_summed = [False] * len(plan.table)
        table = plan.table
        columns = (table.ndim, table.global_shapes, table.offsets, table.shapes, table.flat)
        self._places = list(zip(*(column.tolist() for column in columns), strict=True))
        self._is_object = table.is_object

    def packed(self) -> bytes:
        """The sums of each tensor, and its row in the index."""
        index, table = self._plan.index, self._plan.table
        assert index is not None
        rows = index.rows_of(table.names)[table.keys]
        known = np.flatnonzero(rows >= 0)
        tensors, places = np.unique(rows[known], return_inverse=True)
        packed = np.zeros(len(tensors), dtype=_ROW)
        packed["row"] = tensors
        for number in range(2):
            np.add.at(packed["sums"][:, number], places, self._sums[known, number])
        return packed.tobytes()

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        if plan is not self._plan:
            return super().data_of(plan)
        give = self._planner.data_of(plan)

        def data(row: int) -> torch.Tensor | object:
            given = give(row)
            self._note(row, given)
            return given

        return data

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        given = self._planner.get_data(item)
        self._note(self._plan.items.index(item), given)
        return given

    def _note(self, row: int, given: object) -> None:
        if not isinstance(given, torch.Tensor) or self._is_object[row]:
            return
        # Of a base a writer asks twice. What is made once more may be something else.
        if self._is_summed[row] and not self.makes_data:
            return
        ndim, global_shape, offset, shape, flat = self._places[row]
        box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
        flat_range = None if flat[0] < 0 else (flat[0], flat[1])
        # A whole leaf is given as it is, without the axes that exist only globally.
        values = given.reshape(box.shape if flat_range is None else (-1,))
        self._sums[row] = sums_of_tensor(values, box, flat_range, tuple(global_shape[:ndim]))
        self._is_summed[row] = True

    @property
    def settings(self) -> Hashable | None:
        return self._planner.settings

    @property
    def makes_data(self) -> bool:
        return self._planner.makes_data

    def configure_planner(self, *args: Any, **kwargs: Any) -> None:
        self._planner.configure_planner(*args, **kwargs)

    def build_local_plan(self) -> SavePlan:
        return self._planner.build_local_plan()

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
        return self._planner.build_global_plan(all_plans)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return self._planner.finalize_plan(plan)


def with_fingerprints(index: Index, packed: Iterable[bytes]) -> Index:
    """The index with the fingerprints of all tensors, of what each rank has packed."""
    sums = np.zeros((len(index), 2), dtype=np.uint64)
    for data in packed:
        rows = np.frombuffer(data, dtype=_ROW)
        sums[rows["row"]] += rows["sums"]  # a rank names a tensor once
    columns = zip(
        index.keys_column, sums.tolist(), index.dtype_column, index.global_shape_column, strict=True
    )
    fingerprints = {
        key: fingerprint_of((first, second), dtype, shape)
        for key, (first, second), dtype, shape in columns
    }
    return replace(index, fingerprints=fingerprints)
