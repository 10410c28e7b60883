"""Bring the statistics of all ranks together."""

from collections.abc import Mapping
from itertools import zip_longest

from torch import Tensor

from ...transforms import split_key
from ..observe import Taps
from .ranks import everyones


def merge(taps: Taps) -> None:
    """Collective: replace the states of this rank by those of all ranks.

    Maxima, ranges and samples do not depend on the order. Sums do, by rounding: where they were kept apart for each
    batch, they are added in the order of batches dealt in turn (the first of each rank, then the second), which is the
    order of one process on all of them, so that they are equal to the bit; else in the order of ranks.
    """
    doing = "merging statistics"
    counts = everyones((taps.batches, taps.tokens), doing)
    taps.batches = sum(batches for batches, _ in counts)
    taps.tokens = {site: sum(tokens[site] for _, tokens in counts) for site in taps.tokens}
    for key, state in taps.states.items():  # one at a time: what is in flight stays small
        kind = split_key(key)[0]
        if key in taps.apart:
            turns = zip_longest(*(_rounds(share) for share in everyones(taps.apart.pop(key), doing)), fillvalue=())
            merged = state  # as it was at the start
            for part in (part for turn in turns for parts in turn for part in parts):
                merged = kind.merge(merged, part)
        else:
            merged, *others = everyones(state, doing)
            for other in others:
                merged = kind.merge(merged, other)
        taps.states[key] = merged


def _rounds(parts: Mapping[int, list[Tensor]]) -> list[list[Tensor]]:
    """What each batch of a rank gave, in their order; nothing for a batch that did not reach the site."""
    return [parts.get(number, []) for number in range(max(parts, default=-1) + 1)]
