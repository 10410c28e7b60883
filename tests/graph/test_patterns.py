"""Patterns on names, and the mappings made of them."""

import pytest
from regauge.graph.patterns import check_patterns, matches, unmatched


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
