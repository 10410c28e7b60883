"""Write the output folder: all ranks its tensors, the first one the rest; a run that was killed is taken up again."""

import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph import LayoutError
from ..graph.adapters import Partial, digest_of, everyones, execute_sharded, rank, together, world
from ..transforms import Params, Plan, Stats, Step, dequantize, signature, split_key
from .checkpoint import Checkpoint, copy_side_files
from .report import LinearRow

_LAYOUT = 1  # of the journal's facts: raise it when they change
_MARGIN = 50_000_000  # bytes beside the tensors: side files, plots, reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A row for each rounded weight, and the peaks of some edited activations before and after, by site."""

    rows: tuple[LinearRow, ...]
    peaks: Mapping[str, tuple[Tensor, Tensor]]
    resumed: int


def run_key(planned: Plan, stats: Stats, model_hash: str, limit: int) -> str | None:
    """A hash of all that the tensors of the output depend on; None where that cannot be told."""
    text, exact = signature(planned, stats)
    versions = (importlib.metadata.version("torch"), _own_version())
    whole = json.dumps([_LAYOUT, *versions, model_hash, text, limit])
    return hashlib.sha256(whole.encode()).hexdigest() if exact else None


def open_partial(output_dir: Path, key: str | None, overwrite: bool) -> Partial:
    """The partial folder, on all ranks; the first makes it. Collective."""
    partial: Partial | None = None
    for turn in (rank() == 0, rank() != 0):
        with together(f"opening {output_dir}.partial"):
            if turn:
                partial = Partial(output_dir, key, overwrite=overwrite, rank=rank())
    assert partial is not None
    return partial


def require_room(output_dir: Path, planned: Plan) -> None:
    """Raise `LayoutError` when the disk cannot hold the output beside what is there."""
    parent = next(p for p in output_dir.absolute().parents if p.exists())
    partial = output_dir.with_name(output_dir.name + ".partial")
    there = sum(512 * p.stat().st_blocks for p in partial.glob("*.safetensors")) if partial.is_dir() else 0
    needed = sum(p.nbytes for p in planned.target.values()) + _MARGIN
    free = shutil.disk_usage(parent).free + there
    if needed > free:
        raise LayoutError(
            f"output_dir: {parent} has {free / 1e9:.2f} GB free, the output takes {needed / 1e9:.2f} GB; make room, or "
            "choose a folder on another disk"
        )


def write_tensors(
    checkpoint: Checkpoint,
    planned: Plan,
    stats: Mapping[str, Tensor],
    partial: Partial,
    limit: int,
    progress: Callable[[int], object] | None = None,
) -> Written:
    """Side files, then all cells that an earlier run has not finished. Collective."""
    with together("copying side files"):
        if rank() == 0:
            copy_side_files(checkpoint.folder, partial.folder)
    records, cells, picked = partial.finished(), planned.cells, _picked(planned)
    facts: dict[str, Any] = {}  # of steps that are done and whose cell is not written yet

    def on_step(step: Step, before: Params, after: Params, known: Stats) -> None:
        peaks = {key: _peaks(key, known[key]).tolist() for key in picked if split_key(key)[1] in step.edits}
        facts[step.name] = {"rows": [asdict(row) for row in sqnr_rows(step, before, after)], "peaks": peaks}

    def on_cell(number: int, written: Params) -> None:
        told = [facts.pop(step.name) for step in cells[number].steps]
        partial.note(number, digest_of(written), told=told)

    done = {number: record["sha256"] for number, record in records.items()}
    done = everyones(done, "reading the journal")[0]
    kept = execute_sharded(
        planned,
        checkpoint.shards,
        partial.folder,
        stats,
        max_shard_size=limit,
        done=done,
        progress=progress,
        on_step=on_step,
        on_cell=on_cell,
    )
    told = [item for _, record in sorted(partial.finished().items()) for item in record["told"]]
    after = {key: torch.tensor(values) for item in told for key, values in item["peaks"].items()}
    return Written(
        rows=tuple(LinearRow(**row) for item in told for row in item["rows"]),
        peaks={split_key(key)[1]: (_peaks(key, stats[key]), after[key]) for key in picked if key in after},
        resumed=len(kept),
    )


def sqnr_rows(step: Step, before: Params, after: Params) -> Iterator[LinearRow]:
    """A row for the module of a quantizing step (not for the others that read the same tensor)."""
    if not step.schemes:
        return
    name, scheme = next(iter(step.schemes.items()))
    weight = step.reads[0]
    w, codes = before[weight], after[weight]
    scale, zeros = after.get(f"{weight}_scale"), after.get(f"{weight}_zero_point")
    noise = signal = 0.0
    rows = max(1, (1 << 18) // max(1, w.shape[-1]))
    for start in range(0, w.shape[0], rows):  # a few rows at a time, which stay in the processor's cache
        cut = slice(start, start + rows)
        x, q = w[cut].float(), codes[cut]
        if scale is not None:
            own = scale[cut] if scale.shape[0] == w.shape[0] else scale
            zero = zeros[cut] if zeros is not None and zeros.shape[0] == w.shape[0] else zeros
            q = dequantize(q, own, zero, scheme.weights, torch.float32)
        signal += float(x.square().sum())
        noise += float((x - q.float()).square_().sum())
    db = 10 * math.log10(signal / max(noise, 1e-30)) if signal > 0 else 0.0
    yield LinearRow(name=name, scheme=scheme.label, sqnr_db=round(db, 3))


def hashes_of(folder: Path) -> dict[str, str]:
    """File -> sha256, of the safetensors files. Collective: each rank hashes its share."""
    mine = sorted(folder.glob("*.safetensors"))[rank() :: world()]
    with together("hashing files"):
        told = {path.name: _sha256(path) for path in mine}
    shares = everyones(told, "hashing files")
    return {name: share[name] for name, share in sorted((n, s) for s in shares for n in s)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _picked(planned: Plan) -> tuple[str, ...]:
    """Up to four statistics of edited sites, spread over the model, that show the peak of each channel."""
    edited = dict.fromkeys(site for step in planned.steps for site in step.edits)
    keys: dict[str, str] = {}
    for key in planned.needs:
        kind, site = split_key(key)
        if site in edited and kind.name in ("absmax", "range"):
            keys.setdefault(site, key)
    every = list(keys.values())
    return tuple(every[round(i * (len(every) - 1) / 3)] for i in range(4)) if len(every) > 4 else tuple(every)


def _peaks(key: str, state: Tensor) -> Tensor:
    return state[1] - state[0] if split_key(key)[0].name == "range" else state


def _own_version() -> str:
    try:
        return importlib.metadata.version("regauge")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
