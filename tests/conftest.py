"""Tiny random models of the families that the library knows, with their graphs and parameters."""

import pytest
import regauge as rg
import torch
from every_transform import TOKENS, Tiny
from hypothesis import settings
from shapes import SHAPE
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

# the same examples every time, and no limit on how long one may take on a busy machine
settings.register_profile("regauge", deadline=None, derandomize=True)
settings.load_profile("regauge")

_OPT = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "tied_llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "biased_llama": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gemma": GemmaConfig(**SHAPE, head_dim=8),
    "opt": OPTConfig(**_OPT),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0),
}


def make_tiny(kind: str, dtype: torch.dtype = torch.float32) -> Tiny:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # norms and biases away from their start, so that folding them shows
            if p.ndim == 1:
                p.copy_(torch.rand_like(p) + (0.5 if name.endswith("weight") else -0.5))
            elif ".layers." in name or ".h." in name:  # large enough that the blocks matter beside the embedding
                p.mul_(5)
    graph = rg.build_graph(CONFIGS[kind])
    keys = [f"{kind}:{site}" for site in graph.sites if site != "lm_head" for kind in ("absmax", "range")]
    batch = rg.Batch(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), index=torch.arange(2))
    stats = rg.observe(model, [batch], keys, graph)
    return Tiny(model, graph, {name: p.detach() for name, p in model.named_parameters()}, stats)


@pytest.fixture(scope="session")
def tiny():
    """`tiny(kind, dtype)`: made once."""
    made = {}

    def get(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Tiny:
        if (kind, dtype) not in made:
            made[kind, dtype] = make_tiny(kind, dtype)
        return made[kind, dtype]

    return get
