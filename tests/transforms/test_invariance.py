"""Equalization keeps the function of the model, and half of it does not."""

from dataclasses import replace

import pytest
import regauge as rg
import torch
from regauge.transforms import CrossLayerEqualize, LogEqualize, Rescale, SmoothQuant

KINDS = ["llama", "tied_llama", "biased_llama", "mistral", "qwen2", "qwen3", "gemma", "opt", "gpt2"]


def everything(model):
    """Random scales between 1/4 and 4 along every symmetry at once."""
    generator = torch.Generator().manual_seed(2)
    return Rescale(
        scales={s.name: 4 ** (2 * torch.rand(s.width, generator=generator) - 1) for s in model.graph.symmetries}
    )


TRANSFORMS = {
    "smooth": lambda m: SmoothQuant(alpha=0.5, kinds=m.observed_kinds),
    "smooth_range": lambda m: SmoothQuant(alpha=0.7, statistic="range"),
    "log": lambda m: LogEqualize(kinds=m.observed_kinds),
    "cross_layer": lambda m: CrossLayerEqualize(kinds=m.linear_kinds),
    "random": everything,
}


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_is_preserved_and_half_a_fold_is_not(tiny, kind, name):
    model = tiny(kind)
    plan = rg.plan(TRANSFORMS[name](model), model.params, model.graph)
    out = rg.apply(plan, model.params, model.stats)
    reference = model.logits()
    assert relative(model.logits(out), reference) < 1e-5
    producers = {axis.param for s in model.graph.symmetries for axis in s.producers}
    half = {n: model.params[n] if n in producers else p for n, p in out.items()}
    assert relative(model.logits(half), reference) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_each_symmetry_alone_is_one(tiny, kind):
    model, scales = tiny(kind), everything(tiny(kind)).scales
    reference = model.logits()
    for symmetry in model.graph.symmetries:
        one = Rescale(scales={symmetry.name: scales[symmetry.name]})
        out = rg.apply(rg.plan(one, model.params, model.graph), model.params)
        assert relative(model.logits(out), reference) < 1e-5, symmetry.name
        for missing in ("producers", "consumers"):
            graph = replace(model.graph, symmetries=(replace(symmetry, **{missing: ()}),))
            half = rg.apply(rg.plan(one, model.params, graph), model.params)
            assert relative(model.logits(half), reference) > 1e-4, symmetry.name


def powers_of_two(model, highest=2, leave_out=()):
    generator = torch.Generator().manual_seed(3)
    chosen = [s for s in model.graph.symmetries if s.kind not in leave_out]
    return Rescale(
        scales={s.name: 2.0 ** torch.randint(-2, highest + 1, (s.width,), generator=generator) for s in chosen}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma"])  # 1 + w rounds
def test_powers_of_two_change_no_bit_of_the_logits(tiny, kind, dtype):
    model = tiny(kind, dtype)
    params, highest, left = model.params, 2, ()
    if dtype == torch.float16:
        # its smallest numbers have a fixed step: weights on a coarser grid survive being scaled down, activations are
        # only scaled up, and keys, which would be scaled down, are left out
        params = {name: ((p.double() * 2**20).round() / 2**20).half() for name, p in params.items()}
        highest, left = 0, ("q_k",)
    out = rg.apply(rg.plan(powers_of_two(model, highest, left), params, model.graph), params)
    kept = [s for s in model.graph.symmetries if s.kind not in left]
    touched = {axis.param for s in kept for axis in (*s.producers, *s.consumers)}
    assert all(torch.equal(out[name], p) != (name in touched) for name, p in params.items())
    assert torch.equal(model.logits(out), model.logits(params))


@pytest.mark.parametrize("kind", ["opt", "gpt2"])  # the norms of the others compute in float32
def test_float64_models_keep_their_function(tiny, kind):
    """Folds compute in float32, so the weights here are float32 numbers held in float64."""
    model = tiny(kind, torch.float64)
    params = {name: p.float().double() for name, p in model.params.items()}
    reference = model.logits(params)
    assert reference.dtype == torch.float64
    out = rg.apply(rg.plan(powers_of_two(model), params, model.graph), params)
    assert relative(model.logits(out), reference) < 1e-13
    consumers = {axis.param for s in model.graph.symmetries for axis in s.consumers}
    half = {n: params[n] if n in consumers else p for n, p in out.items()}
    assert relative(model.logits(half), reference) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_after_a_fold_are_those_of_the_folded_model(tiny, kind):
    model = tiny(kind)
    plan = rg.plan(everything(model), model.params, model.graph)
    out = rg.apply(plan, model.params)
    keys = list(model.stats)
    predicted = rg.execute(plan, rg.Memory(model.params), rg.Memory(), {})
    assert predicted == {}  # none was needed, so none was carried
    chained = rg.plan(
        rg.chain(everything(model), SmoothQuant(statistic="range"), SmoothQuant()), model.params, model.graph
    )
    half = rg.plan(rg.chain(everything(model), SmoothQuant(statistic="range")), model.params, model.graph)
    middle = rg.apply(half, model.params, model.stats)
    fresh = remeasure(model, middle, keys)
    first = rg.plan(SmoothQuant(), middle, model.graph)
    expected = rg.apply(first, middle, fresh)
    got = rg.apply(chained, model.params, model.stats)
    assert out.keys() == got.keys()
    for name in got:
        assert torch.allclose(got[name], expected[name], rtol=1e-3, atol=1e-5), name


def remeasure(model, params, keys):
    """Statistics of the model with other parameters, put in place and taken out again."""
    own = dict(model.model.named_parameters())
    kept = {n: p.detach().clone() for n, p in own.items()}
    batch = rg.Batch(
        input_ids=torch.arange(2, 26).reshape(2, 12), attention_mask=torch.ones(2, 12), index=torch.arange(2)
    )
    try:
        with torch.no_grad():
            for n, p in params.items():
                own[n].copy_(p)
        return rg.observe(model.model, [batch], keys, model.graph)
    finally:
        with torch.no_grad():
            for n, p in kept.items():
                own[n].copy_(p)
