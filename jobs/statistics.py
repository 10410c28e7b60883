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
from torch import Tensor, nn

from ..graph import Graph
from ..graph.observe import observe
from .cache import cache_dir
from .data import batches

_log = logging.getLogger(__name__)
_FORMAT = 1  # of the statistics themselves; raise it when a kind changes its meaning


def statistics_key(model: str, sequences: Sequence[Sequence[int]]) -> str:
    """A key of everything that the statistics depend on: the model's fingerprint and the token ids."""
    digest = hashlib.sha256(json.dumps([_FORMAT, model]).encode())
    for ids in sequences:
        digest.update(json.dumps(list(ids)).encode())
    return digest.hexdigest()


def read_statistics(path: Path, key: str) -> dict[str, Tensor]:
    """Statistics from a file; empty when there is none, it is damaged, or it is of other inputs."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("key") != key:
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
    graph: Graph,
    sequences: Sequence[Sequence[int]],
    load: Callable[[], nn.Module],
    *,
    batch_size: int,
    reuse: bool = True,
    progress: Callable[[int], object] | None = None,
) -> tuple[dict[str, Tensor], bool]:
    """The statistics `needs`, and whether all came from the cache. `load` makes the model, only when it is needed."""
    path = cache_dir("statistics") / f"{key[:32]}.safetensors"
    known = read_statistics(path, key) if reuse else {}
    missing = [name for name in needs if name not in known]
    if missing:
        fresh = observe(load(), batches(sequences, batch_size), missing, graph, progress=progress)
        known = {**known, **fresh}
        if reuse:
            write_statistics(path, key, known)
    return {name: known[name] for name in needs}, not missing
