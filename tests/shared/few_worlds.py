"""The conformance suite for a backend whose shards are cut and joined as another's are."""

from pathlib import Path

import pytest

from dist_checkpointing.testing import RoundTrips


class FewWorlds(RoundTrips):
    """Saves and loads by a few pairs of world sizes instead of all of them."""

    @pytest.mark.parametrize(("save_world", "load_world"), [(1, 2), (2, 4), (4, 1)])
    def test_every_cut_to_every_cut(self, tmp_path: Path, save_world: int, load_world: int) -> None:
        super().test_every_cut_to_every_cut(tmp_path, save_world, load_world)
