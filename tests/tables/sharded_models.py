"""Tiny models of odd sizes, ways to wrap them by FSDP, and what tests do with them on several ranks."""

import regauge as rg
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OPTConfig

# odd sizes, so that shards cut rows and ranks hold unlike parts
_ODD = {
    "hidden_size": 30,
    "intermediate_size": 47,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 97,
}
CONFIGS = {
    "llama": LlamaConfig(**_ODD),
    "tied": LlamaConfig(**_ODD, tie_word_embeddings=True),
    "opt": OPTConfig(
        hidden_size=30, ffn_dim=47, num_hidden_layers=2, num_attention_heads=3, word_embed_proj_dim=30, vocab_size=97
    ),
    # the grouped matmul, with which it is traced, wants multiples of eight
    "mixtral": MixtralConfig(**{**_ODD, "hidden_size": 24, "intermediate_size": 40}, num_local_experts=3),
}
WRAPS = ("fsdp1", "fsdp1_orig", "fsdp1_nested", "fsdp2", "fsdp2_kept", "fsdp2_partly")
TOKENS = torch.arange(1, 49).reshape(6, 8)


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.rand_like(p) * 0.1)
    return model


def wrap(model, how):
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    if how.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = (
            ModuleWrapPolicy({type(layers[0])})
            if how != "fsdp1_nested"
            else ModuleWrapPolicy({type(layers[0]), torch.nn.Linear})
        )
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=how == "fsdp1_orig",
            auto_wrap_policy=policy if how != "fsdp1_nested" or not tied(model) else ModuleWrapPolicy({type(layers[0])}),
        )  # fmt: skip
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    ignored = {next(layers[0].parameters())} if how == "fsdp2_partly" else None
    fully_shard(model, mesh=mesh, reshard_after_forward=how != "fsdp2_kept", ignored_params=ignored)
    return model


def tied(model):
    return model.config.tie_word_embeddings


def batches(rows):
    return [
        rg.Batch(input_ids=TOKENS[r : r + 1], attention_mask=torch.ones(1, 8), index=torch.tensor([r])) for r in rows
    ]


def own(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gathered(store, names):
    with store.read(names) as params:
        return {name: p.clone() for name, p in params.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
