"""Classes of channels, against a union-find with parity written out in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from regauge.graph.discovery.labels import UNSCALED, Classes, narrow

COUNT = 6


def label(*literals):
    return torch.tensor(literals)


class Parity:
    """Disjoint sets of channels; `sign` is relative to the root. One whose members disagree is pinned."""

    def __init__(self, count):
        self.parent = list(range(count))
        self.sign = [0] * count
        self.pinned = [False] * count
        self.paired = [False] * count

    def find(self, i):
        sign = 0
        while self.parent[i] != i:
            sign ^= self.sign[i]
            i = self.parent[i]
        return i, sign

    def merge(self, a, b, opposite):
        if a < 0 or b < 0:
            return self.pin(max(a, b))
        (i, p), (j, q) = self.find(a // 2), self.find(b // 2)
        differ = p ^ q ^ (a & 1) ^ (b & 1) ^ int(opposite)
        if self.pinned[i] or self.pinned[j]:
            self.pinned[i] = self.pinned[j] = True
            return None
        self.paired[i] |= opposite
        if i == j:
            self.pinned[i] |= bool(differ)
            return None
        self.parent[j], self.sign[j] = i, differ
        self.paired[i] |= self.paired[j]
        return None

    def pin(self, a):
        if a >= 0:
            self.pinned[self.find(a // 2)[0]] = True

    def is_pinned(self, a):
        return a < 0 or self.pinned[self.find(a // 2)[0]]

    def relation(self, a, b):
        """Same and opposite of two literals that are not pinned."""
        (i, p), (j, q) = self.find(a // 2), self.find(b // 2)
        return (i == j and p ^ (a & 1) == q ^ (b & 1)), (i == j and p ^ (a & 1) != q ^ (b & 1))


def agree(classes, plain):
    everything = torch.arange(2 * COUNT)
    canonical = classes.canonical(everything).tolist()
    low, mirrored, paired = (x.tolist() for x in classes.group(everything))
    for a in range(2 * COUNT):
        assert (canonical[a] == UNSCALED) == (low[a] == UNSCALED) == plain.is_pinned(a)
        if plain.is_pinned(a):
            continue
        assert paired[a] == plain.paired[plain.find(a // 2)[0]]
        for b in range(2 * COUNT):
            if not plain.is_pinned(b):
                same, opposite = plain.relation(a, b)
                assert (canonical[a] == canonical[b]) == same
                assert (low[a] == low[b]) == (same or opposite)
                if same or opposite:
                    assert (mirrored[a] == mirrored[b]) == same


LITERALS = st.integers(-1, 2 * COUNT - 1)
PAIRS = st.lists(st.tuples(LITERALS, LITERALS), min_size=1, max_size=3)
MERGES = st.tuples(st.just("merge"), PAIRS, st.booleans())
PINS = st.tuples(st.just("pin"), st.lists(LITERALS, min_size=1, max_size=3), st.none())


@given(st.lists(MERGES | PINS, max_size=8))
def test_classes_are_those_of_a_plain_union_find_with_parity(steps):
    classes, plain = Classes(COUNT), Parity(COUNT)
    for kind, what, opposite in steps:
        if kind == "pin":
            classes.pin(label(*what))
            for a in what:
                plain.pin(a)
        else:
            a, b = (list(x) for x in zip(*what, strict=True))
            classes.merge(label(*a), label(*b), opposite)
            # within one merge, pins of unscaled partners come first; the order does not matter for what is a class
            for x, y in sorted(what, key=lambda pair: min(pair) >= 0):
                plain.merge(x, y, opposite)
    agree(classes, plain)


@given(st.permutations(range(5)))
def test_the_order_of_merges_does_not_matter(order):
    merges = [((0,), (2,), False), ((2,), (5,), True), ((6,), (4,), True), ((8,), (10,), False), ((8,), (-1,), False)]
    classes = Classes(COUNT)
    for i in order:
        a, b, opposite = merges[i]
        classes.merge(label(*a), label(*b), opposite)
    low, mirrored, paired = (x.tolist() for x in classes.group(torch.arange(0, 12, 2)))
    assert low == [0, 0, 0, 0, -1, -1]
    assert mirrored[:4] == [False] * 3 + [True]
    assert paired[:4] == [True] * 4


def test_a_merge_is_elementwise_and_broadcasts():
    classes = Classes(4)
    classes.merge(torch.tensor([[0], [2]]), torch.tensor([[4, 4]]))
    assert classes.canonical(label(0, 2, 4, 6)).tolist() == [0, 0, 0, 6]


@pytest.mark.parametrize(
    "conflict",
    [
        [((0,), (1,), False)],
        [((0,), (0,), True)],
        [((0,), (2,), False), ((0,), (2,), True)],
        [((0,), (2,), True), ((2,), (4,), True), ((4,), (0,), True)],
    ],
    ids=["its_own_opposite", "opposite_of_itself", "same_and_opposite", "an_odd_ring"],
)
def test_a_class_that_would_be_its_own_opposite_is_pinned(conflict):
    classes = Classes(4)
    for a, b, opposite in conflict:
        classes.merge(label(*a), label(*b), opposite)
    members = sorted({literal for a, b, _ in conflict for literal in (*a, *b)})
    assert classes.canonical(label(*members)).tolist() == [UNSCALED] * len(members)
    assert not classes.is_free(label(*members))
    assert classes.is_free(label(6))


def test_an_even_ring_of_opposites_is_free():
    classes = Classes(4)
    for a, b in ((0, 2), (2, 4), (4, 6), (6, 0)):
        classes.merge(label(a), label(b), opposite=True)
    low, mirrored, paired = classes.group(label(0, 2, 4, 6))
    assert low.tolist() == [0] * 4
    assert mirrored.tolist() == [False, True, False, True]
    assert paired.all()


def test_pins_reach_all_members_those_that_join_later_too():
    classes = Classes(4)
    classes.merge(label(0), label(2))
    assert classes.pin(label(2)) == 1
    assert classes.pin(label(0, 2, 3)) == 0
    classes.merge(label(0), label(4), opposite=True)
    assert classes.canonical(torch.arange(8)).tolist() == [-1] * 6 + [6, 7]


def test_pins_are_counted_by_class_not_by_literal():
    classes = Classes(4)
    classes.merge(label(0), label(2), opposite=True)
    assert classes.pin(label(0, 1, 2, 3, 4, -1)) == 2


@pytest.mark.parametrize("opposite", [False, True])
def test_what_meets_an_unscaled_channel_is_pinned(opposite):
    classes = Classes(3)
    classes.merge(label(0, -1, -1), label(-1, 2, -1), opposite)
    assert classes.canonical(label(0, 2, 4)).tolist() == [-1, -1, 4]


@pytest.mark.parametrize("empty", [torch.tensor([-1, -1]), torch.empty(0, dtype=torch.long)])
def test_merging_nothing_changes_nothing(empty):
    classes = Classes(2)
    classes.merge(empty, empty, opposite=True)
    assert classes.canonical(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert classes.pin(empty) == 0
    assert not classes.is_free(empty)


def test_narrow_cuts_the_dims_that_are_constant_and_no_others():
    wide = torch.arange(3).reshape(1, 3, 1).expand(4, 3, 5)
    assert narrow(wide).shape == (1, 3, 1)
    assert narrow(torch.tensor([[0, 1], [1, 0]])).shape == (2, 2)
    assert narrow(torch.tensor([2, 2, 2])).tolist() == [2]
    assert narrow(torch.tensor([2, -1])).tolist() == [2, -1]
    assert narrow(torch.empty(0, 3, dtype=torch.long)).numel() == 0
