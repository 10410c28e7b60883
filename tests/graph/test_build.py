"""Graphs of tiny models, against groups written down from reading the models' code."""

import pytest
import regauge as rg
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
)

_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {
    ("norm", "input_layernorm"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("norm", "post_attention_layernorm"): ("mlp.gate_proj", "mlp.up_proj"),
    ("q_k", "self_attn.q_proj:k_proj"): ("self_attn.k_proj",),
    ("v_o", "self_attn.v_proj"): ("self_attn.o_proj",),
    ("up_down", "mlp.up_proj"): ("mlp.down_proj",),
}
QWEN3 = {name: linears for name, linears in LLAMA.items() if name[0] != "q_k"}
QWEN3["q_k", "self_attn.q_norm:k_norm"] = ()  # it normalises queries and keys
EXPECTED = {
    "llama": ("model.layers", LLAMA),
    "tied_llama": ("model.layers", LLAMA),
    "biased_llama": ("model.layers", LLAMA),
    "mistral": ("model.layers", LLAMA),
    "qwen2": ("model.layers", LLAMA),
    "qwen3": ("model.layers", QWEN3),
    "gemma": ("model.layers", LLAMA),
    "opt": (
        "model.decoder.layers",
        {
            ("norm", "self_attn_layer_norm"): ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
            ("norm", "final_layer_norm"): ("fc1",),
            ("q_k", "self_attn.q_proj:k_proj"): ("self_attn.k_proj",),
            ("v_o", "self_attn.v_proj"): ("self_attn.out_proj",),
            ("up_down", "fc1"): ("fc2",),
        },
    ),
    "gpt2": (
        "transformer.h",
        {
            ("norm", "ln_1"): ("attn.c_attn",),
            ("norm", "ln_2"): ("mlp.c_fc",),
            ("q_k", "attn.c_attn:c_attn"): ("attn.c_attn",),
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
    if "lm_head.weight" not in graph.ties:
        expected["head", "model.norm"] = {"lm_head"}
    assert {(s.kind, s.name): set(s.linears) for s in graph.symmetries} == expected


def axes(graph, name):
    """Producers and consumers of a symmetry: parameter, dim, first channel, channels, offset."""
    symmetry = next(s for s in graph.symmetries if s.name == name)
    return [
        [(a.param.removeprefix(name.rsplit(".", 2)[0] + "."), a.dim, a.start, a.size, a.offset) for a in part]
        for part in (symmetry.producers, symmetry.consumers)
    ]


@pytest.mark.parametrize(
    ("kind", "name", "producers", "consumers"),
    [
        (
            "qwen2",
            "model.layers.0.self_attn.v_proj",
            [("self_attn.v_proj.weight", 0, 0, 16, 0.0), ("self_attn.v_proj.bias", 0, 0, 16, 0.0)],
            [("self_attn.o_proj.weight", 1, 0, 32, 0.0)],
        ),
        (
            "biased_llama",
            "model.layers.0.mlp.up_proj",
            [("mlp.up_proj.weight", 0, 0, 48, 0.0), ("mlp.up_proj.bias", 0, 0, 48, 0.0)],
            [("mlp.down_proj.weight", 1, 0, 48, 0.0)],
        ),
        (
            "gpt2",
            "transformer.h.0.attn.c_attn",
            [("attn.c_attn.weight", 1, 64, 32, 0.0), ("attn.c_attn.bias", 0, 64, 32, 0.0)],
            [("attn.c_proj.weight", 0, 0, 32, 0.0)],
        ),
    ],
)
def test_axes_are_those_of_the_code(tiny, kind, name, producers, consumers):
    assert axes(tiny(kind).graph, name) == [producers, consumers]


@pytest.mark.parametrize(
    ("kind", "norm", "producers"),
    [
        ("llama", "model.layers.0.input_layernorm", {"weight": 0.0}),
        ("gemma", "model.layers.0.input_layernorm", {"weight": 1.0}),
        ("opt", "model.decoder.layers.0.final_layer_norm", {"weight": 0.0, "bias": 0.0}),
        ("gpt2", "transformer.h.0.ln_1", {"weight": 0.0, "bias": 0.0}),
    ],
)
def test_norms_scale_with_their_biases_and_around_their_offsets(tiny, kind, norm, producers):
    symmetry = next(s for s in tiny(kind).graph.symmetries if s.name == norm)
    assert {a.param: a.offset for a in symmetry.producers} == {f"{norm}.{k}": v for k, v in producers.items()}
    assert {(a.dim, a.size) for a in symmetry.consumers} == {(0 if kind == "gpt2" else 1, 32)}


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [
        (4, 4, None),
        (4, 2, [*range(8), *range(8), *range(8, 16), *range(8, 16)]),
        (4, 1, [*range(8)] * 4),
    ],
)
def test_heads_of_one_group_are_of_one_class(heads, groups, expected):
    graph = rg.build_graph(
        LlamaConfig(**{**_SHAPE, "num_attention_heads": heads}, intermediate_size=48, num_key_value_heads=groups)
    )
    symmetry = next(s for s in graph.symmetries if s.kind == "v_o")
    classes = None if expected is None else tuple(expected)
    assert symmetry.width == 8 * groups
    assert symmetry.consumers[0].classes == symmetry.site_classes == classes


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, {"norm", "v_o", "up_down", "q_k"}),
        ({"activation_function": "gelu"}, {"norm", "v_o", "q_k"}),
        ({"do_layer_norm_before": False}, {"v_o", "up_down", "q_k"}),
        ({"tie_word_embeddings": False}, {"norm", "v_o", "up_down", "q_k", "head"}),
        # an embedding of another width is projected, and that is linear in it
        ({"word_embed_proj_dim": 16, "tie_word_embeddings": False}, {"norm", "v_o", "up_down", "q_k", "embed", "head"}),
    ],
)
def test_opt_has_the_symmetries_that_its_settings_leave(change, kinds):
    graph = rg.build_graph(OPTConfig(**{**_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, **change}))
    assert {s.kind for s in graph.symmetries} == kinds


def test_linears_are_described(tiny):
    opt, gpt2 = tiny("opt").graph, tiny("gpt2").graph
    assert {name: x.cls for name, x in opt.linears.items() if "embed" in name or "head" in name} == {
        "model.decoder.embed_tokens": "Embedding",
        "model.decoder.embed_positions": "OPTLearnedPositionalEmbedding",
        "lm_head": "Linear",
    }
    fused = gpt2.linears["transformer.h.1.attn.c_attn"]
    assert (fused.cls, fused.shape, fused.transposed, fused.block) == ("Conv1D", (32, 96), True, 1)
    assert fused.bias == "transformer.h.1.attn.c_attn.bias"
    assert gpt2.sites[fused.site].width == 32
    assert opt.linears["lm_head"].bias is None
    assert opt.linears["lm_head"].block is None
    assert tiny("gemma").graph.linears["model.embed_tokens"].cls == "Embedding"  # a class of its own


@pytest.mark.parametrize("kind", EXPECTED)
def test_shapes_are_those_of_the_stored_parameters(tiny, kind):
    model = tiny(kind)
    assert model.graph.shapes == {name: tuple(p.shape) for name, p in model.params.items()}
    assert {name: type(m).__name__ for name, m in model.model.named_modules() if name} == model.graph.modules


def test_a_part_keeps_whole_sites_and_the_symmetries_that_it_touches(tiny):
    graph = tiny().graph
    part = graph.restrict(lambda linear: linear.name == "model.layers.0.self_attn.q_proj")
    assert set(part.linears) == {"model.layers.0.self_attn.q_proj"}
    assert part.sites == graph.sites
    assert [s.name for s in part.symmetries] == ["model.layers.0.input_layernorm"]


def test_blocks_are_told_by_whole_names(tiny):
    graph = rg.Graph(linears={}, sites={}, blocks=("layers.1", "layers.10"))
    names = ("layers.1", "layers.1.mlp", "layers.10.mlp", "layers.2", "embed")
    assert [graph.block_of(name) for name in names] == [0, 0, 1, None, None]


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


def test_a_norm_that_is_not_in_front_of_the_linears_cannot_be_mapped():
    """OLMo 2 normalises what a sublayer returns, under names that look like Llama's."""
    graph = rg.build_graph(Olmo2Config(**_SHAPE, intermediate_size=48))
    params = {n: torch.empty(s, device="meta") for n, s in graph.shapes.items()}
    mapping = [[["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]]
    with pytest.raises(rg.PlanError, match="the function changes"):
        rg.plan(rg.transforms.SmoothQuant(mappings=mapping), params, graph)


BLOOM = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96)
BLOOM_RESIDUAL = BloomConfig(
    hidden_size=32, n_layer=2, n_head=4, vocab_size=96, apply_residual_connection_post_layernorm=True
)
_MOE = {
    **_SHAPE,
    "vocab_size": 96,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
}
GLM_MOE = Glm4MoeConfig(**_MOE, num_key_value_heads=2, head_dim=8)
DEEPSEEK = DeepseekV3Config(
    **_MOE,
    num_key_value_heads=4,
    n_group=2,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
FUSED = [["re:.*query_key_value"], "re:.*input_layernorm"]
GATED = [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]


@pytest.mark.parametrize(
    ("config", "mapping", "whole"),
    [
        (BLOOM, FUSED, True),
        (BLOOM_RESIDUAL, FUSED, False),  # the residual takes the norm's output
        (DEEPSEEK, GATED, False),  # the router and the fused experts read it beside the shared expert
        (GLM_MOE, GATED, False),
    ],
    ids=["bloom", "bloom_residual", "deepseek_v3", "glm4_moe"],
)
def test_mappings_of_the_user_keep_the_function_or_are_refused(config, mapping, whole):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    params = {name: p.detach() * (5 if p.ndim > 1 else 1) for name, p in model.named_parameters()}
    tokens = {"input_ids": torch.arange(2, 26).reshape(2, 12), "use_cache": False}
    smooth = rg.transforms.SmoothQuant(mappings=[mapping])
    if not whole:
        with pytest.raises(rg.PlanError, match="layernorm"):
            rg.plan(smooth, params, rg.build_graph(config))
        return
    plan = rg.plan(smooth, params, rg.build_graph(config))
    out = rg.apply(plan, params, {key: torch.linspace(0.1, 10, 32) for key in plan.needs})
    with torch.no_grad():
        before, after = (torch.func.functional_call(model, p, kwargs=tokens).logits for p in (params, out))
    assert not torch.equal(out["transformer.h.0.input_layernorm.weight"], params["transformer.h.0.input_layernorm.weight"])  # fmt: skip
    assert ((after - before).norm() / before.norm()).item() < 1e-5


def test_graphs_of_equal_configs_are_built_once():
    a, b = (MixtralConfig(**_SHAPE, intermediate_size=48, num_key_value_heads=2) for _ in range(2))
    assert rg.build_graph(a) is rg.build_graph(b)
    b.vocab_size = 65
    assert rg.build_graph(a) is not rg.build_graph(b)
