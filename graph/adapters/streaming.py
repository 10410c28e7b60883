"""Calibrate a model that does not fit into memory: one of its blocks at a time is read, for all batches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..observe import Batch, Taps, body_of, kinds_by_site, tapped
from ..types import Graph
from ._base import Source
from ._lanes import Call, Lane, lanes
from .loading import drop, fill, hollow, inside, places_of
from .merging import merge


def observe_streamed(
    config: Any,
    source: Source,
    batches: Iterable[Batch],
    keys: Iterable[str],
    graph: Graph,
    *,
    in_order: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """`observe` with the parameters outside the blocks and of one block in memory: the same statistics, bit for bit.

    Every batch runs the model's own forward as far as its next block and waits there; the block is read from `source`,
    runs for all batches in their order, and is let go. Each tensor is read once, if blocks come in the same order for
    all batches. Hidden states of all batches stay in memory. Collective: each rank gives its own batches, and gets the
    statistics of all, as from `observe_sharded`, which says what `in_order` is for.

    `progress` is called with numbers of sequences, which add up to all of them. Raises as `observe` does.
    """
    by_site = kinds_by_site(keys, graph)
    if not by_site:
        return {}
    mine = list(batches)
    taps = Taps(by_site, graph, whole=True, apart=in_order)
    model = hollow(config, source.specs())
    with tapped(model, dict(model.named_modules()), taps, graph), torch.inference_mode():
        _run(model, source, mine, taps, graph, _Progress(mine, len(graph.blocks), progress))
    merge(taps)
    return taps.result()


def _run(model: nn.Module, source: Source, batches: list[Batch], taps: Taps, graph: Graph, told: "_Progress") -> None:
    places, body = places_of(model), body_of(model, taps.by_site)
    blocks = {model.get_submodule(prefix): index for index, prefix in enumerate(graph.blocks)}
    held = {block: inside(places, [block]) for block in blocks}
    below = {name for names in held.values() for name in names}
    outside = [name for name in inside(places, [body]) if name not in below]
    fill(model, places, source, outside)
    # modules with numbers of their own work in the main thread, with all its cores
    inner = {m for block in blocks for m in block.modules()}
    own = [m for m in body.modules() if m not in inner and next(m.parameters(recurse=False), None) is not None]
    leaves = [m for m in own if inner.isdisjoint(m.modules())]
    forwards = [partial(_forward, body, batch, taps) for batch in batches]
    with lanes(forwards, [*blocks, *leaves]) as every:
        waiting: dict[Lane, Call] = {}
        seen: dict[Lane, set[str]] = {lane: set() for lane in every}
        numbers = {lane: number for number, lane in enumerate(every)}

        def go_on(lane: Lane, value: Any = None) -> None:
            """Run a lane as far as its next block, or its end."""
            taps.start(batches[numbers[lane]], numbers[lane])
            call = lane.step(value)
            while call is not None and call.module not in blocks:
                call = lane.step(call.run())
            seen[lane].update(taps.seen)
            waiting.pop(lane, None)
            if call is not None:
                waiting[lane] = call

        for lane in every:
            go_on(lane)
        while waiting and not all(taps.by_site.keys() <= sites for sites in seen.values()):
            block = min((call.module for call in waiting.values()), key=blocks.__getitem__)
            fill(model, places, source, held[block])
            for lane in [lane for lane in every if lane in waiting and waiting[lane].module is block]:
                taps.start(batches[numbers[lane]], numbers[lane])
                result = waiting[lane].run()
                seen[lane].update(taps.seen)
                go_on(lane, result)
                told.block(numbers[lane])
            drop(places, held[block])
    for _ in batches:
        taps.finish()
    told.end()


def _forward(body: nn.Module, batch: Batch, taps: Taps) -> None:
    with torch.inference_mode():  # each thread has its own
        body(input_ids=batch.input_ids, attention_mask=taps.padding(batch), use_cache=False)


class _Progress:
    """Sequences done, in parts: a batch that has passed one of n blocks counts as an n-th of its sequences."""

    def __init__(self, batches: list[Batch], blocks: int, tell: Callable[[int], object] | None):
        self.sizes = [len(batch.index) for batch in batches]
        self.blocks = max(blocks, 1)
        self.tell = tell
        self.parts = self.told = 0

    def block(self, number: int) -> None:
        self.parts += self.sizes[number]
        self._say(min(self.parts // self.blocks, sum(self.sizes)))

    def end(self) -> None:
        self._say(sum(self.sizes))

    def _say(self, done: int) -> None:
        if self.tell is not None and done > self.told:
            self.tell(done - self.told)
        self.told = max(self.told, done)
