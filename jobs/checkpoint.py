"""A checkpoint folder: check it, fingerprint it, and write a new one that transformers and vLLM load."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph, LayoutError
from ..graph.adapters import Shards, everyones, rank, require_finite, together, world
from ..graph.build import PROOFS, build_graph
from ..graph.skeleton import load_config
from ..transforms import QuantArgs, Scheme, formats_of, must_untie

# Files that are part of a model without being its weights. Code (.py) is copied only if the user trusts it.
_SIDE_SUFFIXES = {".json", ".model", ".txt", ".jinja", ".tiktoken", ".md"}
_OURS = {"config.json", "model.safetensors.index.json", "regauge.json", "report.json", "inspect.json", PROOFS}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and checked checkpoint folder. `params` are the model's own tensors: ties once, nothing extra."""

    folder: Path
    config: Any
    graph: Graph
    shards: Shards
    params: Mapping[str, Tensor]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a folder; raise `LayoutError` unless its tensors are those that its config describes.

    No weight is read. Tensors that the model does not have (old rotary buffers, an untied copy of a tied head) are
    dropped when they are known to be redundant, and an error otherwise.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LayoutError(f"model.path: {folder}: no such folder; give a checkpoint folder or 'smollm2'")
    config = load_config(folder)
    shards = Shards(folder)
    graph = build_graph(config, cache=folder)
    specs = shards.specs()
    redundant = {name for name in specs if name in graph.ties or name.endswith("rotary_emb.inv_freq")}
    found = {name: p for name, p in specs.items() if name not in redundant}
    problems = []
    for name, shape in graph.shapes.items():
        if name not in found:
            problems.append(f"{folder}: tensor {name} is missing")
        elif tuple(found[name].shape) != shape:
            problems.append(
                f"{folder}: {name}: config.json says shape {shape}, the file has {tuple(found[name].shape)}"
            )
    extra = [name for name in found if name not in graph.shapes]
    if extra and not problems:
        problems.append(f"{folder}: {len(extra)} tensors are not part of {config.model_type}, first {extra[0]}")
    elif extra:
        problems.append(f"{folder}: unexpected tensors, first {extra[0]}")
    if problems:
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise LayoutError("\n".join(problems[:8] + more))
    return Checkpoint(folder, config, graph, shards, found)


def fingerprint(checkpoint: Checkpoint, progress: Callable[[int], object] | None = None) -> str:
    """sha256 over the names, dtypes, shapes and bytes of all tensors; refuses NaN and infinite weights on the way.

    Does not depend on how tensors are spread over files. Collective: each rank reads its share.
    """

    def digest(name: str) -> str:
        with checkpoint.shards.read([name]) as params:
            p = params[name]
            require_finite(name, p)
            head = f"{name} {p.dtype} {tuple(p.shape)}".encode()
            data = p.reshape(-1).view(torch.uint8).numpy().data if p.numel() else b""
            inner = hashlib.sha256(head)
            inner.update(data)
            if progress is not None:
                progress(p.nbytes)
            return inner.hexdigest()

    names = sorted(checkpoint.params)
    mine = names[rank() :: world()]
    # hashing releases the interpreter
    with together("checking weights"), ThreadPoolExecutor(max_workers=2) as pool:
        told = dict(zip(mine, pool.map(digest, mine), strict=True))
    digests = {name: text for share in everyones(told, "checking weights") for name, text in share.items()}
    return hashlib.sha256("\n".join(digests[name] for name in names).encode()).hexdigest()


def copy_side_files(source: Path, target: Path) -> tuple[str, ...]:
    """Tokenizer, chat template, generation config and the like: checked to be readable, then copied. Returns names."""
    names = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.suffix not in _SIDE_SUFFIXES or path.name in _OURS:
            continue
        if path.suffix == ".json":
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise LayoutError(f"{path}: not JSON: {error}; mend or remove it") from error
        shutil.copyfile(path, target / path.name)
        names.append(path.name)
    return tuple(names)


def quantized_config(config: Mapping[str, Any], graph: Graph, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """`config.json` of the output: the input's, with the `quantization_config` of compressed-tensors.

    Modules that share a scheme form a group, targeted by class where that is exact; every other module of a targeted
    class is in `ignore` by its explicit name, since some readers do not understand patterns there.
    """
    if not schemes:
        return dict(config)
    formats = formats_of(schemes, graph)
    classes = {name: graph.linears[name].cls for name in schemes}
    members: dict[tuple[Scheme, str], list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault((scheme, formats[name]), []).append(name)
    # a class is a safe target when all its quantized modules are of one group
    by_class = all(
        len({key for key, names in members.items() if cls in {classes[n] for n in names}}) == 1
        for cls in set(classes.values())
    )
    groups = {
        f"group_{index}": {
            "targets": sorted({classes[name] for name in names}) if by_class else names,
            "weights": _args_config(scheme.weights),
            "input_activations": _args_config(scheme.input_activations),
            "output_activations": None,
            "format": kind,
        }
        for index, ((scheme, kind), names) in enumerate(members.items())
    }
    targeted = set(classes.values()) if by_class else set()
    # a loader counts subclasses among a targeted class, so those of a class of their own are named too
    unlike = {x.cls for x in graph.linears.values()} - {"Linear", "Embedding"} if targeted else set()
    ignore = [x.name for x in graph.linears.values() if x.cls in targeted | unlike and x.name not in schemes]
    kinds = {kind for _, kind in members}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    out = {**config, "quantization_config": quantization}
    if must_untie(schemes, graph):
        out["tie_word_embeddings"] = False
    elif _decode_while_loading(schemes, graph):
        quantization["dequantize"] = True
    return out


def _decode_while_loading(schemes: Mapping[str, Scheme], graph: Graph) -> bool:
    """True when transformers must decode to float while it loads, which other readers ignore.

    Its other way, keeping codes, cannot look up packed embeddings or tie them, and fails on packed zero points (seen
    with transformers 5.24 and compressed-tensors 0.20.1: the module it prepares expects them unpacked).
    """
    if any(scheme.input_activations is not None for scheme in schemes.values()):
        return False
    embedding = any(graph.linears[name].cls == "Embedding" for name in schemes)
    return embedding or any(not scheme.weights.symmetric for scheme in schemes.values())


def _args_config(args: QuantArgs | None) -> dict[str, Any] | None:
    if args is None:
        return None
    observer = None if args.dynamic else "memoryless_minmax"
    return {"type": "int", **asdict(args), "block_structure": None, "actorder": None, "observer": observer}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
