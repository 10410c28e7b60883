"""Graphs of tiny models, against groups written down from reading the models' code."""

import pytest
import regauge as rg
import torch
from regauge.graph.skeleton import norm_offset, skeleton, trace_reads
from torch import nn
from transformers import FalconConfig, LlamaConfig, MixtralConfig, Olmo2Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

LLAMA = {
    ("norm", "input_layernorm"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("norm", "post_attention_layernorm"): ("mlp.gate_proj", "mlp.up_proj"),
    ("v_o", "self_attn.v_proj"): ("self_attn.o_proj",),
    ("up_down", "mlp.up_proj"): ("mlp.down_proj",),
}
EXPECTED = {
    "llama": ("model.layers", LLAMA),
    "tied_llama": ("model.layers", LLAMA),
    "mistral": ("model.layers", LLAMA),
    "qwen2": ("model.layers", LLAMA),
    "qwen3": ("model.layers", LLAMA),
    "gemma": ("model.layers", LLAMA),
    "opt": (
        "model.decoder.layers",
        {
            ("norm", "self_attn_layer_norm"): ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
            ("norm", "final_layer_norm"): ("fc1",),
            ("v_o", "self_attn.v_proj"): ("self_attn.out_proj",),
            ("up_down", "fc1"): ("fc2",),
        },
    ),
    "gpt2": (
        "transformer.h",
        {
            ("norm", "ln_1"): ("attn.c_attn",),
            ("norm", "ln_2"): ("mlp.c_fc",),
            ("v_o", "attn.c_attn"): ("attn.c_proj",),  # no up_down: gelu is not homogeneous
        },
    ),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_symmetries_are_those_of_the_code(tiny, kind):
    graph, (prefix, groups) = tiny(kind).graph, EXPECTED[kind]
    assert graph.blocks == (f"{prefix}.0", f"{prefix}.1")
    expected = {
        (sort, f"{block}.{producer}"): {f"{block}.{name}" for name in linears}
        for block in graph.blocks
        for (sort, producer), linears in groups.items()
    }
    assert {(s.kind, s.name): set(s.linears) for s in graph.symmetries} == expected


@pytest.mark.parametrize(
    ("kind", "ties"),
    [
        ("llama", {}),
        ("tied_llama", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("opt", {"lm_head.weight": "model.decoder.embed_tokens.weight"}),
        ("gpt2", {"lm_head.weight": "transformer.wte.weight"}),
    ],
)
def test_ties_are_recorded_under_the_stored_name(tiny, kind, ties):
    assert tiny(kind).graph.ties == ties
    assert not set(ties) & set(tiny(kind).graph.shapes)


def test_sites_group_the_readers_of_one_activation(tiny):
    sites = {name: set(site.linears) for name, site in tiny("llama").graph.sites.items()}
    first = {name.removeprefix("model.layers.0."): {x.removeprefix("model.layers.0.") for x in names} for name, names in sites.items() if ".0." in name}  # fmt: skip
    assert first == {
        "self_attn.q_proj": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
        "self_attn.o_proj": {"self_attn.o_proj"},
        "mlp.gate_proj": {"mlp.gate_proj", "mlp.up_proj"},
        "mlp.down_proj": {"mlp.down_proj"},
    }
    assert tiny("llama").graph.sites["lm_head"].producer == "model.norm"


def test_only_offset_norms_have_offsets(tiny):
    assert tiny("llama").graph.offsets == {}
    assert set(tiny("gemma").graph.offsets.values()) == {1.0}


@pytest.mark.parametrize(
    ("norm", "expected"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0), (nn.LayerNorm, 0.0), (nn.RMSNorm, 0.0)]
)
def test_the_offset_of_a_norm_is_read_off_its_output(norm, expected):
    with torch.device("meta"):
        module = norm(16)
    assert norm_offset(module, 16) == expected


_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**_SHAPE, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
        FalconConfig(**_SHAPE),
        Olmo2Config(**_SHAPE, intermediate_size=48),
    ],
    ids=lambda c: c.model_type,
)
def test_other_families_have_sites_and_no_symmetries(config):
    graph = rg.build_graph(config)
    assert graph.family is None
    assert graph.symmetries == ()
    assert {len(s.linears) for s in graph.sites.values()} > {1}
    with pytest.raises(rg.PlanError, match="give mappings"):
        rg.plan(rg.transforms.SmoothQuant(), {n: torch.empty(s, device="meta") for n, s in graph.shapes.items()}, graph)


def test_a_norm_that_is_not_in_front_of_the_linears_cannot_be_mapped():
    """OLMo 2 normalises what a sublayer returns, under names that look like Llama's."""
    graph = rg.build_graph(Olmo2Config(**_SHAPE, intermediate_size=48))
    params = {n: torch.empty(s, device="meta") for n, s in graph.shapes.items()}
    mapping = [[["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]]
    with pytest.raises(rg.PlanError, match="not the output of model.layers.0.post_attention_layernorm"):
        rg.plan(rg.transforms.SmoothQuant(mappings=mapping), params, graph)


def test_a_model_that_cannot_be_traced_has_a_site_for_each_linear_and_no_symmetry(monkeypatch):
    """Sites that are too small would make wrong symmetries; without a trace there must be none."""
    from transformers import LlamaForCausalLM

    def data_dependent(self, *args, **kwargs):
        return torch.zeros(1) if torch.zeros(1).item() else None

    monkeypatch.setattr(LlamaForCausalLM, "forward", data_dependent)
    graph = rg.build_graph(LlamaConfig(**_SHAPE, intermediate_size=48, num_key_value_heads=2, rms_norm_eps=1e-3))
    assert {len(s.linears) for s in graph.sites.values()} == {1}
    assert {s.producer for s in graph.sites.values()} == {None}
    assert not any(s.kind == "norm" for s in graph.symmetries)


def test_graphs_of_equal_configs_are_built_once():
    a, b = (MixtralConfig(**_SHAPE, intermediate_size=48, num_key_value_heads=2) for _ in range(2))
    assert rg.build_graph(a) is rg.build_graph(b)
    b.vocab_size = 65
    assert rg.build_graph(a) is not rg.build_graph(b)


def test_tracing_leaves_the_skeleton_alone(tiny):
    model = skeleton(MixtralConfig(**_SHAPE, intermediate_size=48, num_key_value_heads=2))
    trace_reads(model, ["lm_head"])
    assert all(p.is_meta for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
