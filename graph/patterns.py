"""Patterns on names: exact, `re:` (anchored at the start, as compressed-tensors matches) or a class name."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from ._errors import PlanError
from .types import Axis, Graph, Linear, Symmetry


def matches(pattern: str, name: str, cls: str = "") -> bool:
    """True when `pattern` is the module's name, its class, or `re:` and a regex that matches from its start on."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (name, cls)


def check_patterns(patterns: Iterable[str], where: str) -> list[str]:
    """Problems with the regexes themselves."""
    problems = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            problems.append(f"{where}: expected a pattern as a string, got {pattern!r}")
        elif pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                problems.append(f"{where}: {pattern!r} is not a regular expression: {error}")
    return problems


def unmatched(patterns: Iterable[str], modules: Mapping[str, str], where: str) -> list[str]:
    """One problem for each pattern that matches no module, with the nearest names."""
    problems = []
    for pattern in patterns:
        if not any(matches(pattern, name, cls) for name, cls in modules.items()):
            candidates = [*modules, *sorted(set(modules.values()))]
            near = difflib.get_close_matches(pattern.removeprefix("re:"), candidates, n=3, cutoff=0.3)
            hint = f"; nearest names: {', '.join(near)}" if near else ""
            problems.append(f"{where}: pattern {pattern!r} matches none of the {len(modules)} modules{hint}")
    return problems


def resolve_mappings(graph: Graph, mappings: Sequence[Sequence], where: str) -> tuple[Symmetry, ...]:
    """Symmetries from user mappings, each `[[linear patterns], norm pattern]` or `[[linear patterns], linear pattern]`.

    Within each block, the linears that the patterns match must be all the readers of one activation that one producer
    makes. Raises `PlanError` with every mapping that does not fit.
    """
    found: list[Symmetry] = []
    problems: list[str] = []
    for mapping in mappings:
        shaped = isinstance(mapping, Sequence) and not isinstance(mapping, str) and len(mapping) == 2
        if not shaped or isinstance(mapping[0], str):
            problems.append(f"{where}: a mapping is [[linear patterns], producer pattern], got {mapping!r}")
            continue
        consumers, producers = tuple(mapping[0]), mapping[1]
        producers = (producers,) if isinstance(producers, str) else tuple(producers)
        bad = check_patterns((*consumers, *producers), where)
        bad = bad or unmatched((*consumers, *producers), graph.modules, where)
        problems += bad
        if not bad:
            _resolve(graph, consumers, producers, where, found, problems)
    if problems:
        raise PlanError(problems)
    return tuple(found)


def _resolve(graph: Graph, consumers, producers, where: str, found: list[Symmetry], problems: list[str]) -> None:
    """Pair producers with linears block by block; append to `found` or `problems`."""
    by_block: dict[int | None, list[str]] = {}
    for name, cls in graph.modules.items():
        if any(matches(p, name, cls) for p in producers):
            by_block.setdefault(graph.block_of(name), []).append(name)
    for block, names in by_block.items():
        linears = [
            linear
            for linear in graph.linears.values()
            if linear.block == block and any(matches(p, linear.name, linear.cls) for p in consumers)
        ]
        label = f"block {graph.blocks[block]}" if block is not None else "outside all blocks"
        if len(names) > 1:
            problems.append(f"{where}: {label}: {len(names)} producers match ({', '.join(names)}); name one")
        elif not linears:
            problems.append(f"{where}: {label}: {names[0]} is matched, but no linear is ({', '.join(consumers)})")
        else:
            _pair(graph, names[0], linears, where, found, problems)


def norm_symmetry(graph: Graph, norm: str, linears: Sequence[Linear]) -> Symmetry:
    """The symmetry between a norm's weight (and bias) and all the linears that read its output."""
    width = linears[0].shape[0 if linears[0].transposed else -1]
    weight, bias = f"{norm}.weight", f"{norm}.bias"
    producers = [Axis(param=weight, dim=0, size=width, offset=graph.offsets.get(weight, 0.0))]
    if bias in graph.shapes:
        producers.append(Axis(param=bias, dim=0, size=width))
    return Symmetry(
        name=norm,
        kind="norm",
        width=width,
        producers=tuple(producers),
        consumers=tuple(Axis(param=x.weight, dim=0 if x.transposed else 1, size=width) for x in linears),
        linears=tuple(x.name for x in linears),
        site=linears[0].site or linears[0].name,
    )


def _pair(graph: Graph, producer: str, linears: list[Linear], where: str, found: list, problems: list[str]) -> None:
    """One mapping in one block: all readers of one activation, made by `producer`."""
    sites = sorted({linear.site or linear.name for linear in linears})
    if len(sites) > 1:
        named = ", ".join(linear.name for linear in linears)
        problems.append(
            f"{where}: {producer}: {named} read {len(sites)} different activations; map each one separately"
        )
        return
    site = graph.sites[sites[0]]
    missing = [name for name in site.linears if name not in {linear.name for linear in linears}]
    if missing:
        problems.append(f"{where}: {producer}: {', '.join(missing)} reads the same activation; add it to the mapping")
        return
    known = next((s for s in graph.symmetries if s.name == producer and s.site == site.name), None)
    if known is None and producer in graph.linears:
        problems.append(
            f"{where}: {producer} -> {linears[0].name}: no symmetry between these linears is known for this "
            "architecture; map from a norm, or leave this mapping out"
        )
    elif known is None and site.producer != producer:
        made = f"the output of {site.producer}" if site.producer else "an activation whose producer is not known"
        problems.append(f"{where}: {linears[0].name} reads {made}, not the output of {producer}")
    elif known is None and graph.shapes.get(f"{producer}.weight") != (site.width,):
        shape = graph.shapes.get(f"{producer}.weight")
        problems.append(f"{where}: {producer}.weight: expected shape ({site.width},) to scale, found {shape}")
    else:
        found.append(known or norm_symmetry(graph, producer, linears))
