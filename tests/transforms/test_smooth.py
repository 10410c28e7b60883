"""Scales of equalization: by hand, at the edges, and differentiated."""

import pytest
import regauge as rg
import torch
from regauge.graph import Axis
from regauge.transforms import (
    LogEqualize,
    Quantize,
    Rescale,
    SmoothQuant,
    guard_scale,
    log_scale,
    scale_axis,
    smooth_scale,
)


def fold(tiny, transform, **stats):
    model = tiny()
    plan = rg.plan(transform, model.params, model.graph)
    return rg.apply(plan, model.params, {**model.stats, **stats})


def test_formulas_by_hand():
    a, w = torch.tensor([4.0, 16.0]), torch.tensor([1.0, 4.0])
    assert smooth_scale(a, w, 0.5).tolist() == [2.0, 2.0]
    assert smooth_scale(a, w, 1.0).tolist() == [4.0, 16.0]
    assert torch.allclose(smooth_scale(a, w, 0.0), 1 / w)
    assert log_scale(torch.tensor([2.0, 14.0])).tolist() == [1.0, 3.5]


@pytest.mark.parametrize("statistic", ["absmax", "range"])
def test_a_norm_and_all_its_readers_take_the_same_scale(tiny, statistic):
    model = tiny()
    block = "model.layers.0"
    readers = [f"{block}.self_attn.{x}_proj.weight" for x in "qkv"]
    site = f"{block}.self_attn.q_proj"
    if statistic == "absmax":
        act, factor = model.stats[f"absmax:{site}"], 1.0
    else:
        low, high = model.stats[f"range:{site}"]
        act, factor = high - low, 2.0
    weight = torch.stack([model.params[name].abs().amax(0) for name in readers]).amax(0) * factor
    s = act**0.7 / weight**0.3
    out = fold(tiny, SmoothQuant(alpha=0.7, statistic=statistic))
    norm = f"{block}.input_layernorm.weight"
    assert torch.allclose(out[norm], model.params[norm] / s, rtol=1e-6)
    for name in readers:
        assert torch.allclose(out[name], model.params[name] * s, rtol=1e-6)


def test_a_value_channel_takes_the_largest_peak_of_the_heads_that_read_it(tiny):
    """Four query heads of eight channels read two value heads: heads 0 and 1 the first, 2 and 3 the second."""
    model = tiny()
    attention = "model.layers.1.self_attn"
    act = model.stats[f"absmax:{attention}.o_proj"].reshape(2, 2, 8).amax(1).reshape(16)
    weight = model.params[f"{attention}.o_proj.weight"].abs().amax(0).reshape(2, 2, 8).amax(1).reshape(16)
    s = (act / weight).sqrt()
    out = fold(tiny, SmoothQuant(kinds=("v_o",)))
    value, output = f"{attention}.v_proj.weight", f"{attention}.o_proj.weight"
    assert torch.allclose(out[value], model.params[value] / s[:, None], rtol=1e-6)
    spread = s.reshape(2, 1, 8).expand(2, 2, 8).reshape(32)
    assert torch.allclose(out[output], model.params[output] * spread, rtol=1e-6)


def test_biases_of_producers_are_scaled_and_those_of_consumers_are_not(tiny):
    model = tiny("opt")
    block = "model.decoder.layers.0"
    s = {"self_attn_layer_norm": 32, "self_attn.v_proj": 32, "fc1": 48}
    s = {f"{block}.{name}": torch.arange(1.0, n + 1) for name, n in s.items()}
    out = rg.apply(rg.plan(Rescale(scales=s), model.params, model.graph), model.params)
    for producer, scale in s.items():
        name = f"{producer}.bias"
        expected = model.params[name] / scale
        assert torch.equal(out[name], expected)
    for name in (f"{block}.fc2.bias", f"{block}.self_attn.out_proj.bias", f"{block}.self_attn.q_proj.bias"):
        assert out[name] is model.params[name]


def test_fused_queries_keys_and_values_are_scaled_in_their_last_third(tiny):
    model = tiny("gpt2")
    name = "transformer.h.0.attn.c_attn"
    s = torch.arange(1.0, 33.0)
    out = rg.apply(rg.plan(Rescale(scales={name: s}), model.params, model.graph), model.params)
    for part in ("weight", "bias"):
        before, after = model.params[f"{name}.{part}"], out[f"{name}.{part}"]
        assert torch.equal(after[..., :64], before[..., :64])
        assert torch.equal(after[..., 64:], before[..., 64:] / s)


@pytest.mark.parametrize("statistic", ["absmax", "range"])
def test_log_equalization_takes_no_weight_into_account(tiny, statistic):
    model = tiny()
    site = "model.layers.0.mlp.gate_proj"
    act = model.stats[f"{statistic}:{site}"]
    act = act[1] - act[0] if statistic == "range" else act
    s = act / torch.log2(2 + act)
    out = fold(tiny, LogEqualize(statistic=statistic))
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert torch.allclose(out[norm], model.params[norm] / s, rtol=1e-6)
    assert torch.allclose(out[f"{site}.weight"], model.params[f"{site}.weight"] * s, rtol=1e-6)


def test_dead_constant_and_broken_channels_are_left_alone():
    act = torch.tensor([0.0, 1e-9, float("nan"), float("inf"), 4.0, 4.0])
    s = torch.tensor([3.0, 3.0, float("nan"), 3.0, float("inf"), 2.0])
    assert guard_scale(s, act, 1e-6, (1e-4, 1e4)).tolist() == [1, 1, 1, 1, 1, 2]


def test_scales_are_clamped_on_both_sides():
    act = torch.ones(3)
    assert guard_scale(torch.tensor([1e-9, 1.0, 1e9]), act, 0.0, (0.5, 4.0)).tolist() == [0.5, 1.0, 4.0]


def test_bounds_and_floor_of_the_transform_are_used(tiny):
    model = tiny()
    name, norm = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm.weight"
    peaks = torch.full((32,), 1.0)
    peaks[:3] = torch.tensor([1e-5, 1e5, 1e-2])
    out = fold(tiny, LogEqualize(floor=0.5, bounds=(0.9, 3.0)), **{f"absmax:{name}": peaks})
    s = model.params[norm] / out[norm]
    assert torch.allclose(s[:3], torch.tensor([1.0, 3.0, 1.0]))
    assert torch.allclose(s[3:], torch.tensor(0.9))  # 1 / log2(3) is less


@pytest.mark.parametrize("peak", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("transform", [SmoothQuant(), LogEqualize()], ids=lambda t: type(t).__name__)
def test_channels_that_see_nothing_keep_their_weights(tiny, transform, peak):
    model = tiny()
    key = "absmax:model.layers.0.self_attn.q_proj"
    silent = model.stats[key].clone()
    silent[3] = peak
    out = fold(tiny, transform, **{key: silent})
    norm = "model.layers.0.input_layernorm.weight"
    assert out[norm][3] == model.params[norm][3]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(out[name][:, 3], model.params[name][:, 3])
    assert not torch.equal(out[name][:, 4], model.params[name][:, 4])


def test_a_constant_channel_is_dead_under_range_only(tiny):
    model = tiny()
    site = "model.layers.0.self_attn.q_proj"
    constant = model.stats[f"range:{site}"].clone()
    constant[:, 3] = 5.0
    out = fold(tiny, SmoothQuant(statistic="range"), **{f"range:{site}": constant})
    assert torch.equal(out[f"{site}.weight"][:, 3], model.params[f"{site}.weight"][:, 3])


def test_query_heads_of_one_group_share_a_scale(tiny):
    model = tiny()
    symmetry = next(s for s in model.graph.symmetries if s.kind == "v_o")
    assert symmetry.width == 16
    out = rg.apply(
        rg.plan(Rescale(scales={symmetry.name: torch.arange(1.0, 17.0)}), model.params, model.graph), model.params
    )
    ratio = out[symmetry.consumers[0].param] / model.params[symmetry.consumers[0].param]
    heads = ratio[0].reshape(4, 8).round(decimals=4)
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[2], heads[3])
    assert heads[2].tolist() == list(range(9, 17))


def test_an_offset_norm_is_scaled_around_its_offset():
    w, s = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0])
    out = scale_axis(w, Axis(param="w", dim=0, size=2, offset=1.0), s, inverse=True)
    assert out.tolist() == [-0.5, -0.5]  # (1 + w) / s - 1


def test_gemmas_norms_are_scaled_as_they_are_used(tiny):
    model = tiny("gemma")
    norm = "model.layers.0.input_layernorm"
    s = torch.linspace(0.5, 2.0, 32)
    out = rg.apply(rg.plan(Rescale(scales={norm: s}), model.params, model.graph), model.params)
    assert torch.allclose(1 + out[f"{norm}.weight"], (1 + model.params[f"{norm}.weight"]) / s, rtol=1e-6)


def test_a_run_of_channels_leaves_its_neighbours():
    w = torch.ones(6, 2)
    out = scale_axis(w, Axis(param="w", dim=0, size=2, start=3), torch.tensor([2.0, 3.0]))
    assert out[:, 0].tolist() == [1, 1, 1, 2, 3, 1]


def test_after_log_equalization_peaks_are_logarithmic(tiny):
    model = tiny()
    plan = rg.plan(LogEqualize(), model.params, model.graph)
    final = rg.execute(plan, rg.Memory(model.params), rg.Memory(), model.stats)
    for key in plan.needs:
        assert torch.allclose(final[key], torch.log2(2 + model.stats[key]), rtol=1e-5)


def imbalance(tiny, alpha):
    """A smooth function of alpha: the spread of a folded weight."""
    out = fold(tiny, SmoothQuant(alpha=alpha))
    return out["model.layers.0.mlp.up_proj.weight"].square().sum()


def test_alpha_can_be_differentiated_and_batched(tiny):
    alpha = torch.tensor(0.4)
    slope = torch.func.grad(lambda a: imbalance(tiny, a))(alpha)
    numeric = (imbalance(tiny, 0.41) - imbalance(tiny, 0.39)) / 0.02
    assert slope.item() == pytest.approx(numeric.item(), rel=1e-2)
    alphas = torch.tensor([0.2, 0.5, 0.9])
    batched = torch.func.vmap(lambda a: imbalance(tiny, a))(alphas)
    assert torch.allclose(batched, torch.stack([imbalance(tiny, a) for a in alphas]), rtol=1e-6)


def rounding_error(tiny, alpha):
    """A loss through a whole chain: the squared error of a rounded weight on its activation's peaks."""
    model = tiny()
    quantize = Quantize(scheme="W4A16", group_size=16, ignore=("lm_head",), form="fake")
    plan = rg.plan(rg.chain(SmoothQuant(alpha=alpha), quantize), model.params, model.graph)
    out = rg.apply(plan, model.params, model.stats)
    name, norm = "model.layers.0.mlp.up_proj.weight", "model.layers.0.post_attention_layernorm.weight"
    back = out[name] * (out[norm] / model.params[norm])
    return ((back - model.params[name]) * model.stats["absmax:model.layers.0.mlp.gate_proj"]).square().sum()


def test_alpha_is_differentiated_and_batched_through_the_rounding(tiny):
    alphas = torch.tensor([0.2, 0.5, 0.9])
    batched = torch.func.vmap(lambda a: rounding_error(tiny, a))(alphas)
    assert torch.allclose(batched, torch.stack([rounding_error(tiny, a) for a in alphas]), rtol=1e-5)
    slopes = torch.func.vmap(torch.func.grad(lambda a: rounding_error(tiny, a)))(alphas)
    loop = torch.stack([torch.func.grad(lambda a: rounding_error(tiny, a))(a) for a in alphas])
    assert bool((loop != 0).all())
    assert torch.allclose(slopes, loop, rtol=1e-3)


def test_given_scales_can_be_differentiated(tiny):
    model = tiny()
    name, norm = "model.layers.0.mlp.up_proj.weight", "model.layers.0.post_attention_layernorm"

    def total(s):
        plan = rg.plan(Rescale(scales={norm: s}), model.params, model.graph)
        return rg.apply(plan, model.params)[name].sum()

    gradient = torch.func.grad(total)(torch.ones(32))
    assert torch.allclose(gradient, model.params[name].sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.2}, "alpha"),
        ({"alpha": "0.5"}, "alpha"),
        ({"alpha": torch.ones(2)}, "0-dim"),
        ({"statistic": "mean"}, "statistic"),
        ({"kinds": ()}, "kinds"),
        ({"kinds": ("qk",)}, "kinds"),
        ({"kinds": "norm"}, "kinds: expected a list"),
        ({"alpha": True}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"bounds": (2.0, 4.0)}, "bounds"),
        ({"bounds": (0.1,)}, "bounds"),
        ({"floor": -1.0}, "floor"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SmoothQuant(**settings)
