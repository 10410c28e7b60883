"""Observation against plain hooks on the whole model."""

import contextlib

import pytest
import regauge as rg
import torch
from regauge import LayoutError, PlanError
from regauge.graph import Linear, Site
from regauge.jobs.data import batches
from torch import nn

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


def test_every_module_keeps_its_own_mode(tiny):
    """A frozen part of a model in training stays in evaluation, also when a batch fails."""
    model, graph = tiny().model, tiny().graph
    frozen = model.model.layers[0]
    try:
        model.train()
        frozen.eval()
        rg.observe(model, batches(SEQUENCES, 2), keys(graph), graph)
        assert (model.training, frozen.training) == (True, False)
        with pytest.raises(IndexError):
            rg.observe(model, batches([[95, 96, 97]], 1), keys(graph), graph)
        assert (model.training, frozen.training) == (True, False)
    finally:
        model.eval()


def test_dropout_is_off_and_results_can_be_differentiated(tiny):
    model, graph = tiny("opt").model, tiny("opt").graph  # its dropout is 0.1
    quiet = rg.observe(model, batches(SEQUENCES, 2), keys(graph), graph)
    try:
        model.train()
        trained = rg.observe(model, batches(SEQUENCES, 2), keys(graph), graph)
    finally:
        model.eval()
    assert all(torch.equal(quiet[key], trained[key]) for key in quiet)
    assert not any(state.is_inference() or state.requires_grad for state in quiet.values())


def test_states_of_half_precision_models_are_float32(tiny):
    model, graph = tiny("llama", torch.bfloat16).model, tiny("llama").graph
    stats = rg.observe(model, batches(SEQUENCES, 2), keys(graph, KINDS), graph)
    assert {state.dtype for state in stats.values()} == {torch.float32}
    peaks = stats["absmax:model.layers.0.self_attn.q_proj"]
    assert torch.equal(peaks, peaks.bfloat16().float())  # peaks of what the model computed, not of a float32 copy


class Routed(nn.Module):
    """Two experts that read some tokens each, the second of them only short sequences, and a head that reads all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 4)
        self.a, self.b, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.heads = 0

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        x = self.embed(input_ids)
        flat = x.reshape(-1, 4)
        odd = input_ids.reshape(-1) % 2 == 1
        self.a(flat[odd])
        if input_ids.shape[1] <= 3:
            self.b(flat[~odd])
        self.heads += 1
        return self.head(x)


def routed_graph():
    names = ("a", "b", "head")
    linears = {n: Linear(name=n, weight=f"{n}.weight", shape=(4, 4), site=n) for n in names}
    return rg.Graph(linears=linears, sites={n: Site(name=n, width=4, linears=(n,), module=n) for n in names})


def test_routed_tokens_are_counted_where_they_go():
    model, graph = Routed(), routed_graph()
    sequences = [[1, 2, 3], [5, 6, 7, 8, 9], [10, 11]]
    wanted = [f"{kind}:{site}" for site in "ab" for kind in ("absmax", "meanabs", "sample")] + ["absmax:head"]
    stats = rg.observe(model, batches(sequences, 1), wanted, graph)
    ids = torch.tensor([t for s in sequences for t in s])
    rows = {"a": ids[ids % 2 == 1], "b": torch.tensor([2, 10]), "head": ids}
    for site, tokens in rows.items():
        assert torch.equal(stats[f"absmax:{site}"], model.embed.weight[tokens].abs().amax(0))
    assert stats["meanabs:a"][-1] == 6
    assert stats["meanabs:b"][-1] == 2
    sample = rg.transforms.KINDS["sample"].rows(stats["sample:a"])
    assert torch.allclose(sample.sum(0), model.embed.weight[rows["a"]].sum(0))


def test_padding_does_not_reach_routed_statistics():
    """Where a padded position went cannot be told from its activation alone: left out or refused."""
    model, graph = Routed(), routed_graph()
    with contextlib.suppress(LayoutError):
        stats = rg.observe(model, batches([[1, 2, 4], [6]], 2, pad=8), ["meanabs:b"], graph)
        assert torch.allclose(stats["meanabs:b"][:-1], model.embed.weight[[2, 4, 6]].abs().sum(0))


def test_nothing_is_cut_short_when_the_first_batch_misses_a_site():
    """The last site that the first batch saw may not be the last one of the others."""
    model, graph = Routed(), routed_graph()
    stats = rg.observe(model, batches([[1, 2, 4], [5, 6, 7, 8]], 1), ["absmax:a", "absmax:b"], graph)
    assert torch.equal(stats["absmax:b"], model.embed.weight[[2, 4]].abs().amax(0))
    assert model.heads == 2
    with pytest.raises(LayoutError, match="no token reached b"):
        rg.observe(model, batches([[5, 6, 7, 8]], 1), ["absmax:a", "absmax:b"], graph)


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
