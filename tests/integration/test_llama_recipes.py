"""Llama of Hugging Face to GPT of Megatron and back: by values, and by what the models compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_checkpointing import Checkpoint, ShardedObject, load, load_plain_tensors, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning.llama_recipes import llama_to_megatron, megatron_to_llama
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools.convert import convert
from states import blanks, rows, shard, wholes
from tiny_llama import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    IDS,
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


def test_megatron_computes_the_same(model: Path, tmp_path: Path) -> None:
    recipe = llama_to_megatron(GROUPS, vocab_size=PADDED)
    convert(model, tmp_path / "megatron", recipe=recipe)
    weights: Any = load_plain_tensors(tmp_path / "megatron")
    assert weights["embedding.word_embeddings.weight"].shape == (PADDED, HIDDEN)
    assert weights["output_layer.weight"][VOCABULARY:].eq(0).all()
    logits = megatron_logits(weights)[..., :VOCABULARY]
    torch.testing.assert_close(logits, hf_logits(hf_weights()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", ["stacked", "apart"])
@pytest.mark.parametrize("to", ["tensorstore", "zarr:1", "torch_dist", "safetensors", "torch"])
def test_there_and_back_is_the_same_bits(
    model: Path, tmp_path: Path, layers: Literal["stacked", "apart"], to: str
) -> None:
    there = llama_to_megatron(GROUPS, layers=layers, vocab_size=PADDED)
    back = megatron_to_llama(HEADS, GROUPS, layers=layers, vocab_size=VOCABULARY)
    convert(model, tmp_path / "megatron", to, recipe=there)
    convert(tmp_path / "megatron", tmp_path / "hf", "safetensors", recipe=back)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == hf_weights().keys()
    assert all(torch.equal(found[key], own) for key, own in hf_weights().items())


def test_tensor_parallel_ranks_load_their_parts(model: Path, tmp_path: Path) -> None:
    """As Megatron cuts them: query, key and value by group, gate and up each on its own."""
    convert(model, tmp_path / "plain")
    convert(model, tmp_path / "megatron", recipe=llama_to_megatron(GROUPS))
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


def test_a_training_with_megatron_loads_into_hugging_face(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "megatron", recipe=llama_to_megatron(GROUPS, vocab_size=PADDED))
    weights: Any = load_plain_tensors(tmp_path / "megatron")
    state = {key: own for key, own in weights.items() if isinstance(own, torch.Tensor)}
    moments = {f"optimizer.state.exp_avg.{key}": own * 2 for key, own in state.items()}
    extra = {"x": ShardedObject(f"{QKV[:-7]}._extra_state", "fp8", (1,), (0,))}
    save({**wholes(state | moments), **extra, "iteration": 3}, tmp_path / "run")
    found: Any = load(
        blanks(hf_weights()), tmp_path / "run", recipe=megatron_to_llama(HEADS, GROUPS),
        strict="raise_all", verify=True,
    )  # fmt: skip
    assert all(torch.equal(found[key], own) for key, own in hf_weights().items())
    assert found["iteration"] == 3


def test_a_file_names_the_recipe(tmp_path: Path) -> None:
    from dist_checkpointing import Recipe

    path = tmp_path / "r.json"
    use = {"use": "megatron_to_llama", "num_attention_heads": 4, "num_query_groups": 2}
    path.write_text(json.dumps([use, {"drop": "lm_head.weight"}]))
    assert Recipe.read(path).rules[:-1] == megatron_to_llama(4, 2).rules


# The small files beside the weights.


@pytest.mark.parametrize("to", ["tensorstore", "zarr:1", "torch_dist", "torch"])
def test_small_files_come_back(model: Path, tmp_path: Path, to: str) -> None:
    convert(model, tmp_path / "between", to)
    done = convert(tmp_path / "between", tmp_path / "back", "safetensors")
    assert done.left_out == ()
    names = {"config.json", "tokenizer.model", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "back").iterdir()} == names | {"model.safetensors"}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    from dist_checkpointing.tools.convert import ConvertOptions

    again = ConvertOptions(overwrite=True)
    convert(tmp_path / "between", tmp_path / "back", "safetensors", options=again)
    (tmp_path / "back" / "mine.txt").write_text("notes")
    with pytest.raises(FileExistsError, match="holds something else"):
        convert(tmp_path / "between", tmp_path / "back", "safetensors", options=again)


def test_one_file_cannot_carry_them(model: Path, tmp_path: Path) -> None:
    done = convert(model, tmp_path / "one.safetensors", "safetensors")
    assert done.left_out == ("common state that is no text (hugging_face)",)
    convert(tmp_path / "one.safetensors", tmp_path / "ckpt")
    assert Checkpoint.open(tmp_path / "ckpt").common == {}


@pytest.mark.parametrize(
    "name", ["../config.json", "/tmp/x.json", "a/b.json", ".x.json", "x.py", "m.index.json"]
)
def test_names_that_lead_elsewhere_are_not_written(tmp_path: Path, name: str) -> None:
    files = {name: b"{}", "config.json": b"{}"}
    save({**wholes({"w": torch.ones(2)}), "hugging_face": files}, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "out" / "hf", "safetensors")
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    assert found == {"hf/config.json", "hf/model.safetensors"}


def test_transformers_loads_what_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, rms_norm_eps=1e-6,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        tie_word_embeddings=False,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.load_state_dict(hf_weights())
    llama.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    expected = llama(IDS).logits
    torch.testing.assert_close(expected.double(), hf_logits(hf_weights()), rtol=1e-3, atol=1e-3)
    there = llama_to_megatron(GROUPS, vocab_size=PADDED)
    back = megatron_to_llama(HEADS, GROUPS, vocab_size=VOCABULARY)
    convert(tmp_path / "hf", tmp_path / "megatron", recipe=there)
    convert(tmp_path / "megatron", tmp_path / "back", "safetensors", recipe=back)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(found(IDS).logits, expected)
