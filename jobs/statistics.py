"""Statistics of a checkpoint on a dataset: from the cache, or from one calibration pass that fills it."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..graph.adapters import everyones, load_sharded, load_whole, observe_sharded, observe_streamed, rank, world
from ..graph.observe import Batch, observe
from .cache import cache_dir
from .checkpoint import Checkpoint
from .data import batches
from .evaluate import load_quietly
from .placement import Placement, threads

_log = logging.getLogger(__name__)
_FORMAT = 1  # of the statistics themselves; raise it when a kind changes its meaning


def statistics_key(model: str, sequences: Sequence[Sequence[int]]) -> str:
    """A key of everything that the statistics depend on: the model's fingerprint and the token ids."""
    digest = hashlib.sha256(json.dumps([_FORMAT, model]).encode())
    for ids in sequences:
        digest.update(json.dumps(list(ids)).encode())
    return digest.hexdigest()


def read_statistics(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """Statistics from a file; empty when there is none, it is damaged, or it is not of `key`."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            if key is not None and (file.metadata() or {}).get("key") != key:
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        _log.warning("statistics: %s is damaged and is made again (%s)", path, error)
        return {}


def write_statistics(path: Path, key: str, stats: Mapping[str, Tensor]) -> None:
    """Write statistics so that no reader ever sees half a file."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    os.close(handle)
    save_file({name: p.contiguous() for name, p in stats.items()}, scratch, metadata={"key": key})
    os.replace(scratch, path)


def collect(
    key: str,
    needs: Sequence[str],
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    placement: Placement,
    *,
    batch_size: int,
    reuse: bool = True,
    progress: Callable[[int], object] | None = None,
) -> tuple[dict[str, Tensor], bool]:
    """The statistics `needs`, and whether all came from the cache. Collective: equal on all ranks."""
    path = cache_dir("statistics") / f"{key[:32]}.safetensors"
    known = read_statistics(path, key) if reuse and rank() == 0 else {}
    known = everyones(known, "reading statistics")[0]
    missing = [name for name in needs if name not in known]
    if missing:
        with threads(placement.threads):
            fresh = calibrate(checkpoint, list(batches(sequences, batch_size)), missing, placement, progress)
        known = {**known, **fresh}
        if reuse and rank() == 0:
            write_statistics(path, key, known)
    return {name: known[name] for name in needs}, not missing


def calibrate(
    checkpoint: Checkpoint,
    every: Sequence[Batch],
    needs: Sequence[str],
    placement: Placement,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """One pass over all batches, which are dealt to the ranks; every rank gets the statistics of all of them."""
    mine, graph, shards = every[rank() :: world()], checkpoint.graph, checkpoint.shards
    if placement.kind == "stream":
        return observe_streamed(checkpoint.config, shards, mine, needs, graph, in_order=world() > 1, progress=progress)
    if placement.is_sharded:
        model = load_sharded(checkpoint.config, shards, placement.sharding)
        return observe_sharded(model, mine, needs, graph, in_order=True, progress=progress)
    if world() > 1:
        whole = load_whole(checkpoint.config, shards)
        return observe_sharded(whole, mine, needs, graph, in_order=True, progress=progress)
    return observe(load_quietly(checkpoint.folder), mine, needs, graph, progress=progress)
