"""Transforms and statistics of a model that FSDP has sharded, inside the user's own script.

Everything here is collective: all ranks call it together, with the same transform and, for `apply_sharded`, the same
statistics. One cell is gathered at a time; what the ranks hold is compared before anything is edited.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...transforms import Plan, Transform, plan
from ...transforms._plan import Cell, check_inputs
from .._errors import LayoutError
from ..build import build_graph
from ..observe import Batch, Taps, kinds_by_site, tapped
from ..types import Graph
from .execute import run_cell
from .fsdp import Fsdp, canonical
from .merging import merge
from .ranks import agree, everyones, named, together


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
    with named(cell.steps[0].name), store.read(cell.reads) as params:
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


def observe_sharded(
    model: nn.Module,
    batches: Iterable[Batch],
    keys: Iterable[str],
    graph: Graph,
    *,
    in_order: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """`observe` on a sharded model: each rank gives its own batches, every rank gets the statistics of all of them.

    Ranks may have different numbers of batches, or none: those that have fewer run along on a filler that is not
    counted. Maxima, ranges and samples equal those of one process on all batches exactly. Sums are added up rank by
    rank, the same way every time, and differ from one process by float32 summation. With `in_order` they equal, to the
    bit, those of one process on the batches dealt in turn (the first of each rank, then the second of each), which
    takes the memory of one state for each batch.

    Raises as `observe` does, on all ranks.
    """
    with together("calibration"):
        wanted = list(keys)
        by_site = kinds_by_site(wanted, graph)
        mine = list(batches)
    told = everyones((wanted, len(mine)), "calibration")
    if any(other != wanted for other, _ in told):
        raise LayoutError("calibration: ranks ask for different statistics; give all of them the same keys")
    if not by_site:
        return {}
    taps = Taps(by_site, graph, whole=True, apart=in_order)
    settings = _headless(model, by_site)
    modules = {canonical(name): module for name, module in model.named_modules()}
    most = max(count for _, count in told)
    with tapped(model, modules, taps, graph), torch.no_grad():
        for number in range(most):
            taps.paused = number >= len(mine)
            batch = _FILLER if taps.paused else mine[number]
            taps.start(batch, number)
            with named(f"calibration, batch {number + 1} of {most}"):
                model(input_ids=batch.input_ids, attention_mask=taps.padding(batch), use_cache=False, **settings)
            if not taps.paused:
                taps.finish()
                if progress is not None:
                    progress(len(batch.index))
    merge(taps)
    return taps.result()


def _headless(model: nn.Module, sites: Iterable[str]) -> dict[str, int]:
    """A setting of the forward with which it makes one row of logits only, where no site lies in the head.

    Leaving the head out altogether is not possible: a wrapped model gathers its parameters in its own forward.
    """
    inner = getattr(model, "module", model)
    prefix = getattr(inner, "base_model_prefix", "")
    known = inspect.signature(inner.forward).parameters
    inside = bool(prefix) and all(site.startswith(f"{prefix}.") for site in sites)
    return {"logits_to_keep": 1} if inside and "logits_to_keep" in known else {}


_PAIR = torch.zeros(1, 2, dtype=torch.long)
_FILLER = Batch(input_ids=_PAIR, attention_mask=torch.ones_like(_PAIR), index=torch.zeros(1, dtype=torch.long))
