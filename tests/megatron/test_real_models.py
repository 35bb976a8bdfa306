"""Megatron's own models and optimizers, with its package of checkpoints and with ours in its place.

``make test-megatron`` installs the versions of megatron-core and names their folders in
``MEGATRON_CORE``.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rank import FORMATS, MODELS, OF_ONE_TP_SIZE, TP_SIZES, WORLD_SIZE
from real_ranks import run_script

FOLDERS = [Path(folder) for folder in os.environ.get("MEGATRON_CORE", "").split(":") if folder]
ROLES = ("ours", "theirs")
SCRIPT = Path(__file__).with_name("megatron_rank.py")

pytestmark = [
    pytest.mark.skipif(
        not FOLDERS, reason="megatron-core is missing: make test-megatron installs it"
    ),
    pytest.mark.timeout(900),  # of which the first test of a version takes nearly all
]


def run(megatron: Path, role: str, action: str, place: Path) -> list[dict[str, str]]:
    """What each rank reports: the digest of its state, by folder."""
    arguments = (megatron.absolute(), role, action, place)
    reports = place / f"reports-{role}-{action}"
    return run_script(WORLD_SIZE, SCRIPT, *arguments, reports=reports, timeout_seconds=280)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def digests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Reports of the ranks, by role and action."""
    place = tmp_path_factory.mktemp("megatron")
    order = itertools.product(("write", "read"), ROLES)
    return {(role, action): run(request.param, role, action, place) for action, role in order}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_either_reads_what_either_wrote_bit_for_bit(
    digests: dict[tuple[str, str], list[dict[str, Any]]], model: str, form: str
) -> None:
    for rank, written, tp_size in itertools.product(range(WORLD_SIZE), TP_SIZES, TP_SIZES):
        if form == OF_ONE_TP_SIZE and written != tp_size:
            continue
        own = f"{model}-{form}-{written}"
        states = {digests[role, "write"][rank].get(f"{role}-{own}") for role in ROLES} - {None}
        found = {
            digests[reader, "read"][rank].get(f"{writer}-{own} {tp_size}")
            for writer, reader in itertools.product(ROLES, ROLES)
        } - {None}
        assert len(states) == len(found) == 1
        if written == tp_size:
            assert found == states


def test_nothing_else_is_left_out_than_what_megatron_itself_cannot_do(
    digests: dict[tuple[str, str], list[dict[str, Any]]], request: pytest.FixtureRequest
) -> None:
    has_flattened = request.node.callspec.id < "0.16"
    pairs = len(TP_SIZES) ** 2
    reads = {form: len(TP_SIZES) if form == OF_ONE_TP_SIZE else pairs for form in FORMATS}
    for (role, action), of_ranks in digests.items():
        count = 0
        for form, writer in itertools.product(FORMATS, ROLES):
            is_flattened = form == "fully_sharded_model_space"
            is_possible = has_flattened or not is_flattened or (role, writer) == ("ours",) * 2
            if is_possible and action == "read":
                count += reads[form]
            elif is_possible and role == writer:
                count += len(TP_SIZES)
        assert [len(r) for r in of_ranks] == [count * len(MODELS)] * WORLD_SIZE, (role, action)
