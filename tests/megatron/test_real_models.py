"""Megatron's own models and optimizers, with its package of checkpoints and with ours in its place.

``make test-megatron`` installs the versions of megatron-core and names their folders in
``MEGATRON_CORE``.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import ObjectPath, ShardedObject, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import data_folder
from dist_checkpointing.planning import megatron_to_llama, megatron_to_mixtral
from dist_checkpointing.testing import random_bits, run_ranks
from megatron_rank import FORMATS, MODELS, OF_ONE_TP_SIZE, TP_SIZES, WORLD_SIZE
from real_ranks import run_script
from states import blanks, rows, wholes
from tiny_llama import GROUPS, HEADS, hf_logits, hf_weights

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


# Megatron's own package reads what was downloaded from an object store, bit for bit.


STORE_SCRIPT = Path(__file__).with_name("store_rank.py")


@pytest.mark.parametrize("megatron", FOLDERS, ids=lambda folder: folder.name)
def test_a_downloaded_checkpoint(megatron: Path, s3_place: ObjectPath, tmp_path: Path) -> None:
    weight, moment = random_bits((8, 6), torch.bfloat16), random_bits((8, 6), torch.float32)

    def state(comm: Comm) -> dict[str, Any]:
        own: dict[str, Any] = {
            "weight": rows("layer.weight", weight, comm),
            "moment": rows("optimizer.moment", moment, comm),
            "step": 7,
        }
        if comm.rank < 2:
            own["extra"] = ShardedObject("extra", {"rank": comm.rank}, (2,), (comm.rank,))
        return own

    run_ranks(4, lambda comm: save(state(comm), s3_place, "torch_dist", comm=comm))
    place, folder = data_folder(s3_place), tmp_path / "downloaded"
    assert isinstance(place, ObjectPath)
    for info in place.store.list_below(place.prefix):  # as aws s3 sync does
        path = folder / info.key.removeprefix(place.prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.store.get(info.key))
    arguments, reports = (megatron.absolute(), folder), tmp_path / "reports"
    ranks = run_script(2, STORE_SCRIPT, *arguments, reports=reports, timeout_seconds=250)
    for rank, found in enumerate(ranks):
        assert found["weight"] == weight.chunk(2, 1)[rank].view(torch.int16).tolist()
        assert found["moment"] == moment.chunk(2, 1)[rank].view(torch.int32).tolist()
        assert (found["extra"], found["step"]) == ({"rank": rank}, 7)


# Megatron's own GPT computes what a model of Hugging Face does whose weights a recipe loaded.


LLAMA_SCRIPT = Path(__file__).with_name("llama_rank.py")


@pytest.mark.parametrize("megatron", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])
def test_megatron_computes_the_same_and_gives_it_back(
    megatron: Path, kind: str, tmp_path: Path
) -> None:
    weights = hf_weights(has_biases=kind != "llama", has_experts=kind == "mixtral")
    save(wholes(weights), tmp_path / "hf")
    arguments = (megatron.absolute(), tmp_path, kind)
    reports = run_script(
        WORLD_SIZE, LLAMA_SCRIPT, *arguments, reports=tmp_path / "reports", timeout_seconds=280
    )
    largest = float(hf_logits(weights).abs().max())
    for report in reports:
        assert all(report[str(tp_size)] < 1e-5 * largest for tp_size in TP_SIZES), report
    for tp_size in TP_SIZES:
        make = megatron_to_mixtral if kind == "mixtral" else megatron_to_llama
        recipe = make(HEADS, GROUPS)
        folder = tmp_path / f"megatron-{tp_size}"
        found: Any = load(blanks(weights), folder, recipe=recipe)
        assert all(torch.equal(found[key], own) for key, own in weights.items())
