"""Equalization keeps the function of the model, and half of it does not."""

import pytest
import regauge as rg
import torch
from regauge.transforms import LogEqualize, Rescale, SmoothQuant

KINDS = ["llama", "tied_llama", "mistral", "qwen2", "qwen3", "gemma", "opt", "gpt2"]


def everything(model):
    """Random scales between 1/4 and 4 along every symmetry at once."""
    generator = torch.Generator().manual_seed(2)
    return Rescale(
        scales={s.name: 4 ** (2 * torch.rand(s.width, generator=generator) - 1) for s in model.graph.symmetries}
    )


TRANSFORMS = {
    "smooth": lambda m: SmoothQuant(alpha=0.5, kinds=tuple({s.kind: 0 for s in m.graph.symmetries})),
    "log": lambda m: LogEqualize(),
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
