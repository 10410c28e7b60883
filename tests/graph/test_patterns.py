"""Patterns on names, and the mappings made of them."""

import pytest
from regauge.graph import Axis, Graph, Linear, PlanError, Site, Symmetry
from regauge.graph.patterns import check_patterns, matches, resolve_mappings, unmatched


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.0.q_proj", True),
        ("q_proj", False),
        ("layers.0", False),
        ("layersX0Xq_proj", False),
        ("Linear", True),
        ("Lin", False),
        ("re:layers", True),
        ("re:.*q_proj", True),
        ("re:q_proj", False),
        ("re:.*q_proj$", True),
        ("re:.*q_pro$", False),
        ("re:Linear", False),
        ("re:", True),
    ],
)
def test_patterns_are_names_classes_or_anchored_regexes(pattern, expected):
    assert matches(pattern, "layers.0.q_proj", "Linear") is expected


def test_faults_of_patterns_are_all_named():
    found = check_patterns(["fine", "re:fine.*", "re:(", 3], "here")
    assert len(found) == 2
    assert found[0].startswith("here: 're:(' is not a regular expression")
    assert found[1] == "here: expected a pattern as a string, got 3"


def test_a_pattern_without_a_match_comes_with_near_names():
    modules = {"lm_head": "Linear", "model.embed_tokens": "Embedding"}
    assert unmatched(["lm_head", "Embedding", "re:model.*"], modules, "here") == []
    (problem,) = unmatched(["lm_hed"], modules, "here")
    assert problem.startswith("here: pattern 'lm_hed' matches none of the 2 modules; nearest names: lm_head")


def toy(producer="b.0.norm", norm_shape=(4,), symmetries=()):
    """Two blocks, each a norm and two linears that read it."""
    linears, sites, modules, shapes = {}, {}, {}, {}
    for i in range(2):
        names = (f"b.{i}.up", f"b.{i}.gate")
        for name in names:
            linears[name] = Linear(name=name, weight=f"{name}.weight", shape=(6, 4), site=names[0], block=i)
        sites[names[0]] = Site(name=names[0], width=4, linears=names, producer=producer.replace("0", str(i)), block=i)
        modules |= {f"b.{i}": "Block", f"b.{i}.norm": "Norm", f"b.{i}.other": "Norm", **dict.fromkeys(names, "Linear")}
        shapes[f"b.{i}.norm.weight"] = norm_shape
    return Graph(
        linears=linears, sites=sites, modules=modules, shapes=shapes, symmetries=symmetries, blocks=("b.0", "b.1")
    )


READERS = ["re:.*up", "re:.*gate"]


def test_a_mapping_is_resolved_in_every_block():
    found = resolve_mappings(toy(), [[READERS, "re:.*norm"]], "here")
    assert [s.name for s in found] == ["b.0.norm", "b.1.norm"]
    assert found[1] == Symmetry(
        name="b.1.norm",
        kind="norm",
        width=4,
        producers=(Axis(param="b.1.norm.weight", dim=0, size=4),),
        consumers=tuple(Axis(param=f"b.1.{x}.weight", dim=1, size=4) for x in ("up", "gate")),
        linears=("b.1.up", "b.1.gate"),
        site="b.1.up",
    )


def test_an_exact_name_is_resolved_in_its_own_block():
    found = resolve_mappings(toy(), [[["b.0.up", "b.0.gate"], "b.0.norm"]], "here")
    assert [s.name for s in found] == ["b.0.norm"]


def test_a_known_symmetry_is_taken_as_it_is():
    known = Symmetry(
        name="b.0.norm", kind="norm", width=4, producers=(), consumers=(), linears=("b.0.up",), site="b.0.up"
    )
    found = resolve_mappings(toy(symmetries=(known,)), [[READERS, "b.0.norm"]], "here")
    assert found[0] is known


@pytest.mark.parametrize(
    ("graph", "mappings", "message"),
    [
        (toy(), [[READERS, "re:.*other"]], "b.0.up reads the output of b.0.norm, not the output of b.0.other"),
        (toy(producer="b.0.other"), [[READERS, "re:.*norm"]], "reads the output of b.0.other"),
        (toy(norm_shape=(1,)), [[READERS, "re:.*norm"]], "b.0.norm.weight: expected shape (4,) to scale, found (1,)"),
        (toy(norm_shape=(4, 4)), [[READERS, "re:.*norm"]], "expected shape (4,) to scale, found (4, 4)"),
        (toy(), [[READERS, "re:.*up"]], "no symmetry between these linears is known"),
        (toy(), [[["re:.*up"], "re:.*norm"]], "b.0.gate reads the same activation; add it"),
        (toy(), [[READERS, "Norm"]], "block b.0: 2 producers match (b.0.norm, b.0.other); name one"),
        (toy(), [[["b.0.up", "b.0.gate"], "re:.*norm"]], "block b.1: b.1.norm is matched, but no linear is"),
        (toy(), ["re:.*norm"], "a mapping is [[linear patterns], producer pattern]"),
        (toy(), [[READERS]], "a mapping is [[linear patterns], producer pattern]"),
        (toy(), [["re:.*up", "re:.*norm"]], "a mapping is [[linear patterns], producer pattern]"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(graph, mappings, message):
    with pytest.raises(PlanError) as caught:
        resolve_mappings(graph, mappings, "here")
    assert message in "\n".join(caught.value.problems)
    assert all(problem.startswith("here") for problem in caught.value.problems)


def test_faults_of_all_mappings_are_reported_together():
    with pytest.raises(PlanError) as caught:
        resolve_mappings(toy(), [["x", "y"], [READERS, "absent"], [READERS, "re:.*other"]], "here")
    assert len(caught.value.problems) == 4  # the last one in each of two blocks
