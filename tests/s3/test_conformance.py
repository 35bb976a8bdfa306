"""The conformance suite of backends, with a folder of an S3 server in place of one of a disk."""

from typing import Any

import pytest

from dist_checkpointing import ObjectPath
from dist_checkpointing.testing import Contents, StrategyConformance
from few_worlds import FewWorlds
from s3_servers import Server

pytestmark = pytest.mark.exhaustive  # minutes


class _InStore:
    @pytest.fixture
    def tmp_path(self, server: Server) -> ObjectPath:
        return server.place()

    # They look at the files of a folder, damage them, or move it.
    test_created_names_cover_every_file: Any = None
    test_keys_never_leave_the_folder: Any = None
    test_missing_data_is_an_error: Any = None
    test_moved_folder: Any = None
    test_one_failing_rank_fails_all: Any = None
    test_order_of_writer_calls: Any = None
    test_remove_sharded_tensors: Any = None
    test_unknown_backend_or_version: Any = None


class TestTensorStore(_InStore, FewWorlds, StrategyConformance):
    backend = ("tensorstore", 1)


class TestZarr(_InStore, FewWorlds):
    backend = ("zarr", 2)


class TestTorchDist(_InStore, FewWorlds, Contents):
    backend = ("torch_dist", 1)
