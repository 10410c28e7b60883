"""From a model on the meta device to its graph: linears, sites, symmetries (not proved yet), ties and blocks."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from .._errors import LayoutError
from ..skeleton import block_prefixes, example_inputs, tied_names
from ..types import Graph, Linear, Rejection, Site, Symmetry
from .starts import CONTRACTIONS, operands
from .symmetries import Found, find_symmetries, module_of
from .trace import Ref, Trace, trace_forward

# operators after which it is still the same activation, if the last dim is the same
_SAME = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach", "clone", "_to_copy", "expand"}


def structure_of(model: nn.Module) -> Graph:
    """The graph of an instance on the meta device. Symmetries are candidates: they are not proved.

    Where the forward cannot be traced, `untraced` says why, every linear is a site of its own, and no symmetry is
    known.
    """
    graph = Graph(
        linears={},
        sites={},
        ties=tied_names(model),
        blocks=block_prefixes(model),
        modules={name: type(module).__name__ for name, module in model.named_modules() if name},
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
    )
    linears, contracted = _module_linears(model, graph)
    try:
        trace = trace_forward(model, example_inputs(model))
    except LayoutError as error:
        sites = {name: _site(graph, (linears[name],), None, name) for name in contracted}
        return replace(graph, linears=_with_sites(linears, sites), sites=sites, untraced=str(error))
    reads = _reads(trace, linears)
    linears |= _traced_linears(trace, graph, linears, reads)
    sites, roots = _sites(trace, graph, linears, reads, contracted)
    graph = replace(graph, linears=_with_sites(linears, sites), sites=sites)
    found, rejected = find_symmetries(trace)
    symmetries, conflicts = _symmetries(trace, graph, found, roots)
    return replace(graph, symmetries=symmetries, rejected=(*conflicts, *rejected))


def _module_linears(model: nn.Module, graph: Graph) -> tuple[dict[str, Linear], list[str]]:
    """Linear modules and embeddings, and the names of those that read an activation."""
    table = None
    with contextlib.suppress(NotImplementedError, AttributeError):  # a model that reads no tokens
        table = model.get_input_embeddings()  # type: ignore[operator]
    linears, contracted = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
            cls = "Embedding" if module is table else _class(module)
            contracted += [] if isinstance(module, nn.Embedding) else [name]
            linears[name] = Linear(
                name=name,
                weight=f"{name}.weight",
                shape=tuple(module.get_parameter("weight").shape),
                cls=cls,
                bias=f"{name}.bias" if getattr(module, "bias", None) is not None else None,
                block=graph.block_of(name),
                transposed=cls == "Conv1D",
            )
    return linears, contracted


def _class(module: nn.Module) -> str:
    """The class that a quantization scheme targets: subclasses count as Linear or Embedding if they compute the same.

    OPT's learned positions are an embedding that shifts its indices; a loader that replaces its forward breaks it. The
    token embedding is an Embedding whatever it does to its output (Gemma scales it).
    """
    for cls in (nn.Linear, nn.Embedding):
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return cls.__name__
    return type(module).__name__


def _reads(trace: Trace, linears: Mapping[str, Linear]) -> dict[str, tuple[str, int, int]]:
    """Linear -> the parameter that is contracted, its contracted dim from the end, and the activation it reads."""
    reads: dict[str, tuple[str, int, int]] = {}
    for node in trace.nodes:
        if node.name not in CONTRACTIONS:
            continue
        pair = operands(node)
        for x, w, inner in ((pair[0], pair[1], -2), (pair[1], pair[0], -1)):
            value = trace.values[w.id] if isinstance(w, Ref) else None
            if value is not None and value.param is not None and trace.values[x.id].param is None:
                name = node.module if node.module in linears else module_of(value.param)
                contracted = -1 if value.stride[inner] == 1 else -2
                reads.setdefault(name, (value.param, contracted, x.id))
    return reads


def _traced_linears(trace: Trace, graph: Graph, linears, reads) -> dict[str, Linear]:
    """Parameters that are contracted without a linear module: routers, stacks of experts, fused projections."""
    new = {}
    for name, (param, contracted, _) in reads.items():
        owner, _, leaf = param.rpartition(".")
        if name not in linears and param in graph.shapes:
            bias = next(
                (b for b in (f"{owner}.bias" if leaf == "weight" else "", f"{param}_bias") if b in graph.shapes), None
            )
            new[name] = Linear(
                name=name,
                weight=param,
                shape=graph.shapes[param],
                cls=graph.modules.get(owner, ""),
                bias=bias,
                block=graph.block_of(name),
                transposed=contracted == -2,
            )
    return new


def _sites(
    trace: Trace, graph: Graph, linears: Mapping[str, Linear], reads, contracted: Iterable[str]
) -> tuple[dict[str, Site], dict[int, str]]:
    """Sites by name, and the name of the site that a root value is."""
    groups: dict[object, list[Linear]] = {}
    for name, linear in linears.items():
        if name in reads:
            groups.setdefault(root_of(trace, reads[name][2]), []).append(linear)
        elif name in contracted:  # the traced inputs do not reach it
            groups.setdefault(name, []).append(linear)
    given = {module: root_of(trace, number) for module, number in trace.given.items()}
    sites, roots = {}, {}
    for root, members in groups.items():
        owners = [owner for x in members for owner in (x.name, x.weight.rpartition(".")[0])]
        module = next((m for m in owners if given.get(m, m) == root), None)
        site = _site(graph, members, trace.made.get(root) if isinstance(root, int) else None, module)
        sites[site.name] = site
        if isinstance(root, int):
            roots[root] = site.name
    return sites, roots


def root_of(trace: Trace, number: int) -> int:
    """The value that this one is a view or a cast of, channel by channel."""
    while number in trace.makers:
        node = trace.nodes[trace.makers[number]]
        source = node.args[0].id if node.name in _SAME and isinstance(node.args[0], Ref) else None
        if source is None or trace.values[source].shape[-1:] != trace.values[number].shape[-1:]:
            break
        number = source
    return number


def _site(graph: Graph, members: Iterable[Linear], producer: str | None, module: str | None) -> Site:
    members = tuple(members)
    first = members[0]
    return Site(
        name=first.name,
        width=first.fan_in,
        linears=tuple(x.name for x in members),
        producer=producer,
        block=graph.block_of(first.name),
        module=module,
    )


def _with_sites(linears: Mapping[str, Linear], sites: Mapping[str, Site]) -> dict[str, Linear]:
    site_of = {name: site.name for site in sites.values() for name in site.linears}
    return {name: replace(x, site=site_of.get(name)) for name, x in linears.items()}


def _symmetries(
    trace: Trace, graph: Graph, found: Iterable[Found], roots: Mapping[int, str]
) -> tuple[tuple[Symmetry, ...], list[Rejection]]:
    by_weight: dict[str, str] = {}
    for linear in graph.linears.values():
        by_weight.setdefault(graph.ties.get(linear.weight, linear.weight), linear.name)
    order = {name: index for index, name in enumerate(graph.linears)}
    symmetries, conflicts = [], []
    for f in found:
        linears = tuple(
            sorted({by_weight[a.param] for a in f.consumers if a.param in by_weight}, key=order.__getitem__)
        )
        read = {roots[root]: c for n, c in f.reads if (root := root_of(trace, n)) in roots}
        if len(set(read.values())) > 1:
            reason = f"its activation is read in different orders ({', '.join(read)})"
            conflicts.append(Rejection(name=f.name, kind=f.kind, reasons=(reason,)))
            continue
        names = sorted(read, key=order.__getitem__)
        site = next((name for name in names if graph.sites[name].module is not None), None)
        classes = read[site] if site is not None else None
        outside = linears and all(graph.linears[name].block is None for name in linears)
        symmetries.append(
            Symmetry(
                name=f.name,
                kind="head" if f.kind == "norm" and outside and graph.blocks else f.kind,
                width=f.width,
                producers=f.producers,
                consumers=f.consumers,
                linears=linears,
                site=site,
                site_classes=None if classes == tuple(range(f.width)) else classes,
                more_sites=tuple(name for name in names if name != site),
            )
        )
    return tuple(symmetries), conflicts
