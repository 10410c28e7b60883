"""Observation against plain hooks on the whole model."""

import pytest
import regauge as rg
import torch
from regauge import LayoutError, PlanError
from regauge.jobs.data import batches

SEQUENCES = [list(range(5, 5 + n)) for n in (9, 3, 7, 9, 1)]
KINDS = ("absmax", "range", "meanabs", "gram", "sample")


def keys(graph, kinds=("absmax",)):
    return [f"{kind}:{site}" for site in graph.sites for kind in kinds]


def plain_inputs(model, site):
    """Every real row of the activation, in the order of sequences, one forward a sequence."""
    rows = []
    handle = model.get_submodule(site).register_forward_pre_hook(
        lambda _m, args: rows.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for ids in SEQUENCES:
            model(input_ids=torch.tensor([ids]))
    handle.remove()
    return torch.cat(rows)


def _alone(tiny):
    return rg.observe(tiny.model, batches(SEQUENCES, 1), keys(tiny.graph, ("sample",)), tiny.graph)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_padding_and_batching_do_not_show(tiny, size, kind):
    model, graph = tiny(kind).model, tiny(kind).graph
    stats = rg.observe(model, batches(SEQUENCES, size), keys(graph, KINDS), graph)
    for site in graph.sites:
        x = plain_inputs(model, site)
        assert torch.allclose(stats[f"absmax:{site}"], x.abs().amax(0), atol=1e-5)
        assert torch.allclose(stats[f"range:{site}"], torch.stack((x.amin(0), x.amax(0))), atol=1e-5)
        assert torch.allclose(stats[f"meanabs:{site}"][:-1], x.abs().sum(0), rtol=1e-4, atol=1e-4)
        assert torch.allclose(stats[f"gram:{site}"][:-1], x.T @ x, rtol=1e-4, atol=1e-4)
        assert stats[f"meanabs:{site}"][-1] == stats[f"gram:{site}"][-1, 0] == len(x) == 29
        assert torch.equal(stats[f"sample:{site}"][:, -1], _alone(tiny(kind))[f"sample:{site}"][:, -1])
        sampled = rg.transforms.KINDS["sample"].rows(stats[f"sample:{site}"])
        assert torch.allclose(sampled.sum(0), x.sum(0), atol=1e-3)


def test_a_site_is_observed_once_and_nothing_runs_after_the_last(tiny):
    model, graph = tiny().model, tiny().graph
    calls = {}
    names = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda _m, _a, n=n: calls.update({n: calls.get(n, 0) + 1}))
        for n in names
    ]
    plan = rg.plan(rg.transforms.SmoothQuant(), tiny().params, graph)
    rg.observe(model, batches(SEQUENCES, 1), plan.needs, graph)
    for handle in handles:
        handle.remove()
    assert calls["model.layers.0.self_attn.k_proj"] == 5
    assert calls.get("model.layers.1.mlp.down_proj", 0) == 1  # the first batch shows which site is the last
    assert "lm_head" not in calls


def test_it_leaves_the_model_as_it_was(tiny):
    model, graph = tiny().model, tiny().graph
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    model.train()
    rg.observe(model, batches(SEQUENCES, 2), keys(graph), graph)
    assert model.training
    model.eval()
    with pytest.raises(IndexError):
        rg.observe(model, batches([[95, 96, 97]], 1), keys(graph), graph)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_faults_are_named(tiny):
    model, graph = tiny().model, tiny().graph
    with pytest.raises(LayoutError, match="there is no batch"):
        rg.observe(model, [], keys(graph), graph)
    with pytest.raises(PlanError, match="no site 'absent'"):
        rg.observe(model, [], ["absmax:absent"], graph)
    empty = rg.Batch(
        input_ids=torch.ones(1, 3, dtype=torch.long), attention_mask=torch.zeros(1, 3), index=torch.arange(1)
    )
    with pytest.raises(LayoutError, match="no token reached model.layers.0.self_attn.q_proj"):
        rg.observe(model, [empty], keys(graph), graph)
    assert rg.observe(model, [], [], graph) == {}


def test_activations_that_overflow_are_refused(tiny):
    model, graph = tiny("llama").model, tiny("llama").graph
    weight = model.model.layers[0].input_layernorm.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[2] = float("inf")
        with pytest.raises(LayoutError, match="absmax:model.layers.0.self_attn.q_proj is not finite"):
            rg.observe(model, batches(SEQUENCES, 2), keys(graph), graph)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_progress_counts_sequences(tiny):
    seen = []
    rg.observe(tiny().model, batches(SEQUENCES, 2), keys(tiny().graph), tiny().graph, progress=seen.append)
    assert seen == [2, 2, 1]
