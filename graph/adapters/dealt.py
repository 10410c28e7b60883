"""Run a plan on all ranks together: cells are dealt to them, and each writes its own into common files."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...transforms import Params, Plan, Stats, Step
from ...transforms._plan import check_inputs
from ._base import Source
from .execute import execute, run_cell
from .fsdp import Fsdp
from .partial import digest_of
from .ranks import agree, everyones, rank, together, world
from .shards import ShardWriter


def execute_sharded(
    planned: Plan,
    source: Source,
    folder: str | Path,
    stats: Mapping[str, Tensor] | None = None,
    *,
    max_shard_size: int = 5_000_000_000,
    done: Mapping[int, str] | None = None,
    progress: Callable[[int], object] | None = None,
    on_step: Callable[[Step, Params, Params, Stats], None] | None = None,
    on_cell: Callable[[int, Params], None] | None = None,
) -> frozenset[int]:
    """Run a plan on all ranks together into one folder of safetensors: the same bytes as `execute` writes.

    Cells are dealt to ranks by size; each computes its own and writes them at their place in the common files, so no
    rank holds more than one cell beside its shards. From a sharded model (`Fsdp`) every cell is gathered for its owner;
    from `Shards` each rank reads only its own cells. The folder must exist, on a file system that all ranks share.
    `progress`, `on_step` and `on_cell` are called as `execute` does, for the cells that this rank did.

    `done`, the same on all ranks, are cells that an earlier run has written into the folder, with the `digest_of` what
    it wrote: they are compared with the files, and kept where they are equal. Returns the cells that were kept.

    Raises `LayoutError` on all ranks when one of them fails, naming it.
    """
    known = dict(stats or {})
    check_inputs(planned, source.specs(), known)
    agree(planned, known)
    owners = deal(planned)
    writer = _laid_out(planned, folder, max_shard_size, bool(done))
    try:
        skip = _kept(planned, writer, done or {})
        mine = {number for number, owner in enumerate(owners) if owner == rank()} - skip
        if isinstance(source, Fsdp):
            _gather_cells(planned, source, writer, known, owners, skip, progress, on_step, on_cell)
        else:
            others = set(range(len(owners))) - mine
            with together("writing cells"):
                execute(
                    planned, source, writer, known, progress=progress, on_step=on_step, on_cell=on_cell, skip=others
                )
        with together("closing files"):
            writer.close([name for number in mine for name in planned.cells[number].writes])
        return skip
    finally:
        writer.abort()


def deal(planned: Plan) -> list[int]:
    """The rank of each cell: the largest first, each to the rank that has least so far. The same on every rank."""
    sizes = [sum(planned.source[name].nbytes for name in cell.reads) for cell in planned.cells]
    load = [0] * world()
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = load.index(min(load))
        load[owners[index]] += max(sizes[index], 1)
    return owners


def _laid_out(planned: Plan, folder: str | Path, max_shard_size: int, resume: bool) -> ShardWriter:
    """The common files: one rank lays them out, then the others join."""
    writer: ShardWriter | None = None
    for turn in (rank() == 0, rank() != 0):
        with together("laying out files"):
            if turn:
                writer = ShardWriter(folder, planned.target, max_shard_size, join=rank() != 0, resume=resume)
    assert writer is not None
    return writer


def _kept(planned: Plan, writer: ShardWriter, done: Mapping[int, str]) -> frozenset[int]:
    """The cells of `done` whose bytes in the files are those that were written; each rank compares its share."""
    mine = sorted(number for number in done if number < len(planned.cells))[rank() :: world()]
    with together("comparing what an earlier run wrote"):
        good = [number for number in mine if digest_of(writer.read(planned.cells[number].writes)) == done[number]]
    return frozenset(number for share in everyones(good, "comparing what an earlier run wrote") for number in share)


def _gather_cells(planned, source: Fsdp, writer, known, owners, skip, progress, on_step, on_cell) -> None:
    """Every rank takes part in gathering each cell; its owner computes and writes it."""
    for number, (cell, owner) in enumerate(zip(planned.cells, owners, strict=True)):
        if number in skip:
            continue
        doing = cell.steps[0].name if cell.steps else cell.reads[0]
        with together(doing), torch.no_grad(), source.read(cell.reads) as params:
            if owner != rank():
                continue
            held = dict(params)
            size = sum(p.nbytes for p in held.values())
            run_cell(cell, held, dict(known), on_step)
            written = {name: held[name] for name in cell.writes}
            writer.write(written)
            if on_cell is not None:
                on_cell(number, written)
            if progress is not None:
                progress(size)
