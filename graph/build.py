"""Build a `Graph` from a model's config: structure from a trace of its forward, symmetries proved one by one."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from .discovery.proof import find_instance, prove_all, prove_mapping
from .discovery.structure import structure_of
from .skeleton import skeleton
from .types import Graph, Proof, Rejection

PROOFS = "regauge-proofs.json"
_VERSION = 1  # of what a proof means: raise it when tracing or proving changes

_log = logging.getLogger(__name__)


def build_graph(config: Any, cache: str | Path | None = None) -> Graph:
    """The graph of the model that `config` describes. No weights of that model are made or read.

    The forward is traced on fake tensors, and each symmetry is proved on a narrow instance with random weights; one
    that is not proved is listed in `rejected` and never applied. `cache` is a folder, usually the model's own, where
    proofs are kept in `regauge-proofs.json`. The last few graphs are kept in memory: a sweep asks for the same again.
    """
    return _build_graph(_Config(config), None if cache is None else Path(cache))


class _Config:
    """A config that equals every other with the same contents, so that it can be a key."""

    def __init__(self, config: Any):
        self.config = config
        self.text = f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.text == other.text


@lru_cache(maxsize=8)
def _build_graph(key: _Config, cache: Path | None) -> Graph:
    graph = structure_of(skeleton(key.config))
    find = lru_cache(maxsize=1)(partial(find_instance, key.config, graph))
    digest = _digest(key, graph)
    proofs = _load(cache, digest, [s.name for s in graph.symmetries])
    if proofs is None:
        proofs = prove_all(graph, find)
        _save(cache, digest, proofs)
    return replace(with_proofs(graph, proofs), prove=partial(prove_mapping, graph, find))


def with_proofs(graph: Graph, proofs: Mapping[str, Proof]) -> Graph:
    """The graph with the symmetries whose proof holds; the others become rejections."""
    failed = [
        Rejection(name=s.name, kind=s.kind, reasons=(proofs[s.name].reason,))
        for s in graph.symmetries
        if not proofs[s.name].holds
    ]
    kept = tuple(s for s in graph.symmetries if proofs[s.name].holds)
    return replace(graph, symmetries=kept, proofs=dict(proofs), rejected=(*failed, *graph.rejected))


def _digest(key: _Config, graph: Graph) -> str:
    """Changes with everything that a proof depends on: config, structure, versions."""
    import transformers

    parts = (_VERSION, torch.__version__, transformers.__version__, key.text, graph.symmetries)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _load(cache: Path | None, digest: str, names: Sequence[str]) -> dict[str, Proof] | None:
    """Proofs from the cache, or None where there are none for exactly these symmetries."""
    if cache is None:
        return None
    try:
        record = json.loads((cache / PROOFS).read_text(encoding="utf-8"))
        if record["key"] != digest or list(record["proofs"]) != list(names):
            return None
        return {name: _proof(values) for name, values in record["proofs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # absent, damaged, or of another version: prove again


def _proof(values: Mapping[str, Any]) -> Proof:
    error = values["error"]
    return Proof(
        method=str(values["method"]),
        change=float(values["change"]),
        control=float(values["control"]),
        error=None if error is None else str(error),
    )


def _save(cache: Path | None, digest: str, proofs: Mapping[str, Proof]) -> None:
    if cache is None or not proofs:
        return
    path = cache / PROOFS
    text = json.dumps({"key": digest, "proofs": {name: asdict(proof) for name, proof in proofs.items()}}, indent=1)
    try:
        partial_path = path.with_suffix(".json.partial")
        partial_path.write_text(text, encoding="utf-8")
        partial_path.replace(path)
    except OSError as error:
        _log.info("proofs are not kept: %s", error)
