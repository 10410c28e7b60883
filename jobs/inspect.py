"""Show what a model is for this library: linears, activations, proved symmetries, and what is left out, and why."""

import json
import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..graph import Graph, LayoutError
from ..graph.build import build_graph
from ..graph.skeleton import load_config, model_class
from .folding import Part, braces, columns, figures, fold, owners_of, why
from .plots import can_plot
from .smollm2 import model_folder

Row = tuple[list[str], ...]

_UNTRACED = """\
The activations and symmetries of this model are not known. Its weights can be quantized. To equalize, give the stage
mappings, [[linear patterns], producer pattern], which are proved on real tensors before they are used, such as
    mappings: [[["re:.*[qkv]_proj"], "re:.*input_layernorm"]]
or leave the equalization stage out of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The graph of a model, and what it took. `cls` is the class of transformers, `files` what was written."""

    model: str
    model_type: str
    cls: str
    graph: Graph
    seconds: float
    files: tuple[str, ...] = ()

    def table(self) -> str:
        """For a terminal. Blocks that are alike are shown once, and names inside a block leave out its own."""
        parts = fold(self.graph)
        sections = [
            _header(self, parts),
            *("\n".join((title, *_section(head, rows_of, parts, self.graph))) for title, head, rows_of in _SECTIONS),
        ]
        if self.graph.untraced is not None:
            sections = [f"NOT TRACED: {self.graph.untraced}\n{_UNTRACED}", *sections]
        return "\n\n".join(sections)

    def to_json(self) -> dict[str, Any]:
        """Everything, block by block, as plain values; a number that is not finite is None."""
        graph = self.graph
        return {
            "model": self.model,
            "model_type": self.model_type,
            "class": self.cls,
            "seconds": self.seconds,
            "untraced": graph.untraced,
            "blocks": list(graph.blocks),
            "ties": dict(graph.ties),
            "linears": [_plain(asdict(x)) for x in graph.linears.values()],
            "sites": [_plain(asdict(x)) for x in graph.sites.values()],
            "symmetries": [_plain(asdict(x)) for x in graph.symmetries],
            "rejected": [_plain(asdict(x)) for x in graph.rejected],
            "proofs": {name: {**_plain(asdict(p)), "holds": p.holds} for name, p in graph.proofs.items()},
            "modules": dict(graph.modules),
            "shapes": _plain(graph.shapes),
        }


def inspect(model: str | Path, output_dir: str | Path | None = None) -> Inspection:
    """Trace the model that `model/config.json` describes, and prove its symmetries. No weights are read.

    `model` is a folder, or "smollm2", the demo model. Into `output_dir` go `inspect.json` and, where matplotlib is
    installed, `graph.svg`. Raises `LayoutError` when the folder has no config, or one of an unknown model type.
    """
    start = time.perf_counter()
    folder = model_folder(model)
    config = load_config(folder)
    graph = build_graph(config, cache=folder)
    found = Inspection(
        model=str(model),
        model_type=config.model_type,
        cls=model_class(config).__name__,
        graph=graph,
        seconds=round(time.perf_counter() - start, 3),
    )
    return found if output_dir is None else replace(found, files=_write(found, Path(output_dir)))


def _write(found: Inspection, folder: Path) -> tuple[str, ...]:
    if folder.exists() and not folder.is_dir():
        raise LayoutError(f"output_dir: {folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "inspect.json"]
    files[0].write_text(_text(found.to_json()), encoding="utf-8")
    if can_plot():
        from .graph_plot import plot_graph

        if plot_graph(found.graph, folder / "graph.svg", f"{found.model} ({found.cls})"):
            files.append(folder / "graph.svg")
    return tuple(str(path) for path in files)


def _text(value: Mapping[str, Any]) -> str:
    """JSON with one line for each linear, site and symmetry: classes of channels are long lists."""

    def lines(item: Any) -> str:
        if isinstance(item, list) and item:
            return "[\n  " + ",\n  ".join(json.dumps(x, allow_nan=False) for x in item) + "\n ]"
        if isinstance(item, dict) and item:
            pairs = (f"{json.dumps(k)}: {json.dumps(x, allow_nan=False)}" for k, x in item.items())
            return "{\n  " + ",\n  ".join(pairs) + "\n }"
        return json.dumps(item, allow_nan=False)

    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {lines(item)}" for name, item in value.items()) + "\n}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _header(found: Inspection, parts: Sequence[Part]) -> str:
    graph = found.graph
    unseen = sum(site.module is None for site in graph.sites.values())
    kinds = _counts(s.kind for s in graph.symmetries)
    rows = [
        ("model", f"{found.model} ({found.model_type})"),
        ("class", found.cls),
        ("blocks", ", ".join(f"{p.label}{_alike(p)}" for p in parts if p.prefix) or "none"),
        ("linears", f"{len(graph.linears)}: {_counts(x.cls or 'parameter' for x in graph.linears.values())}"),
        ("sites", f"{len(graph.sites)}" + (f", {unseen} of them not observable" if unseen else "")),
        ("symmetries", f"{len(graph.symmetries)}" + (f": {kinds}" if kinds else "")),
        ("rejected", str(len(graph.rejected))),
        *(("tie", f"{alias} -> {stored}") for alias, stored in graph.ties.items()),
        ("seconds", f"{found.seconds:.1f}, no weights read"),
    ]
    return "\n".join(f"{name:<10}  {value}" for name, value in rows)


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _section(
    head: Sequence[str], rows_of: Callable[[Part, Graph], list[Row]], parts: Sequence[Part], graph: Graph
) -> list[str]:
    """One table over all parts, so that its columns line up, with a line that names each part."""
    rows = {part.label: rows_of(part, graph) for part in parts}
    if not any(rows.values()):
        return ["  none"]
    first, *texts = columns([[[name] for name in head], *(row for part in rows.values() for row in part)])
    out, rest = list(first), iter(texts)
    for part in parts:
        if rows[part.label]:
            out.append(part.label + _alike(part))
            out += (line for _ in rows[part.label] for line in next(rest))
    return out


def _alike(part: Part) -> str:
    return f" ({part.count} alike)" if part.count > 1 else ""


def _symmetry_rows(part: Part, graph: Graph) -> list[Row]:
    rows: list[Row] = []
    for s in part.symmetries:
        site = part.short(s.site) if s.site else "none" if s.kind == "q_k" else "not observable"
        more = [f"and {part.short(name)}" for name in s.more_sites]
        sides = [_owner_lines(part, owners_of(graph, side)) for side in (s.producers, s.consumers)]
        rows.append(([s.kind], *sides, [f"{s.width:>6}"], [site, *more], [figures(graph.proofs.get(s.name))]))
    return rows


def _site_rows(part: Part, graph: Graph) -> list[Row]:
    rows: list[Row] = []
    for site in part.sites:
        module = "not observable" if site.module is None else part.short(site.module)
        rows.append((braces(map(part.short, site.linears)), [f"{site.width:>5}"], [module]))
    return rows


def _rejected_rows(part: Part, graph: Graph) -> list[Row]:
    rows: list[Row] = []
    for r in part.rejected:
        rows.append(([r.kind], [part.short(r.name)], textwrap.wrap(why(part, r.reasons), 80)))
    return rows


def _owner_lines(part: Part, owners: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of modules; those that scale in part have notes below them."""
    lines = braces(part.short(name) for name, notes in owners.items() if not notes)
    for name, notes in owners.items():
        if notes:
            lines += [part.short(name), *(f"  {note}" for note in notes)]
    return lines


_SECTIONS = (
    (
        "SYMMETRIES: 1/s to the producer, s to the consumers",
        ("kind", "producer", "consumers", "scales", "site", "proof: change / control"),
        _symmetry_rows,
    ),
    (
        "SITES: activations, and the linears that read them",
        ("linears", "width", "observed at the input of"),
        _site_rows,
    ),
    (
        "REJECTED: producers whose channels cannot be rescaled (* is the block)",
        ("kind", "producer", "why"),
        _rejected_rows,
    ),
)
