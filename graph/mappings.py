"""Mappings that a user gives by name: which linears read what a producer makes. Each is proved before it is used."""

from collections.abc import Mapping, Sequence

from ._errors import PlanError
from .patterns import check_patterns, matches, unmatched
from .types import Axis, Graph, Linear, Symmetry


def resolve_mappings(graph: Graph, mappings: Sequence[Sequence], where: str) -> tuple[Symmetry, ...]:
    """Symmetries from user mappings, each `[[linear patterns], norm pattern]` or `[[linear patterns], linear pattern]`.

    Within each block, the linears that the patterns match must be all the readers of what one producer makes. A mapping
    that is one of the graph's symmetries is that symmetry; any other must pass the same proof. Raises `PlanError` with
    every mapping that does not fit.
    """
    found: list[Symmetry] = []
    problems: list[str] = []
    names = {**graph.modules, **{name: x.cls for name, x in graph.linears.items()}}
    for mapping in mappings:
        shaped = isinstance(mapping, Sequence) and not isinstance(mapping, str) and len(mapping) == 2
        if not shaped or isinstance(mapping[0], str):
            problems.append(f"{where}: a mapping is [[linear patterns], producer pattern], got {mapping!r}")
            continue
        consumers, producers = tuple(mapping[0]), mapping[1]
        producers = (producers,) if isinstance(producers, str) else tuple(producers)
        bad = check_patterns((*consumers, *producers), where)
        bad = bad or unmatched((*consumers, *producers), names, where)
        problems += bad
        if not bad:
            _resolve(graph, names, consumers, producers, where, found, problems)
    if problems:
        raise PlanError(problems)
    return tuple(found)


def _resolve(
    graph: Graph, modules: Mapping[str, str], consumers, producers, where: str, found: list, problems: list[str]
) -> None:
    """Pair producers with linears block by block; append to `found` or `problems`."""
    by_block: dict[int | None, list[str]] = {}
    for name, cls in modules.items():
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


def _pair(graph: Graph, producer: str, linears: list[Linear], where: str, found: list, problems: list[str]) -> None:
    """One mapping in one block: a symmetry that the graph has, or one to be proved."""
    chosen = {linear.name for linear in linears}
    known = [s for s in graph.symmetries if s.name == producer and chosen & set(s.linears)]
    if known:
        missing = [name for name in known[0].linears if name not in chosen]
        more = chosen - set(known[0].linears)
        if missing:
            read = "reads" if len(missing) == 1 else "read"
            problems.append(
                f"{where}: {producer}: {', '.join(missing)} {read} the same activation; add it to the mapping"
            )
        elif more:
            problems.append(f"{where}: {producer}: {', '.join(sorted(more))} does not read what it makes")
        else:
            found.append(known[0])
        return
    symmetry = named_symmetry(graph, producer, [linear.name for linear in linears])
    if isinstance(symmetry, str):
        problems.append(f"{where}: {symmetry}")
    elif graph.prove is None:
        problems.append(
            f"{where}: {producer}: the mapping cannot be proved, since this graph was made without a config"
        )
    else:
        proved, proof = graph.prove(producer, symmetry.linears)
        if proved is None:
            problems.append(
                f"{where}: {producer} -> {', '.join(symmetry.linears)}: {_why_not(graph, producer, proof.reason)}"
            )
        else:
            found.append(proved)


def _why_not(graph: Graph, producer: str, measured: str) -> str:
    """The figures of the proof, and what the trace says of the producer."""
    reasons = next((r.reasons for r in graph.rejected if r.name == producer), ())
    known = next((s for s in graph.symmetries if s.name == producer), None)
    if known is not None:
        return f"the function changes ({measured}); {producer} is read by {', '.join(known.linears)}"
    return f"the function changes ({measured})" + (
        f"; {producer} is bound by {'; '.join(reasons[:2])}" if reasons else ""
    )


def named_symmetry(graph: Graph, producer: str, names: Sequence[str], offset: float = 0.0) -> Symmetry | str:
    """What a mapping means: all channels of a norm, or all rows of a linear, to the columns of linears; or a problem.

    `offset`: the norm multiplies by `offset + weight`.
    """
    linears = [graph.linears[name] for name in names]
    width = linears[0].fan_in
    for linear in linears:
        if linear.fan_in != width or linear.site is None:
            return f"{producer}: {linear.name} reads {linear.fan_in} channels, {linears[0].name} reads {width}"
    made = graph.linears.get(producer)
    weight, bias = (made.weight, made.bias) if made else (f"{producer}.weight", f"{producer}.bias")
    weight = graph.ties.get(weight, weight)
    dim = 0 if made is None or not made.transposed else len(made.shape) - 1
    shape = graph.shapes.get(weight)
    if shape is None or shape[dim] != width or len(shape) > 2:
        return f"{weight}: expected {width} channels to scale, found {'none' if shape is None else f'shape {shape}'}"
    producers = [Axis(param=weight, dim=dim, size=width, offset=0.0 if made else offset)]
    if bias is not None and graph.shapes.get(bias) == (width,):
        producers.append(Axis(param=bias, dim=0, size=width))
    sites = list(dict.fromkeys(linear.site for linear in linears if linear.site is not None))
    return Symmetry(
        name=producer,
        kind="norm" if made is None else "up_down",
        width=width,
        producers=tuple(producers),
        consumers=tuple(Axis(param=graph.ties.get(x.weight, x.weight), dim=x.column_dim, size=width) for x in linears),
        linears=tuple(names),
        site=sites[0],
        more_sites=tuple(sites[1:]),
    )
