"""Proofs hold for symmetries and fail for what is nearly one; their file, narrow configs, and mappings of the user."""

import inspect
import json
from dataclasses import replace

import pytest
import regauge as rg
import torch
from regauge.graph import build
from regauge.graph.build import PROOFS
from regauge.graph.discovery import proof as proofs
from regauge.graph.discovery.narrow import narrowed
from regauge.graph.discovery.proof import find_instance, prove, prove_all
from regauge.graph.discovery.structure import structure_of
from regauge.graph.skeleton import example_inputs, new_model, skeleton
from regauge.graph.types import Axis, Proof
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Phi3Config,
    T5Config,
)

_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
LLAMA = LlamaConfig(**_SHAPE, num_key_value_heads=2, intermediate_size=48)
GEMMA = GemmaConfig(**_SHAPE, num_key_value_heads=2, intermediate_size=48, head_dim=8)
NORM, VALUES, UP = "model.layers.0.input_layernorm", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj"
QUERIES = "model.layers.0.self_attn.q_proj:k_proj"


@pytest.fixture(scope="module")
def instance():
    """`instance(config)`: made once."""
    made = {}

    def get(config=LLAMA):
        if id(config) not in made:
            made[id(config)] = find_instance(config, structure_of(skeleton(config)))
            assert not isinstance(made[id(config)], str), made[id(config)]
        return made[id(config)]

    return get


def named(instance, name):
    return next(s for s in instance.graph.symmetries if s.name == name)


@pytest.mark.parametrize("name", [NORM, VALUES, UP, QUERIES])
def test_a_symmetry_is_proved_by_its_derivative(instance, name):
    found = prove(instance(), named(instance(), name))
    assert found.holds
    assert found.method == "jvp"
    assert found.change < 1e-13
    assert found.control > 1e-2
    assert "jvp: the output moves by" in found.reason


def swapped(axis):
    classes = list(range(axis.size)) if axis.classes is None else list(axis.classes)
    other = next(i for i, c in enumerate(classes) if c != classes[0])
    classes[0], classes[other] = classes[other], classes[0]
    return replace(axis, classes=tuple(classes))


def first(symmetry, side, change):
    axes = getattr(symmetry, side)
    return replace(symmetry, **{side: (change(axes[0]), *axes[1:])})


WRONG = {
    "a_consumer_less": (NORM, lambda s: replace(s, consumers=s.consumers[1:])),
    "no_producer": (UP, lambda s: replace(s, producers=())),
    "a_consumer_more": (NORM, lambda s: replace(s, consumers=(*s.consumers, Axis(param="lm_head.weight", dim=1, size=32)))),
    "sides_exchanged_in_part": (NORM, lambda s: replace(s, producers=s.consumers[:1], consumers=(*s.producers, *s.consumers[1:]))),
    "two_channels_exchanged_in_a_consumer": (UP, lambda s: first(s, "consumers", swapped)),
    "two_channels_exchanged_in_a_producer": (NORM, lambda s: first(s, "producers", swapped)),
    "one_channel_left_out": (UP, lambda s: first(s, "consumers", lambda a: replace(a, classes=(-1, *range(1, a.size))))),
    "shifted_by_one": (UP, lambda s: first(first(s, "producers", lambda a: replace(a, size=47, classes=tuple(range(47)))), "consumers", lambda a: replace(a, start=1, size=47, classes=tuple(range(47))))),
    "an_offset_that_is_none": (NORM, lambda s: first(s, "producers", lambda a: replace(a, offset=1.0))),
    "heads_that_do_not_share_values": (VALUES, lambda s: replace(s, width=32, consumers=(replace(s.consumers[0], classes=None),), producers=(replace(s.producers[0], classes=tuple(range(16))),))),
    "halves_of_a_rotation_apart": (QUERIES, lambda s: replace(s, width=64, producers=tuple(replace(a, classes=tuple(range(a.size))) for a in s.producers), consumers=tuple(replace(a, classes=tuple(range(a.size))) for a in s.consumers))),
    "the_other_dim": (UP, lambda s: first(s, "consumers", lambda a: replace(a, dim=0, size=32, classes=tuple(range(32))))),
    "another_layer": (UP, lambda s: first(s, "consumers", lambda a: replace(a, param=a.param.replace(".0.", ".1.")))),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_nearly_a_symmetry_is_not_proved(instance, case):
    name, corrupt = WRONG[case]
    found = prove(instance(), corrupt(named(instance(), name)))
    assert not found.holds
    assert found.error is None
    assert found.change > 1e-4


def test_norms_around_one_are_not_norms_around_zero(instance):
    symmetry = named(instance(GEMMA), NORM)
    assert symmetry.producers[0].offset == 1.0
    assert prove(instance(GEMMA), symmetry).holds
    assert not prove(instance(GEMMA), first(symmetry, "producers", lambda a: replace(a, offset=0.0))).holds


def test_scales_that_undo_themselves_are_no_proof(instance):
    """The same numbers divided and multiplied: the function stays, and nothing is rescaled."""
    symmetry = named(instance(), UP)
    trivial = replace(symmetry, producers=(), consumers=())
    assert not prove(instance(), trivial).holds
    axis = symmetry.consumers[0]
    assert not prove(instance(), replace(symmetry, producers=(axis,), consumers=(axis,))).holds


def test_a_branch_that_changes_nothing_is_no_proof(instance):
    dead = dict(instance().params)
    dead["model.layers.0.mlp.down_proj.weight"] = torch.zeros_like(dead["model.layers.0.mlp.down_proj.weight"])
    found = prove(replace(instance(), params=dead), named(instance(), UP))
    assert found.change == found.control == 0.0
    assert not found.holds


def test_outputs_are_compared_where_there_is_no_derivative(instance, monkeypatch):
    def missing(*_):
        raise NotImplementedError("no forward derivative")

    monkeypatch.setattr(proofs, "_derivative", missing)
    for name in (NORM, VALUES, UP, QUERIES):
        found = prove(instance(), named(instance(), name))
        assert found.holds
        assert found.method == "finite"
        assert found.change < 1e-12
    name, corrupt = WRONG["a_consumer_less"]
    found = prove(instance(), corrupt(named(instance(), name)))
    assert not found.holds
    assert found.change > 1e-3
    monkeypatch.setattr(proofs, "_difference", missing)
    found = prove(instance(), named(instance(), NORM))
    assert not found.holds
    assert found.reason == "not proved: NotImplementedError: no forward derivative"


def test_a_model_without_forward_derivatives_is_proved_by_a_finite_change(instance):
    bloom = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96)
    found = instance(bloom)
    symmetry = named(found, "transformer.h.0.input_layernorm")
    assert prove(found, symmetry).method == "finite"
    assert prove(found, symmetry).holds
    assert not prove(found, replace(symmetry, producers=symmetry.producers[:1])).holds  # its bias is left


@pytest.mark.parametrize(
    ("change", "control", "error", "holds"),
    [
        (0.0, 0.1, None, True),
        (1e-11, 0.1, None, True),
        (1e-9, 0.1, None, False),
        (0.0, 0.0, None, False),
        (0.0, 1e-7, None, False),
        (0.0, 0.1, "broken", False),
        (float("nan"), 0.1, None, False),
        (0.0, float("nan"), None, False),
        (float("inf"), float("inf"), None, False),
        (0.0, float("inf"), None, False),
    ],
)
def test_a_proof_needs_an_output_that_stands_still_and_a_control_that_moves(change, control, error, holds):
    assert Proof(method="jvp", change=change, control=control, error=error).holds == holds


def test_without_an_instance_nothing_is_proved():
    graph = structure_of(skeleton(LLAMA))
    found = prove_all(graph, lambda: "too large")
    assert set(found) == {s.name for s in graph.symmetries}
    assert not any(p.holds for p in found.values())
    assert next(iter(found.values())).reason == "not proved: no instance to prove it on (too large)"


# the file of proofs


@pytest.fixture
def fresh():
    """No graph in memory, before and after."""
    build._build_graph.cache_clear()
    yield build._build_graph.cache_clear
    build._build_graph.cache_clear()


def refuse(*_):
    pytest.fail("it is proved again")


def test_proofs_are_kept_beside_the_model_and_used_again(tmp_path, fresh, monkeypatch):
    before = rg.build_graph(LLAMA, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [PROOFS]
    fresh()
    monkeypatch.setattr(build, "prove_all", refuse)
    after = rg.build_graph(LLAMA, tmp_path)
    assert after is not before
    assert (after.symmetries, dict(after.proofs)) == (before.symmetries, dict(before.proofs))


def edited(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


DAMAGE = {
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text(path.read_text()[:200]),
    "no_json_object": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "no_text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a_folder": lambda path: (path.unlink(), path.mkdir()),
    "another_key": lambda path: edited(path, lambda r: r.update(key="0" * 64)),
    "a_name_less": lambda path: edited(path, lambda r: r["proofs"].pop(NORM)),
    "a_name_more": lambda path: edited(path, lambda r: r["proofs"].update(more=r["proofs"][NORM])),
    "other_order": lambda path: edited(path, lambda r: r.update(proofs=dict(reversed(r["proofs"].items())))),
    "proofs_as_a_list": lambda path: edited(path, lambda r: r.update(proofs=list(r["proofs"]))),
    "a_proof_as_text": lambda path: edited(path, lambda r: r["proofs"].update({NORM: "it holds"})),
    "figures_as_words": lambda path: edited(path, lambda r: r["proofs"][NORM].update(change="small")),
    "figures_as_code": lambda path: edited(path, lambda r: r["proofs"][NORM].update(change="__import__('os')")),
    "figures_as_a_list": lambda path: edited(path, lambda r: r["proofs"][NORM].update(control=[1.0])),
    "a_figure_less": lambda path: edited(path, lambda r: r["proofs"][NORM].pop("control")),
    "nested_too_deep": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_damaged_or_of_another_model_is_ignored(damage, tmp_path, fresh):
    before = rg.build_graph(LLAMA, tmp_path)
    fresh()
    DAMAGE[damage](tmp_path / PROOFS)
    after = rg.build_graph(LLAMA, tmp_path)
    assert (after.symmetries, dict(after.proofs)) == (before.symmetries, dict(before.proofs))
    if damage != "a_folder":
        assert set(json.loads((tmp_path / PROOFS).read_text())["proofs"]) == set(before.proofs)


def test_proofs_of_another_config_are_not_used(tmp_path, fresh):
    rg.build_graph(LLAMA, tmp_path)
    first = json.loads((tmp_path / PROOFS).read_text())["key"]
    rg.build_graph(LlamaConfig(**_SHAPE, num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-3), tmp_path)
    assert json.loads((tmp_path / PROOFS).read_text())["key"] != first


def test_a_folder_that_cannot_be_written_only_means_that_nothing_is_kept(tmp_path, fresh, monkeypatch):
    def denied(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(build.Path, "write_text", denied)
    assert rg.build_graph(LLAMA, tmp_path).symmetries
    assert not list(tmp_path.iterdir())
    assert rg.build_graph(LLAMA, tmp_path / "missing").symmetries


# narrow configs

_WIDE = {"hidden_size": 512, "num_hidden_layers": 12, "vocab_size": 32000, "intermediate_size": 2048}
PHI_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
CONFIGS = {
    "llama": LlamaConfig(**_WIDE, num_attention_heads=8, num_key_value_heads=8),
    "gemma3": Gemma3TextConfig(**_WIDE, num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    "deepseek_v3": DeepseekV3Config(**{**_WIDE, "num_hidden_layers": 6}, moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=8, n_routed_experts=32, first_k_dense_replace=3),
    "t5": T5Config(d_model=512, num_layers=8, num_decoder_layers=8, num_heads=8, d_ff=2048, d_kv=64, vocab_size=32000),
    "phi3": Phi3Config(**_WIDE, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=PHI_ROPE, pad_token_id=31999),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_narrow_configs_build_and_run_and_the_config_itself_stays(name):
    config = CONFIGS[name]
    before = config.to_json_string(use_diff=False)
    notes = []
    for note, make in narrowed(config):
        if "full width" in note or len(notes) == 2:
            break
        notes.append(note)
        model = new_model(make())
        assert sum(p.numel() for p in model.parameters()) < 2_000_000
        with torch.no_grad():
            model(**example_inputs(model))
    assert notes[0].startswith("2 layers")
    assert config.to_json_string(use_diff=False) == before


def test_layers_that_differ_are_found_at_the_smallest_depth_that_has_them_all():
    gemma = CONFIGS["gemma3"]
    assert {"full_attention", "sliding_attention"} == set(gemma.layer_types)
    depths = [len(make().layer_types) for note, make in narrowed(gemma) if "narrow" in note]
    assert depths == [2, 3, 4, 6, 8, 12]
    deepseek = CONFIGS["deepseek_v3"]
    instance = find_instance(deepseek, structure_of(skeleton(deepseek)))
    assert instance.note.startswith("4 layers")  # three dense layers, and one of experts


@pytest.mark.parametrize(
    ("heads", "groups", "kept"), [(8, 8, 4), (8, 4, 2), (8, 1, 1), (32, 2, 2), (2, 1, 1), (3, 3, 3)]
)
def test_groups_of_heads_stay_what_they_are(heads, groups, kept):
    config = LlamaConfig(
        hidden_size=16 * heads, num_hidden_layers=4, num_attention_heads=heads, num_key_value_heads=groups
    )
    small = next(make for _, make in narrowed(config))()
    assert small.num_key_value_heads == kept
    assert small.num_attention_heads % kept == 0
    assert (small.num_key_value_heads == small.num_attention_heads) == (groups == heads)


# mappings of the user on a model that cannot be traced


@pytest.fixture
def untraceable(fresh, monkeypatch):
    """A Llama whose forward asks for a number, which a trace cannot know."""
    cls = type(skeleton(LLAMA))
    forward = cls.forward

    def depends(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if out.logits.sum() > 1e30:
            out.logits = -out.logits
        return out

    depends.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(cls, "forward", depends)
    return rg.build_graph(LLAMA)


@pytest.mark.parametrize(
    ("linears", "producer"),
    [
        (["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"),
        (["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"),
        (["re:.*down_proj"], "re:.*up_proj"),
    ],
)
def test_right_mappings_on_an_untraceable_model_are_proved_on_real_tensors(untraceable, linears, producer):
    assert "_local_scalar_dense" in untraceable.untraced
    assert not untraceable.symmetries
    params = {n: torch.empty(s, device="meta") for n, s in untraceable.shapes.items()}
    plan = rg.plan(rg.transforms.SmoothQuant(mappings=[[linears, producer]]), params, untraceable)
    assert plan.needs


@pytest.mark.parametrize(
    ("linears", "producer"),
    [
        (["re:.*q_proj", "re:.*k_proj"], "re:.*input_layernorm"),
        (["re:.*up_proj"], "re:.*post_attention_layernorm"),
        (["re:.*down_proj"], "re:.*gate_proj"),
        (["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*post_attention_layernorm"),
    ],
)
def test_wrong_mappings_on_an_untraceable_model_are_refused(untraceable, linears, producer):
    params = {n: torch.empty(s, device="meta") for n, s in untraceable.shapes.items()}
    with pytest.raises(rg.PlanError, match="the function changes"):
        rg.plan(rg.transforms.SmoothQuant(mappings=[[linears, producer]]), params, untraceable)
