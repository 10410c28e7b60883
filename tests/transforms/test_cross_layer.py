"""Cross-layer equalization: both sides of a symmetry end with the same range, channel by channel."""

import pytest
import regauge as rg
import torch
from architectures import ARCHITECTURES
from regauge.graph.skeleton import new_model
from regauge.transforms import CrossLayerEqualize, Quantize, cross_layer_scale
from regauge.transforms._smooth import axis_absmax

KINDS = ("v_o", "up_down", "q_k")


def weights(name):
    torch.manual_seed(0)
    model = new_model(ARCHITECTURES[name].config).float()
    return {key: torch.randn_like(p) for key, p in model.named_parameters()}, rg.build_graph(ARCHITECTURES[name].config)


def test_the_scale_is_the_root_of_the_ratio_of_ranges():
    s = cross_layer_scale(torch.tensor([8.0, 1.0]), torch.tensor([2.0, 4.0]))
    assert s.tolist() == [2.0, 0.5]


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "phi3", "gpt2", "bloom", "opt", "mixtral", "llama4", "deepseek_v3"]
)
def test_both_sides_have_one_range_afterwards(name):
    params, graph = weights(name)
    kinds = tuple({s.kind: 0 for s in graph.symmetries if s.kind in KINDS})
    plan = rg.plan(CrossLayerEqualize(kinds=kinds), params, graph)
    assert plan.needs == ()
    out = rg.apply(plan, params)
    for symmetry in (s for s in graph.symmetries if s.kind in KINDS):
        ranges = []
        for axes in (symmetry.producers, symmetry.consumers):
            rank = max(out[a.param].ndim for a in axes)
            peaks = [axis_absmax(out[a.param], a, symmetry.width) for a in axes if out[a.param].ndim == rank]
            ranges.append(torch.stack(peaks).amax(0))
        assert torch.allclose(*ranges, rtol=1e-5), symmetry.name
        before = axis_absmax(params[symmetry.producers[0].param], symmetry.producers[0], symmetry.width)
        assert not torch.allclose(ranges[0], before, rtol=1e-2)


def test_a_second_pass_changes_nothing():
    params, graph = weights("llama")
    once = rg.apply(rg.plan(CrossLayerEqualize(kinds=KINDS), params, graph), params)
    twice = rg.apply(rg.plan(CrossLayerEqualize(kinds=KINDS), once, graph), once)
    assert all(torch.allclose(twice[name], p, rtol=1e-5) for name, p in once.items())


def test_biases_of_rows_are_scaled_with_them():
    params, graph = weights("llama, biases")
    out = rg.apply(rg.plan(CrossLayerEqualize(), params, graph), params)
    name = "model.layers.0.mlp.up_proj"
    ratio = out[f"{name}.weight"][:, 0] / params[f"{name}.weight"][:, 0]
    assert torch.allclose(out[f"{name}.bias"], params[f"{name}.bias"] * ratio, rtol=1e-5)
    assert torch.equal(out["model.layers.0.mlp.down_proj.bias"], params["model.layers.0.mlp.down_proj.bias"])


@pytest.mark.parametrize("side", ["up_proj", "down_proj"])
def test_channels_that_are_zero_on_one_side_stay(side):
    params, graph = weights("llama")
    name = f"model.layers.0.mlp.{side}.weight"
    dead = params[name].clone()
    (dead if side == "up_proj" else dead.T)[5] = 0
    params[name] = dead
    out = rg.apply(rg.plan(CrossLayerEqualize(), params, graph), params)
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(out[up][5], params[up][5])
    assert torch.equal(out[down][:, 5], params[down][:, 5])
    assert all(bool(torch.isfinite(p).all()) for p in out.values())


def test_scales_stay_within_their_bounds():
    params, graph = weights("llama")
    out = rg.apply(rg.plan(CrossLayerEqualize(bounds=(1.0, 1.0)), params, graph), params)
    assert all(torch.equal(out[name], p) for name, p in params.items())


def test_weights_with_unlike_channels_round_better_per_tensor():
    """The case of the paper: one scale for a whole weight whose channels differ."""
    params, graph = weights("llama")
    up = "model.layers.0.mlp.up_proj.weight"
    params[up] = params[up] * torch.logspace(-2, 2, 48)[:, None]
    tensor = {"weights": {"num_bits": 8, "strategy": "tensor"}}

    def error(*before):
        transform = rg.chain(*before, Quantize(scheme=tensor, targets=("re:.*up_proj",), form="fake"))
        rounded = rg.apply(rg.plan(transform, params, graph), params)
        equal = rg.apply(rg.plan(rg.chain(*before), params, graph), params) if before else params
        return ((rounded[up] - equal[up]).norm(dim=1) / equal[up].norm(dim=1)).mean()

    assert error(CrossLayerEqualize()) < error() / 3  # the spread of four decades is halved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("norm",)}, "kinds: expected some of v_o, up_down, q_k"),
        ({"kinds": "v_o"}, "kinds: expected a list"),
        ({"kinds": ()}, "kinds: expected some of"),
        ({"bounds": (2.0, 3.0)}, "bounds: expected"),
    ],
)
def test_faults_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CrossLayerEqualize(**settings)


def test_the_usual_kinds_are_those_that_a_model_has_and_named_ones_must_be_there():
    params, graph = weights("gpt2")  # no up_down
    assert {s.name.split("[")[0] for s in rg.plan(CrossLayerEqualize(), params, graph).steps} == {"cross_layer"}
    with pytest.raises(rg.PlanError, match="no symmetry of kind 'up_down'"):
        rg.plan(CrossLayerEqualize(kinds=("up_down",)), params, graph)
