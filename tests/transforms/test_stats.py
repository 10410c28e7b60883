"""Statistics are commutative monoids, and follow the activation when it is rescaled."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from regauge import PlanError
from regauge.transforms import KINDS, Sample, rescale_stats, split_key

EXACT = {"absmax", "range", "sample"}


def activations(seed, tokens=20, width=6):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def state(kind, x, start=0):
    return kind.update(kind.init(x.shape[1]), x, torch.arange(start, start + len(x)))


def same(kind, a, b):
    return torch.equal(a, b) if kind.name in EXACT else torch.allclose(a, b, rtol=1e-5, atol=1e-5)


# a sample with fewer slots than rows has to choose
kinds = pytest.mark.parametrize("kind", [*KINDS.values(), Sample(size=8)], ids=[*KINDS, "small_sample"])


@kinds
def test_merge_is_associative_and_commutative_with_a_neutral_element(kind):
    a, b, c = (state(kind, activations(n), 20 * n) for n in range(3))
    assert same(kind, kind.merge(a, kind.merge(b, c)), kind.merge(kind.merge(a, b), c))
    assert same(kind, kind.merge(a, b), kind.merge(b, a))
    assert same(kind, kind.merge(a, kind.init(6)), a)
    assert same(kind, kind.merge(kind.init(6), a), a)


@kinds
def test_batches_add_up_to_the_whole(kind):
    x = activations(3, 50)
    parts = kind.init(6)
    for start, stop in ((0, 7), (7, 7), (7, 40), (40, 50)):
        parts = kind.update(parts, x[start:stop], torch.arange(start, stop))
    assert same(kind, parts, state(kind, x))


@kinds
def test_rescale_goes_through_merge(kind):
    a, b, s = state(kind, activations(8)), state(kind, activations(9), 20), activations(15)[0].abs() + 0.5
    separate = kind.merge(kind.rescale(a, s), kind.rescale(b, s))
    assert torch.allclose(kind.rescale(kind.merge(a, b), s), separate, rtol=1e-5)


@kinds
def test_states_are_new_tensors(kind):
    x, rows, s = activations(10), torch.arange(20), torch.full((6,), 2.0)
    start = state(kind, activations(11), 20)
    kept = [t.clone() for t in (start, x, s)]
    kind.rescale(kind.merge(kind.update(start, x, rows), start), s)
    assert all(torch.equal(a, b) for a, b in zip((start, x, s), kept, strict=True))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_float32_whatever_the_activation(kind, dtype):
    x = activations(4).to(dtype)
    assert state(kind, x).dtype == torch.float32
    assert same(kind, state(kind, x), state(kind, x.float()))


@kinds
def test_no_token_changes_nothing(kind):
    before = state(kind, activations(12))
    assert torch.equal(kind.update(before, activations(13)[:0], torch.arange(0)), before)


@kinds
def test_rescale_is_the_statistic_of_the_rescaled_activation(kind):
    x, s = activations(5), torch.tensor([0.5, 2.0, 4.0, 0.25, 1.0, 8.0])
    assert torch.allclose(kind.rescale(state(kind, x), s), state(kind, x / s), rtol=1e-5, atol=1e-6)


def test_values_are_what_their_names_say():
    x = activations(6)
    assert torch.equal(state(KINDS["absmax"], x), x.abs().amax(0))
    assert torch.equal(state(KINDS["range"], x), torch.stack((x.amin(0), x.amax(0))))
    assert torch.allclose(KINDS["meanabs"].mean(state(KINDS["meanabs"], x)), x.abs().mean(0))
    gram = state(KINDS["gram"], x)
    assert torch.allclose(gram[:-1], x.T @ x, atol=1e-5)
    assert gram[-1].tolist() == [20.0] * 6


def test_a_sample_is_of_real_rows_without_repeats_and_of_its_size():
    kind, x = Sample(size=8, seed=1), activations(7, 100)
    rows = kind.rows(state(kind, x))
    places = (rows[:, None] == x).all(-1).nonzero()
    assert places[:, 0].tolist() == list(range(8))
    assert len(set(places[:, 1].tolist())) == 8
    assert not torch.equal(rows, Sample(size=8, seed=2).rows(state(Sample(size=8, seed=2), x)))
    assert len(Sample(size=8).rows(state(Sample(size=8), x[:3]))) == 3


@given(st.permutations(range(40)), st.lists(st.integers(0, 40), max_size=6))
def test_a_sample_does_not_depend_on_order_or_batching(order, cuts):
    kind, x = Sample(size=8, seed=3), activations(14, 40)
    expected, got = state(kind, x), kind.init(6)
    bounds = [0, *sorted(cuts), 40]
    for start, stop in pairwise(bounds):
        rows = torch.tensor(order[start:stop], dtype=torch.long)
        got = kind.update(got, x[rows], rows)
    assert torch.equal(got, expected)


def test_samples_are_spread_over_sequences_and_positions():
    """Row numbers of 128 sequences of 512 tokens; each eighth of either should give about 32 of 256 rows."""
    rows = (torch.arange(128)[:, None] * (1 << 24) + torch.arange(512)).reshape(-1)
    place = torch.arange(rows.numel(), dtype=torch.float32)[:, None]
    kind = Sample(seed=4)
    chosen = kind.rows(kind.update(kind.init(1), place, rows)).squeeze(1).long()
    for part in (chosen // 512 * 8 // 128, chosen % 512 * 8 // 512):
        counts = torch.bincount(part, minlength=8)
        assert int(counts.min()) >= 12
        assert int(counts.max()) <= 56


def test_only_the_edited_site_is_rescaled():
    stats = {"absmax:a": torch.ones(2), "range:a": torch.ones(2, 2), "absmax:b": torch.ones(2)}
    out = rescale_stats(stats, "a", torch.tensor([2.0, 4.0]))
    assert out.keys() == {"absmax:a", "range:a"}
    assert out["absmax:a"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("key", ["absmax", "nothing:a", "absmax:", ":a"])
def test_malformed_keys_are_named(key):
    with pytest.raises(PlanError, match="expected '<kind>:<site>'"):
        split_key(key)
