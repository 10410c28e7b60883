"""Run a plan between stores, cell by cell."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ...transforms import Params, Plan, Stats, Step, run_step
from ...transforms._plan import Cell, check_inputs
from .._errors import LayoutError
from ._base import Sink, Source


def execute(
    plan: Plan,
    source: Source,
    sink: Sink,
    stats: Mapping[str, Tensor] | None = None,
    *,
    progress: Callable[[int], object] | None = None,
    on_step: Callable[[Step, Params, Params, Stats], None] | None = None,
    on_cell: Callable[[int, Params], None] | None = None,
    skip: Collection[int] = (),
) -> dict[str, Tensor]:
    """Run `plan` from `source` to `sink`, one cell at a time, while the next is read and the last is written:
    memory is bounded by three cells.

    Gives the same bytes as `apply`, and returns the statistics as they are after all edits. Raises `LayoutError` before
    any tensor is read when the source or the statistics are not what was planned for, and on a NaN or infinite weight.

    Args:
      progress: called with the bytes read of each finished cell.
      on_step: called with each step, what it read, what it changed, and the statistics after it.
      on_cell: called with the number of each cell (its place in `plan.cells`) and its tensors, once the sink has them.
      skip: numbers of cells to leave out, with what they would do to the statistics.
    """
    check_inputs(plan, source.specs(), stats or {})
    cells = [(number, cell) for number, cell in enumerate(plan.cells) if number not in skip]
    known = dict(stats or {})

    def deliver(number: int, params: Params) -> None:
        sink.write(params)
        if on_cell is not None:
            on_cell(number, params)

    with ThreadPoolExecutor(max_workers=1) as ahead, ThreadPoolExecutor(max_workers=1) as behind:
        pending: Future | None = None
        writing: Future | None = None
        for index, (number, cell) in enumerate(cells):
            params = pending.result() if pending is not None else _fetch(source, cell)
            following = cells[index + 1][1] if index + 1 < len(cells) else None
            pending = ahead.submit(_fetch, source, following) if following is not None else None
            size = sum(p.nbytes for p in params.values())
            run_cell(cell, params, known, on_step)
            if writing is not None:
                writing.result()
            writing = behind.submit(deliver, number, {name: params[name] for name in cell.writes})
            del params
            if progress is not None:
                progress(size)
        if writing is not None:
            writing.result()
    return known


def _fetch(source: Source, cell: Cell) -> dict[str, Tensor]:
    with source.read(cell.reads) as params:
        return dict(params)


def run_cell(cell: Cell, params: dict[str, Tensor], stats: dict[str, Tensor], on_step=None) -> None:
    """Run the steps of a cell on dicts that the caller owns. Raises `LayoutError` for numbers that are not finite."""
    read = dict(params) if cell.steps else {}
    with torch.no_grad():
        for step in cell.steps:
            before = {name: params[name] for name in step.reads} if on_step is not None else {}
            changed = run_step(step, params, stats)
            if on_step is not None:
                on_step(step, before, changed, stats)
    for name in dict.fromkeys((*read, *(params if cell.steps else ()))):
        scale = params.get(f"{name}_scale")  # it is not finite if a weight is not, and has far fewer numbers
        result = params.get(name, read.get(name)) if scale is None else scale
        if result is not None and not is_finite(result):
            require_finite(name, read.get(name, result))
            steps = ", ".join(step.name for step in cell.steps if name in step.writes)
            raise LayoutError(f"{name}: NaN or infinite after {steps}; {result.dtype} cannot hold the result")


def is_finite(p: Tensor) -> bool:
    """False when a float tensor holds NaN or infinity."""
    if not p.dtype.is_floating_point or not p.numel():
        return True
    # one reduction instead of an elementwise mask: NaN and infinity both survive min and max
    low, high = torch.aminmax(p.detach().reshape(-1))
    return bool(torch.isfinite(low) and torch.isfinite(high))


def require_finite(name: str, p: Tensor) -> None:
    """Raise `LayoutError` when a float tensor holds NaN or infinity."""
    if not is_finite(p):
        bad = int((~torch.isfinite(p)).sum())
        raise LayoutError(f"{name}: {bad} of {p.numel()} weights are NaN or infinite; the checkpoint is damaged")
