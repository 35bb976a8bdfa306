"""One of two ranks that load a tiny model of Hugging Face into Megatron's GPT, and save it.

``llama_rank.py FOLDER PLACE KIND REPORTS``: FOLDER holds megatron-core; below PLACE are
checkpoints; KIND is "llama", "qwen2" (with biases) or "mixtral" (with both).
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_checkpointing
from dist_checkpointing.planning import llama_to_megatron, mixtral_to_megatron
from megatron_rank import TP_SIZES, without_cuda
from tiny_llama import (
    CHOSEN,
    EPSILON,
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    IDS,
    LAYERS,
    VOCABULARY,
    hf_logits,
)

PADDED = 24


def made(tp_size: int, kind: str) -> Any:
    """A GPTModel with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    vars(moe_utils).setdefault("te_general_gemm", None)  # a name that only exists with CUDA
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    # There is no dropout, and no CUDA whose random state it would want.
    nothing = contextlib.nullcontext
    vars(megatron_random)["CudaRNGStatesTracker"].fork = lambda *_: nothing()
    experts: dict[str, Any] = {
        "num_moe_experts": EXPERTS, "moe_router_topk": CHOSEN, "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    if kind != "mixtral":
        experts = {}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, tensor_model_parallel_size=tp_size, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        layernorm_epsilon=EPSILON, use_cpu_initialization=True, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, add_qkv_bias=kind != "llama", **experts,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts.get("num_moe_experts"), moe_grouped_gemm=False, normalization="RMSNorm"
    )
    return GPTModel(
        config, spec, vocab_size=PADDED,
        max_sequence_length=16, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).eval()  # fmt: skip


def logits_of(gpt: Any, tp_size: int) -> torch.Tensor:
    count = IDS.shape[1]
    mask = torch.triu(torch.ones(count, count, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        own: torch.Tensor = gpt(IDS, torch.arange(count).expand_as(IDS), mask).contiguous()
    if tp_size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(tp_size)]
    dist.all_gather(parts, own)
    return torch.cat(parts, -1)


def main() -> None:
    megatron, place, kind, reports = sys.argv[1:]
    sys.path.insert(0, megatron)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from dist_checkpointing.interop import megatron as layer

    layer.install()
    without_cuda()
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    expected = hf_logits(dist_checkpointing.load_plain_tensors(f"{place}/hf"))
    for tp_size in TP_SIZES:
        gpt = made(tp_size, kind)
        template: Any = {"model": gpt.sharded_state_dict()}
        recipe = llama_to_megatron(GROUPS)
        if kind == "mixtral":
            recipe = mixtral_to_megatron(GROUPS, transformer_impl="local")
        loaded: Any = dist_checkpointing.load(template, f"{place}/hf", recipe=recipe)
        gpt.load_state_dict(loaded["model"])
        differs = logits_of(gpt, tp_size)[..., :VOCABULARY].double() - expected
        found[str(tp_size)] = float(differs.abs().max())
        dist_checkpointing.save({"model": gpt.sharded_state_dict()}, f"{place}/megatron-{tp_size}")
    Path(reports, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
