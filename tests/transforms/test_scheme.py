"""Quantization schemes: presets, mappings, and what they refuse."""

from dataclasses import FrozenInstanceError

import pytest
from regauge.transforms import PRESETS, QuantArgs, Scheme, make_scheme

TOKEN = QuantArgs(num_bits=8, strategy="token", dynamic=True)


@pytest.mark.parametrize(
    ("preset", "weights", "activations"),
    [
        ("W8A8", QuantArgs(num_bits=8, strategy="channel"), TOKEN),
        ("W8A16", QuantArgs(num_bits=8, strategy="channel"), None),
        ("W4A16", QuantArgs(num_bits=4, strategy="group", group_size=128), None),
        ("W4A16_ASYM", QuantArgs(num_bits=4, strategy="group", group_size=128, symmetric=False), None),
    ],
)
def test_presets_are_what_their_names_say(preset, weights, activations):
    assert make_scheme(preset) == PRESETS[preset] == Scheme(weights=weights, input_activations=activations)


@pytest.mark.parametrize("preset", ["W8A8", "W4A16", "W4A16_ASYM"])  # its W8A16 has groups of 128
def test_presets_are_those_of_the_library(preset):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    theirs = quantization.preset_name_to_scheme(preset, targets=["Linear"])
    ours = PRESETS[preset]
    for mine, other in ((ours.weights, theirs.weights), (ours.input_activations, theirs.input_activations)):
        assert (mine is None) == (other is None)
        if mine is not None:
            for field in ("num_bits", "symmetric", "group_size", "dynamic"):
                assert getattr(mine, field) == getattr(other, field), field
            assert mine.strategy == str(other.strategy)


@pytest.mark.parametrize(("bits", "low", "high"), [(2, -2, 1), (4, -8, 7), (8, -128, 127)])
def test_codes_are_signed(bits, low, high):
    assert (QuantArgs(num_bits=bits).qmin, QuantArgs(num_bits=bits).qmax) == (low, high)


def test_a_mapping_is_a_scheme():
    made = make_scheme({"weights": {"num_bits": 3, "strategy": "group", "group_size": 32}, "input_activations": None})
    assert made == Scheme(weights=QuantArgs(num_bits=3, strategy="group", group_size=32))
    assert make_scheme(made) is made
    assert make_scheme({"weights": made.weights}) == made


def test_a_group_size_overrides_the_schemes_own():
    assert make_scheme("W4A16", 64).weights.group_size == 64
    grouped = make_scheme("W8A8", 32)
    assert (grouped.weights.strategy, grouped.weights.group_size) == ("group", 32)
    assert grouped.input_activations == TOKEN
    assert PRESETS["W8A8"].weights.group_size is None


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        ("W8A8", "W8A8"),
        ("W4A16_ASYM", "W4A16 g128 asym"),
        ({"weights": {"num_bits": 5, "strategy": "tensor"}}, "W5A16 tensor"),
    ],
)
def test_labels_are_short(scheme, label):
    assert make_scheme(scheme).label == label


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("W3A3", "expected one of W8A8, W8A16, W4A16, W4A16_ASYM or a mapping, got 'W3A3'"),
        ({"weight": {}}, "scheme: unknown key 'weight'; expected some of weights, input_activations"),
        ({"weights": {"bits": 4}}, "scheme.weights: unknown key 'bits'"),
        ({"weights": 4}, "scheme.weights: expected a mapping"),
        ({"weights": {"num_bits": 1}}, "num_bits: expected 2 to 8, got 1"),
        ({"weights": {"num_bits": 9}}, "num_bits: expected 2 to 8, got 9"),
        ({"weights": {"strategy": "row"}}, "strategy: expected one of tensor, channel, group, token"),
        ({"weights": {"strategy": "group"}}, "does not go with group_size=None"),
        ({"weights": {"strategy": "channel", "group_size": 4}}, "does not go with group_size=4"),
        ({"weights": {"strategy": "group", "group_size": 0}}, "expected a positive integer, got 0"),
        ({"weights": {"strategy": "group", "group_size": 2.0}}, "expected a positive integer, got 2.0"),
        ({"weights": {"strategy": "token"}}, "weights: expected strategy tensor, channel or group"),
        ({"weights": {"strategy": "channel", "dynamic": True}}, "with dynamic false"),
        ({"weights": {}, "input_activations": {"strategy": "tensor"}}, "only dynamic per-token"),
        ({"weights": {}, "input_activations": {"strategy": "token"}}, "only dynamic per-token"),
    ],
)
def test_faults_are_named(scheme, message):
    with pytest.raises(ValueError, match=message):
        make_scheme(scheme)


def test_schemes_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        PRESETS["W8A8"].weights.num_bits = 4
