"""Checkpoints that DeepSpeed wrote are converted exactly; see ``make_deepspeed.py``."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.format import Box
from dist_checkpointing.interop import TorchState
from dist_checkpointing.tools import convert as tool
from make_deepspeed import Net
from samples import GOLDEN, Run
from tiers import examples
from tilings import boxes

FOLDER = GOLDEN / "deepspeed0.19.8"
NAMES = ["zero1", "zero2", "zero3", "universal2", "universal3"]
STEP = "global_step3"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
UNUSED = ["scale", "frozen.bias", "frozen.weight", "head.weight"]
STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SimpleNamespace, "deepspeed.utils.tensor_fragment.fragment_address"),
]
ALL = pytest.mark.parametrize("name", NAMES)


@functools.cache
def expected(name: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own tools make of it, by our keys."""
    found = torch.load(FOLDER / f"zero{name[-1]}" / "expected.pt")
    weights = {f"model.{key}": value for key, value in found["weights"].items()}
    assert torch.equal(weights.pop("model.head.weight"), weights["model.embed.weight"])
    # The universal format of stage 3 is flat.
    return weights | {
        f"optimizer.state.{key}": value.view_as(weights[f"model.{key.rpartition('.')[0]}"])
        for key, value in found["state"].items()
    }


opened = functools.cache(lambda name: dc.Checkpoint.open(FOLDER / name))


def written(name: str, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(FOLDER / name, tmp_path / name))


@pytest.fixture(scope="module", params=NAMES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of them becomes, in a folder of its name."""
    out: Path = tmp_path_factory.mktemp("converted") / request.param
    tool.convert(FOLDER / out.name, out)
    return out


def edit(file: Path, change: Callable[[Any], None]) -> None:
    with torch.serialization.safe_globals(STAND_INS):
        content = torch.load(file)
    change(content)
    torch.save(content, file)


def refused(path: Path, error: type[dc.CheckpointingException]) -> str:
    with pytest.raises(error) as caught:
        tool.convert(path, path.parent / "out")
    assert not (path.parent / "out").exists()
    return str(caught.value)


def test_every_value_is_that_of_deepspeed(converted: Path, dckpt: Run) -> None:
    dckpt("diff", FOLDER / converted.name, converted, code=0)
    checkpoint = dc.Checkpoint.open(converted)
    loaded = dc.load_plain_tensors(converted)
    tensors = {key: loaded[key] for key in checkpoint}
    wanted = expected(converted.name)
    assert len(wanted) == (16 if converted.name == "zero1" else 18)
    for key, value in wanted.items():
        found = tensors[key]
        assert torch.equal(found.to(value.dtype), value), key
        assert found.dtype is (torch.bfloat16 if "frozen" in key else torch.float32)
    steps = {key for key in tensors if key.endswith(".step")}
    assert len(steps) == 5
    assert all(float(tensors[key]) == 3 for key in steps)
    # zero_to_fp32 leaves the frozen parameters of stage 1 out.
    assert tensors.keys() - wanted.keys() - steps <= {"model.frozen.weight", "model.frozen.bias"}
    assert "model.frozen.weight" in tensors
    assert checkpoint.common["deepspeed"]["ds_version"] == "0.19.8"
    assert checkpoint.common["deepspeed"]["epoch"] == 2


def test_a_training_goes_on_from_it(converted: Path) -> None:
    wanted = expected(converted.name)
    model = Net()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=1.0)
    state = TorchState(model, optimizer)
    dc.load(state, converted, cast="widen")  # frozen parameters are bfloat16
    assert state.step == 3
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    for key, parameter in model.named_parameters():
        if f"model.{key}" in wanted:
            assert torch.equal(parameter, wanted[f"model.{key}"].float())
        if parameter.requires_grad:
            own = optimizer.state[parameter]
            assert torch.equal(own["exp_avg"], wanted[f"optimizer.state.{key}.exp_avg"])
    assert model.head.weight is model.embed.weight
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    assert {float(own["step"]) for own in optimizer.state.values()} == {4.0}


@ALL
@examples(20)
@given(data=st.data())
def test_every_box_can_be_read(name: str, data: st.DataObject) -> None:
    names = ("model.embed.weight", "optimizer.state.body.weight.exp_avg_sq")
    keys = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    wanted = [(key, data.draw(boxes(tuple(expected(name)[key].shape)))) for key in keys]
    for (key, box), found in zip(wanted, opened(name).read(wanted), strict=True):
        assert found.is_contiguous()
        assert torch.equal(found, expected(name)[key][box.slices()])


def test_the_folder_above_is_that_of_the_latest_step(tmp_path: Path) -> None:
    above, step = (dc.Checkpoint.open(path) for path in (FOLDER / "zero3", FOLDER / "zero3" / STEP))
    assert [*above] == [*step]
    path = written("zero3", tmp_path)
    (path / "latest").write_text("../zero3/global_step9")
    assert "metadata.json" in refused(path, dc.CheckpointingException)


def test_the_steps_of_deepspeeds_optimizers(tmp_path: Path) -> None:
    path = written("zero2", tmp_path)

    def count_in_groups(content: dict[str, Any]) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for group, own in zip(base["param_groups"], base["state"].values(), strict=True):
            group["step"] = int(own.pop("step"))

    for rank in (0, 1):
        edit(path / STEP / OPTIM.format(rank), count_in_groups)
    tool.convert(path, tmp_path / "out")
    found = dc.load_plain_tensors(tmp_path / "out")
    assert torch.equal(found["optimizer.state.body.bias.step"], torch.tensor(3.0))
    assert "step" not in found["optimizer"]["param_groups"][0]


def test_elastic_checkpoints(tmp_path: Path) -> None:
    path = written("zero2", tmp_path)

    def without_padding(content: dict[str, Any]) -> None:
        zero = content["optimizer_state_dict"]
        states = zero["base_optimizer_state"]["state"]
        zero["base_optimizer_state"] = [states[number] for number in sorted(states)]

    for rank in (0, 1):
        edit(path / STEP / OPTIM.format(rank), without_padding)
    source = dc.Checkpoint.open(path)
    for key, value in expected("zero2").items():
        (found,) = source.read([(key, Box.whole(tuple(value.shape)))])
        assert torch.equal(found.to(value.dtype), value)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_ranks_that_are_missing_or_too_many(tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path)
    shutil.copy(path / STEP / OPTIM.format(1), path / STEP / OPTIM.format(2))
    text = refused(path, dc.CorruptCheckpointError)
    assert "there was no such rank; expected files of ranks 0 to 1" in text
    assert "rank 2. Remove what another run left." in text
    (path / STEP / OPTIM.format(2)).unlink()
    (path / STEP / OPTIM.format(1)).unlink()
    text = refused(path, dc.CorruptCheckpointError)
    assert "its file is missing; expected files of ranks 0 to 1" in text
    assert "rank 1. Copy the files of all nodes here." in text
    (path / STEP / OPTIM.format(0)).unlink()
    assert "there are no *_optim_states.pt" in refused(path, dc.UnsupportedFormatError)


def test_files_that_are_missing_or_of_another_run(tmp_path: Path) -> None:
    path = written("zero3", tmp_path)
    missing = path / STEP / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    missing.unlink()
    assert f"missing; file {missing}" in refused(path, dc.CorruptCheckpointError)
    # And files of another run.
    file = path / STEP / OPTIM.format(1)
    edit(file, lambda content: content["optimizer_state_dict"].update(partition_count=4))
    text = refused(path, dc.CorruptCheckpointError)
    assert "expected stage 3, world size 2; found stage 3, world size 4" in text
    shutil.copy(FOLDER / "zero2" / STEP / OPTIM.format(1), file)
    text = refused(path, dc.CorruptCheckpointError)
    assert "expected stage 3, world size 2; found stage 2, world size 2" in text
    assert str(file) in text


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_partitions_that_do_not_fit_the_shapes(tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path)
    model = "mp_rank_00_model_states.pt"
    file = path / STEP / (f"zero_pp_rank_0_{model}" if name == "zero3" else model)
    edit(file, lambda content: content["param_shapes"][0].update({"new": torch.Size([9, 9])}))
    assert "shapes do not fit" in refused(path, dc.CorruptCheckpointError)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_state_that_is_cut_off(tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path)

    def cut(content: dict[str, Any]) -> None:
        zero = content["optimizer_state_dict"]
        base = zero["optimizer_state_dict" if name == "zero3" else "base_optimizer_state"]
        base["state"][0]["exp_avg"] = base["state"][0]["exp_avg"][:50].clone()

    edit(path / STEP / OPTIM.format(1), cut)
    text = refused(path, dc.CorruptCheckpointError)
    assert "'optimizer.state.body.weight.exp_avg': truncated" in text
    assert "found 50" in text


@ALL
def test_damaged_files(tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path)
    for file in sorted(path.rglob("*.pt")):
        # The universal format has what no optimizer updates a second time.
        if file.name == "expected.pt" or file.parent.name in UNUSED:
            continue
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert str(file) in refused(path, dc.CorruptCheckpointError)
        file.write_bytes(content)


def test_classes_of_others_need_trust(tmp_path: Path) -> None:
    path = written("zero2", tmp_path)
    file = path / STEP / "mp_rank_00_model_states.pt"
    edit(file, lambda content: content.update(client=torch.nn.Identity()))
    text = refused(path, dc.UnsupportedFormatError)
    assert "torch.nn.modules.linear.Identity" in text


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("zero2", f"{STEP}/zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        ("zero2", f"{STEP}/layer_00-model_states.pt"),
        ("universal2", "mp_rank_01_model_states.pt"),
    ],
)
def test_parts_of_models_are_refused(tmp_path: Path, name: str, other: str) -> None:
    path = written(name, tmp_path)
    (path / other).touch()
    text = refused(path, dc.UnsupportedFormatError)
    assert "tensor, pipeline or expert parallelism" in text
    assert "on data-parallel ranks alone" in text


def test_a_universal_tensor_of_another_size(tmp_path: Path) -> None:
    path = written("universal3", tmp_path)
    torch.save(torch.zeros(5), path / "zero" / "body.bias" / "exp_avg.pt")
    assert "'body.bias': another size; expected (7,)" in refused(path, dc.CorruptCheckpointError)


def test_without_zero_the_file_of_the_model_is_converted(tmp_path: Path) -> None:
    path = written("zero1", tmp_path)
    for file in (path / STEP).glob("*_optim_states.pt"):
        file.unlink()
    model = path / STEP / "mp_rank_00_model_states.pt"
    assert "Convert its *_model_states.pt" in refused(path, dc.UnsupportedFormatError)
    tool.convert(model, tmp_path / "out")
    assert "module.frozen.weight" in dc.Checkpoint.open(tmp_path / "out")
