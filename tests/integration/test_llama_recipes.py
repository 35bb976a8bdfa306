"""Llama of Hugging Face to GPT of Megatron and back: by values, and by what the models compute."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_checkpointing import Checkpoint, Recipe, ShardedObject, load, load_plain_tensors, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import (
    llama_to_megatron,
    megatron_to_llama,
    megatron_to_mixtral,
    mixtral_to_megatron,
)
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools import convert
from states import cell, rows, shard
from tiny_llama import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    hf_logits,
    hf_weights,
    megatron_logits,
)

PADDED = 24
QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face lays it out."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    folder.mkdir()
    save_file(hf_weights(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / ".hidden.json").write_text("{}")
    return folder


Kind = Literal["llama", "qwen2", "mixtral", "mixtral-local"]
KINDS = pytest.mark.parametrize("kind", get_args(Kind))


def weights_of(kind: Kind) -> dict[str, torch.Tensor]:
    return hf_weights(has_biases=kind != "llama", has_experts=kind.startswith("mixtral"))


def there(kind: Kind, *, layers: Literal["stacked", "apart"] = "stacked") -> Recipe:
    if not kind.startswith("mixtral"):
        return llama_to_megatron(GROUPS, layers=layers, vocab_size=PADDED)
    impl: Any = {"mixtral": "transformer_engine", "mixtral-local": "local"}[kind]
    return mixtral_to_megatron(GROUPS, layers=layers, vocab_size=PADDED, transformer_impl=impl)


def back(kind: Kind, *, layers: Literal["stacked", "apart"] = "stacked") -> Recipe:
    make = megatron_to_mixtral if kind.startswith("mixtral") else megatron_to_llama
    return make(HEADS, GROUPS, layers=layers, vocab_size=VOCABULARY)


@KINDS
def test_megatron_computes_the_same(kind: Kind, tmp_path: Path) -> None:
    save_file(weights_of(kind), tmp_path / "hf.safetensors")
    convert.convert(tmp_path / "hf.safetensors", tmp_path / "megatron", recipe=there(kind))
    weights: Any = load_plain_tensors(tmp_path / "megatron")
    assert not [key for key in weights if key.startswith("model.")]
    assert weights["embedding.word_embeddings.weight"].shape == (PADDED, HIDDEN)
    assert weights["output_layer.weight"][VOCABULARY:].eq(0).all()
    logits = megatron_logits(weights)[..., :VOCABULARY]
    torch.testing.assert_close(logits, hf_logits(weights_of(kind)), rtol=1e-10, atol=1e-10)


def assert_is_model(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model-00001-of-00001.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], own) for key, own in expected.items())


@pytest.mark.parametrize(
    ("kind", "layers", "to"),
    [
        ("llama", "stacked", "tensorstore"),
        ("llama", "apart", "zarr:1"),
        ("qwen2", "stacked", "torch_dist"),
        ("mixtral", "stacked", "safetensors"),
        ("mixtral", "apart", "torch_file"),
        ("mixtral-local", "stacked", "zarr:1"),
        ("mixtral-local", "apart", "safetensors"),
    ],
)
def test_there_and_back_is_the_same_bits(
    kind: Kind, tmp_path: Path, layers: Literal["stacked", "apart"], to: str
) -> None:
    (tmp_path / "model").mkdir()
    save_file(weights_of(kind), tmp_path / "model" / "model.safetensors")
    convert.convert(
        tmp_path / "model", tmp_path / "megatron", to, recipe=there(kind, layers=layers)
    )
    recipe = back(kind, layers=layers)
    convert.convert(tmp_path / "megatron", tmp_path / "hf", "safetensors", recipe=recipe)
    assert_is_model(tmp_path / "hf", weights_of(kind))


@pytest.mark.parametrize("place", ["{fc}.weight{i}", "local_experts.{i}.{fc}.weight"])
def test_experts_of_a_state_dict(tmp_path: Path, place: str) -> None:
    """As ``torch.save(gpt.state_dict())`` writes them, with one tensor an expert."""
    hf = weights_of("mixtral")
    save_file(hf, tmp_path / "hf.safetensors")
    recipe = there("mixtral", layers="apart")
    convert.convert(tmp_path / "hf.safetensors", tmp_path / "m", recipe=recipe)
    state = {k: own for k, own in load_plain_tensors(tmp_path / "m").items() if "experts" not in k}
    for layer, i in itertools.product(range(LAYERS), range(EXPERTS)):
        own = f"model.layers.{layer}.block_sparse_moe.experts.{i}"
        fc1 = torch.cat([hf[f"{own}.w1.weight"], hf[f"{own}.w3.weight"]])
        for fc, value in (("linear_fc1", fc1), ("linear_fc2", hf[f"{own}.w2.weight"])):
            state[f"decoder.layers.{layer}.mlp.experts.{place.format(fc=fc, i=i)}"] = value
    torch.save(state, tmp_path / "state.pt")
    recipe = back("mixtral", layers="apart")
    convert.convert(tmp_path / "state.pt", tmp_path / "hf", "safetensors", recipe=recipe)
    assert_is_model(tmp_path / "hf", hf)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: llama_to_megatron(0), "num_query_groups must be a positive number, not 0"),
        (lambda: llama_to_megatron(2, layers="stack"), "layers must be 'stacked' or 'apart'"),  # type: ignore[arg-type]
        (lambda: megatron_to_llama(32, 5), "must be a multiple of num_query_groups, not 32 of 5"),
        (lambda: megatron_to_mixtral(4, 2, layers="x"), "layers must be"),  # type: ignore[arg-type]
        (lambda: mixtral_to_megatron(2, transformer_impl="inference"), "transformer_impl must be"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(make: Callable[[], Recipe], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_tensor_parallel_ranks_load_their_parts(model: Path, tmp_path: Path) -> None:
    """As Megatron cuts them: query, key and value by group, gate and up each on its own."""
    convert.convert(model, tmp_path / "plain")
    convert.convert(model, tmp_path / "megatron", recipe=llama_to_megatron(GROUPS))
    full: Any = load_plain_tensors(tmp_path / "megatron")

    def load_rank(comm: Comm) -> None:
        template: dict[str, Any] = {}
        for layer in range(LAYERS):
            part = torch.empty(full[QKV].shape[1] // 2, HIDDEN)
            template[f"qkv.{layer}"] = shard(
                QKV, part, (0, layer, LAYERS), (1, comm.rank, 2), prepend_axis_num=1
            )
        fc1 = "decoder.layers.mlp.linear_fc1.weight"
        for half in range(2):
            part = torch.empty(LAYERS, FFN // 2, HIDDEN)
            template[f"fc1.{half}"] = shard(fc1, part, (1, 2 * half + comm.rank, 4))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            template[name] = rows(name, torch.full((PADDED, HIDDEN), 9.0), comm)
        template["extra"] = ShardedObject(f"{QKV[:-7]}._extra_state", None, (1,), (0,))
        found: Any = load(template, tmp_path / "plain", comm=comm, recipe=llama_to_megatron(GROUPS))
        for layer in range(LAYERS):
            assert torch.equal(found[f"qkv.{layer}"], full[QKV][layer].chunk(2)[comm.rank])
        for half in range(2):
            own = full[fc1].chunk(4, 1)[2 * half + comm.rank]
            assert torch.equal(found[f"fc1.{half}"], own)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            padded = torch.cat([full[name], torch.zeros(PADDED - VOCABULARY, HIDDEN)])
            assert torch.equal(found[name], padded.chunk(2)[comm.rank])
        assert found["extra"] is None

    run_ranks(2, load_rank)


@pytest.mark.parametrize("world", [1, 4])
def test_ranks_of_megatron_save_for_hugging_face(model: Path, tmp_path: Path, world: int) -> None:
    """Straight into the final files, without what is no weight of the model."""
    recipe = llama_to_megatron(GROUPS, vocab_size=PADDED)
    convert.convert(model, tmp_path / "megatron", recipe=recipe)
    full: Any = load_plain_tensors(tmp_path / "megatron")
    del full["hugging_face"]
    full |= {f"optimizer.state.exp_avg.{key}": own * 2 for key, own in full.items()}

    def save_rank(comm: Comm) -> None:
        axes = {key: 1 if own.ndim == 3 else own.ndim - 1 for key, own in full.items()}
        state: dict[str, Any] = {k: rows(k, own, comm, axis=axes[k]) for k, own in full.items()}
        state["extra"] = cell(f"{QKV[:-7]}._extra_state", "fp8", comm)
        recipe = megatron_to_llama(HEADS, GROUPS, vocab_size=VOCABULARY)
        save(state, tmp_path / "hf", "safetensors", comm=comm, recipe=recipe)

    run_ranks(world, save_rank)
    assert_is_model(tmp_path / "hf", hf_weights())


# The small files beside the weights.


@pytest.mark.parametrize("to", ["tensorstore", "torch_file"])
def test_small_files_come_back(model: Path, tmp_path: Path, to: str) -> None:
    convert.convert(model, tmp_path / "between", to)
    names = {"config.json", "tokenizer.model", "chat_template.jinja"}
    weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    again = convert.ConvertOptions(overwrite=True)
    for mine in (set[str](), {"mine.txt"}):
        for name in mine:
            (tmp_path / "back" / name).write_text("notes")
        done = convert.convert(
            tmp_path / "between", tmp_path / "back", "safetensors", options=again
        )
        assert done.left_out == ()
        assert {path.name for path in (tmp_path / "back").iterdir()} == names | weights | mine
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    assert (tmp_path / "back" / "mine.txt").read_text() == "notes"


def test_one_file_cannot_carry_them(model: Path, tmp_path: Path) -> None:
    done = convert.convert(model, tmp_path / "one.safetensors", "safetensors")
    assert done.left_out == ("common state (hugging_face)",)
    convert.convert(tmp_path / "one.safetensors", tmp_path / "ckpt")
    assert Checkpoint.open(tmp_path / "ckpt").common == {}
