"""Mappings that a user gives by name: resolved block by block, proved, or refused with the reason."""

import pytest
from regauge import PlanError
from regauge.graph import Axis, Graph, Linear, Proof, Rejection, Site, Symmetry
from regauge.graph.mappings import named_symmetry, resolve_mappings

HOLDS = Proof(method="jvp", change=1e-16, control=0.1)
FAILS = Proof(method="jvp", change=0.2, control=0.1)
READERS = ["re:.*up", "re:.*gate"]


def toy(norm_shape=(4,), symmetries=(), proof=HOLDS, offset=0.0, **more):
    """Two blocks, each a norm and two linears that read it; whatever is asked for is proved, or is not."""
    linears, sites, modules, shapes = {}, {}, {}, {}
    for i in range(2):
        names = (f"b.{i}.up", f"b.{i}.gate")
        for name in names:
            linears[name] = Linear(name=name, weight=f"{name}.weight", shape=(4, 4), site=names[0], block=i)
            shapes[f"{name}.weight"] = (4, 4)
        sites[names[0]] = Site(name=names[0], width=4, linears=names, block=i, module=names[0])
        modules |= {f"b.{i}": "Block", f"b.{i}.norm": "Norm", f"b.{i}.other": "Norm", **dict.fromkeys(names, "Linear")}
        shapes[f"b.{i}.norm.weight"] = norm_shape

    def prove(producer, names):
        return (named_symmetry(graph, producer, names, offset) if proof.holds else None), proof

    graph = Graph(
        linears=linears, sites=sites, modules=modules, shapes=shapes, symmetries=symmetries, blocks=("b.0", "b.1"),
        prove=prove, **more,
    )  # fmt: skip
    return graph


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


def test_the_offset_is_the_one_that_was_proved():
    (found,) = resolve_mappings(toy(offset=1.0), [[READERS, "b.0.norm"]], "here")
    assert found.producers == (Axis(param="b.0.norm.weight", dim=0, size=4, offset=1.0),)


def test_rows_of_a_linear_may_be_mapped():
    (found,) = resolve_mappings(toy(), [[["b.0.gate"], "b.0.up"]], "here")
    assert (found.kind, found.producers, found.consumers) == (
        "up_down",
        (Axis(param="b.0.up.weight", dim=0, size=4),),
        (Axis(param="b.0.gate.weight", dim=1, size=4),),
    )


def test_an_exact_name_is_resolved_in_its_own_block():
    found = resolve_mappings(toy(), [[["b.0.up", "b.0.gate"], "b.0.norm"]], "here")
    assert [s.name for s in found] == ["b.0.norm"]


def known(*linears):
    return Symmetry(name="b.0.norm", kind="norm", width=4, producers=(), consumers=(), linears=linears, site="b.0.up")


def test_a_known_symmetry_is_taken_as_it_is_and_not_proved_again():
    symmetry = known("b.0.up", "b.0.gate")
    found = resolve_mappings(toy(symmetries=(symmetry,), proof=FAILS), [[READERS, "b.0.norm"]], "here")
    assert found[0] is symmetry


BOUND = (Rejection(name="b.0.norm", kind="norm", reasons=("pow in b.0",)),)


@pytest.mark.parametrize(
    ("graph", "mappings", "message"),
    [
        (toy(proof=FAILS), [[READERS, "re:.*norm"]], "the function changes (jvp: the output moves by 2.0e-01"),
        (toy(proof=FAILS, rejected=BOUND), [[READERS, "re:.*norm"]], "b.0.norm is bound by pow in b.0"),
        (toy(norm_shape=(1,)), [[READERS, "re:.*norm"]], "b.0.norm.weight: expected 4 channels to scale, found shape (1,)"),
        (toy(norm_shape=(4, 4, 4)), [[READERS, "re:.*norm"]], "expected 4 channels to scale, found shape (4, 4, 4)"),
        (toy(), [[READERS, "re:.*other"]], "b.0.other.weight: expected 4 channels to scale, found none"),
        (toy(symmetries=(known("b.0.up", "b.0.gate"),)), [[["b.0.up"], "b.0.norm"]], "b.0.gate reads the same activation"),
        (toy(symmetries=(known("b.0.up"),)), [[READERS, "b.0.norm"]], "b.0.gate does not read what it makes"),
        (toy(), [[READERS, "Norm"]], "block b.0: 2 producers match (b.0.norm, b.0.other); name one"),
        (toy(), [[["b.0.up", "b.0.gate"], "re:.*norm"]], "block b.1: b.1.norm is matched, but no linear is"),
        (toy(), ["re:.*norm"], "a mapping is [[linear patterns], producer pattern]"),
        (toy(), [[READERS]], "a mapping is [[linear patterns], producer pattern]"),
        (toy(), [["re:.*up", "re:.*norm"]], "a mapping is [[linear patterns], producer pattern]"),
    ],
)  # fmt: skip
def test_mappings_that_do_not_fit_are_refused(graph, mappings, message):
    with pytest.raises(PlanError) as caught:
        resolve_mappings(graph, mappings, "here")
    assert message in "\n".join(caught.value.problems)
    assert all(problem.startswith("here") for problem in caught.value.problems)


def test_without_a_config_nothing_is_proved_and_nothing_taken():
    graph = toy()
    object.__setattr__(graph, "prove", None)
    with pytest.raises(PlanError, match="cannot be proved, since this graph was made without a config"):
        resolve_mappings(graph, [[READERS, "re:.*norm"]], "here")


def test_faults_of_all_mappings_are_reported_together():
    with pytest.raises(PlanError) as caught:
        resolve_mappings(toy(), [["x", "y"], [READERS, "absent"], [READERS, "re:.*other"]], "here")
    assert len(caught.value.problems) == 4  # the last one in each of two blocks
