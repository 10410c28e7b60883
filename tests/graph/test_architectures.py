"""Symmetries that are found, against those written down from each model's code; and that applying all keeps the function."""

import functools
from dataclasses import replace

import pytest
import regauge as rg
import torch
from architectures import ARCHITECTURES
from regauge.graph.discovery.trace import main_output
from regauge.graph.skeleton import example_inputs, new_model
from regauge.transforms import Rescale

graph_of = functools.cache(lambda name: rg.build_graph(ARCHITECTURES[name].config))
each = pytest.mark.parametrize("name", ARCHITECTURES)


def expected(architecture, graph):
    """(kind, name) -> names of consumers, all in full."""
    groups = {key: set(names) for key, names in architecture.outside.items()}
    for prefix, layers in architecture.blocks.items():
        own = [block for block in graph.blocks if block.rpartition(".")[0] == prefix]
        assert own, f"no blocks {prefix}"
        each_layer = layers if isinstance(layers, tuple) else (layers,) * len(own)
        for block, groups_of_layer in zip(own, each_layer, strict=True):
            for (kind, producer), names in groups_of_layer.items():
                full = {n if n in graph.linears else f"{block}.{n}" for n in names}
                groups[kind, f"{block}.{producer}"] = full
    return groups


@each
def test_groups_are_those_of_the_code(name):
    graph = graph_of(name)
    assert graph.untraced is None
    assert {(s.kind, s.name): set(s.linears) for s in graph.symmetries} == expected(ARCHITECTURES[name], graph)


@each
def test_every_group_is_proved_with_a_control(name):
    graph = graph_of(name)
    assert set(graph.proofs) == {s.name for s in graph.symmetries}
    for symmetry, proof in graph.proofs.items():
        assert proof.change < 1e-13, (symmetry, proof)
        assert proof.control > 1e-4, (symmetry, proof)


@pytest.fixture(scope="module")
def instance():
    """The real model in float32 with random weights, its parameters, and its function."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model = new_model(ARCHITECTURES[name].config).float()
            with torch.no_grad():
                for key, p in model.named_parameters():
                    if p.ndim == 1:
                        p.copy_(torch.rand_like(p) + (0.5 if key.endswith("weight") else -0.5))
                    else:
                        p.normal_(std=p.shape[-1] ** -0.5)
            inputs = {
                k: torch.rand_like(x) if x.is_floating_point() else (x + 5) for k, x in example_inputs(model).items()
            }
            params = {key: p.detach() for key, p in model.named_parameters()}

            def forward(p):
                with torch.no_grad():
                    return main_output(torch.func.functional_call(model, p, kwargs=inputs))

            made[name] = params, forward
        return made[name]

    return get


def rescaled(graph, params):
    """Random scales between 1/2 and 2 on all symmetries at once."""
    generator = torch.Generator().manual_seed(1)
    scales = {s.name: 2 ** (2 * torch.rand(s.width, generator=generator) - 1) for s in graph.symmetries}
    return rg.apply(rg.plan(Rescale(scales=scales), params, graph), params)


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if any(a.blocks.values()) or a.outside])
def test_all_groups_at_once_keep_the_function_and_half_of_each_does_not(name, instance):
    graph = graph_of(name)
    params, forward = instance(name)
    reference = forward(params)
    out = rescaled(graph, params)
    assert ((forward(out) - reference).norm() / reference.norm()).item() < 2e-5
    half = replace(graph, symmetries=tuple(replace(s, consumers=()) for s in graph.symmetries))
    assert ((forward(rescaled(half, params)) - reference).norm() / reference.norm()).item() > 1e-2
