"""Transforms and statistics of a model that FSDP has sharded, inside the user's own script.

Everything here is collective: all ranks call it together, with the same transform and, for `apply_sharded`, the same
statistics. One cell is gathered at a time; what the ranks hold is compared before anything is edited.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...transforms import Plan, Transform, plan, split_key
from ...transforms._plan import Cell, check_inputs
from .._errors import LayoutError
from ..build import build_graph
from ..observe import Batch, Taps, kinds_by_site, tapped
from ..types import Graph
from ._base import Source
from .execute import run_cell
from .fsdp import Fsdp, canonical
from .ranks import agree
from .ranks import together as _together


def apply_sharded(
    transform: Transform,
    model: nn.Module,
    stats: Mapping[str, Tensor] | None = None,
    *,
    graph: Graph | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """Edit an FSDP1 or FSDP2 model in place: the same numbers as `apply` gives on the whole parameters.

    Each cell is gathered on every rank, transformed, and written back to the shards, so memory is bounded by the shards
    and one cell. Only edits that keep names, shapes and dtypes can be made in place (equalization, `form="fake"`).
    Returns the statistics as they are after the edits. `progress` is called with the bytes of each finished cell.

    Raises `PlanError` as `plan` does, and `LayoutError`, on all ranks and before any edit, when the transform changes
    shapes, when ranks disagree on the plan or the statistics, or between a forward and its backward.
    """
    store = Fsdp(model)
    try:
        graph = graph if graph is not None else build_graph(_config(model))
        _keeps_ties(store, graph)
        planned = plan(transform, store.specs(), graph)
        _keeps_layout(planned)
        known = dict(stats or {})
        check_inputs(planned, store.specs(), known)
        agree(planned, known)
        with torch.no_grad():
            for cell in planned.cells:
                if cell.steps:
                    _edit(cell, store, known, progress)
        return known
    finally:
        store.close()


def _edit(cell: Cell, store: Fsdp, known: dict[str, Tensor], progress: Callable[[int], object] | None) -> None:
    with _named(cell.steps[0].name), store.read(cell.reads) as params:
        size = sum(p.nbytes for p in params.values())
        before = dict(params)
        run_cell(cell, params, known)  # raises before anything is written, so that a bad cell is left as it was
        store.write({name: p for name, p in params.items() if p is not before.get(name)})
    if progress is not None:
        progress(size)


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise LayoutError(f"{type(model).__name__} has no config; give its graph, from build_graph(config)")
    return config


def _keeps_ties(store: Fsdp, graph: Graph) -> None:
    apart = [alias for alias in graph.ties if alias in store.specs()]
    if apart:
        raise LayoutError(
            f"{apart[0]} is tied to {graph.ties[apart[0]]}, but the sharded model holds it apart: the two were wrapped "
            "in different units, which unties them; wrap them in one"
        )


def _keeps_layout(planned: Plan) -> None:
    for name in dict.fromkeys((*planned.source, *planned.target)):
        old, new = planned.source.get(name), planned.target.get(name)
        if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
            step = next(step.name for step in planned.steps if name in (*step.writes, *step.drops))
            raise LayoutError(
                f"{step} changes the name, shape or dtype of {name}, which cannot be done in place; use form='fake', "
                "or quantize into a folder"
            )


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Errors of collectives (a rank that died, a timeout) say which cell they were at."""
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        raise LayoutError(f"rank {dist.get_rank()}: {step}: {error}") from error


def observe_sharded(
    model: nn.Module,
    batches: Iterable[Batch],
    keys: Iterable[str],
    graph: Graph,
    *,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """`observe` on a sharded model: each rank gives its own batches, every rank gets the statistics of all of them.

    Ranks may have different numbers of batches, or none: those that have fewer run along on a filler that is not
    counted. States are merged in the order of ranks, so maxima, ranges and samples equal those of one process on all
    batches exactly, and sums differ by the order of summation only, the same way every time.

    Raises as `observe` does, on all ranks.
    """
    by_site = kinds_by_site(keys, graph)
    if not by_site:
        return {}
    taps = Taps(by_site, graph, whole=True)
    modules = {canonical(name): module for name, module in model.named_modules()}
    mine = list(batches)
    with tapped(model, modules, taps, graph), torch.no_grad():
        for number in range(_most(len(mine))):
            taps.paused = number >= len(mine)
            batch = _FILLER if taps.paused else mine[number]
            taps.start(batch)
            model(input_ids=batch.input_ids, attention_mask=taps.padding(batch), use_cache=False)
            if not taps.paused:
                taps.finish()
                if progress is not None:
                    progress(len(batch.index))
    _merge(taps)
    return taps.result()


_PAIR = torch.zeros(1, 2, dtype=torch.long)
_FILLER = Batch(input_ids=_PAIR, attention_mask=torch.ones_like(_PAIR), index=torch.zeros(1, dtype=torch.long))


def _most(count: int) -> int:
    """The largest count of all ranks."""
    value = torch.tensor(count)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def _merge(taps: Taps) -> None:
    """Replace the states of this rank by those of all ranks, merged in the order of ranks."""
    counts = torch.tensor([taps.batches, *taps.tokens.values()])
    dist.all_reduce(counts)
    taps.batches, *tokens = counts.tolist()
    taps.tokens = dict(zip(taps.tokens, tokens, strict=True))
    for key, state in taps.states.items():
        parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, state.contiguous())
        merged = parts[0]
        for part in parts[1:]:
            merged = split_key(key)[0].merge(merged, part)
        taps.states[key] = merged
