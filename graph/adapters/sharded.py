"""Transforms and statistics of a model that FSDP has sharded, inside the user's own script.

Everything here is collective: all ranks call it together, with the same transform and, for `apply_sharded`, the same
statistics. One cell is gathered at a time; what the ranks hold is compared before anything is edited.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
from .shards import ShardWriter


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
        _agree(planned, known)
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


def _agree(planned: Plan, stats: Mapping[str, Tensor]) -> None:
    """Raise on every rank unless all hold the same plan and statistics."""
    digest = hashlib.sha256(repr([(s.name, s.reads, sorted(s.writes), s.needs) for s in planned.steps]).encode())
    for key in planned.needs:
        digest.update(key.encode() + stats[key].detach().cpu().contiguous().numpy().tobytes())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    odd = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if odd:
        raise LayoutError(
            f"ranks {', '.join(map(str, odd))} planned other steps or hold other statistics than rank 0; give every "
            "rank the same transform, and statistics from observe_sharded, which are equal on all"
        )


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Errors of collectives (a rank that died, a timeout) say which cell they were at."""
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        raise LayoutError(f"rank {dist.get_rank()}: {step}: {error}") from error


def execute_sharded(
    planned: Plan,
    source: Source,
    folder: str | Path,
    stats: Mapping[str, Tensor] | None = None,
    *,
    max_shard_size: int = 5_000_000_000,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run a plan on all ranks together into one folder of safetensors: the same bytes as `execute` writes.

    Cells are dealt to ranks by size; each rank computes its own and writes them at their place in the common files, so
    no rank holds more than one cell beside its shards. From a sharded model (`Fsdp`) every cell is gathered for its
    owner; from `Shards` each rank reads only its own cells. The folder must exist, empty, on a file system that all
    ranks share. `progress` is called with the bytes of each cell that this rank did.

    Raises `LayoutError` on all ranks when one of them fails, naming it.
    """
    known = dict(stats or {})
    check_inputs(planned, source.specs(), known)
    _agree(planned, known)
    rank, owners = dist.get_rank(), _deal(planned)
    writer: Any = None
    for turn in (rank == 0, rank != 0):  # one lays the files out, then the others join
        with _together():
            if turn:
                writer = ShardWriter(folder, planned.target, max_shard_size, join=rank != 0)
    collective = isinstance(source, Fsdp)
    with torch.no_grad():
        for cell, owner in zip(planned.cells, owners, strict=True):
            if collective:
                with _together(), source.read(cell.reads) as params:
                    if owner == rank:
                        _compute(cell, dict(params), known, writer, progress)
            elif owner == rank:
                with source.read(cell.reads) as params:
                    _compute(cell, dict(params), known, writer, progress)
    mine = [name for cell, owner in zip(planned.cells, owners, strict=True) if owner == rank for name in cell.writes]
    with _together():
        writer.close(mine)


def _compute(cell: Cell, params: dict[str, Tensor], known: dict[str, Tensor], writer: ShardWriter, progress) -> None:
    size = sum(p.nbytes for p in params.values())
    run_cell(cell, params, dict(known))
    writer.write({name: params[name] for name in cell.writes})
    if progress is not None:
        progress(size)


def _deal(planned: Plan) -> list[int]:
    """The rank of each cell: the largest first, each to the rank that has least so far. The same on every rank."""
    sizes = [sum(planned.source[name].nbytes for name in cell.reads) for cell in planned.cells]
    load = [0] * dist.get_world_size()
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = load.index(min(load))
        load[owners[index]] += max(sizes[index], 1)
    return owners


@contextmanager
def _together() -> Iterator[None]:
    """Collective: an error on one rank is raised on all of them, so that none waits for it."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    bad = [rank for rank, text in enumerate(said) if text is not None]
    if bad:
        raise LayoutError(f"rank {bad[0]} failed, and all stop: {said[bad[0]]}")


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
