"""Build a `Graph` from a model's config: linears, sites, ties and blocks of any causal language model.

Linears and blocks come from module classes; which linears read one activation comes from one forward on fake tensors;
symmetries come from names, for the Llama, OPT and GPT-2 families.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from .patterns import norm_symmetry
from .skeleton import norm_offset, skeleton, tied_names, trace_reads
from .types import Axis, Graph, Linear, Site, Symmetry


def build_graph(config: Any) -> Graph:
    """The graph of the causal language model that `config` describes. No weights are made or read.

    The last few graphs are kept: a sweep asks for the same one again and again.
    """
    return _build_graph(_Config(config))


class _Config:
    """A config that equals every other with the same contents, so that it can be a key."""

    def __init__(self, config: Any):
        self.config = config
        self.text = f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.text == other.text


@lru_cache(maxsize=4)
def _build_graph(key: _Config) -> Graph:
    return graph_of(skeleton(key.config), key.config)


def graph_of(model: nn.Module, config: Any) -> Graph:
    """The graph of an instance. Only its structure is used; the instance must be on the meta device."""
    modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
    ties = tied_names(model)
    blocks = _blocks(model)
    contracted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    reads = trace_reads(model, contracted)
    graph = Graph(
        linears={},
        sites={},
        ties=ties,
        blocks=blocks,
        modules=modules,
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
        offsets=_offsets(model),
    )
    site_of = {name: names[0] for names in reads.groups for name in names}
    find_table = getattr(model, "get_input_embeddings", None)
    table = find_table() if callable(find_table) else None
    linears = {
        name: _linear(name, module, site_of.get(name), graph.block_of(name), module is table)
        for name, module in model.named_modules()
        if name in contracted or isinstance(module, nn.Embedding)
    }
    sites = {
        names[0]: Site(
            name=names[0],
            width=_fan_in(linears[names[0]]),
            linears=tuple(names),
            producer=reads.producers.get(names[0]),
            block=graph.block_of(names[0]),
        )
        for names in reads.groups
    }
    graph = replace(graph, linears=linears, sites=sites)
    family = next((f for f in _FAMILIES if config.model_type in f[0]), None)
    if family is None:
        return graph
    graph = replace(graph, family=family[0][0])
    return replace(graph, symmetries=tuple(s for prefix in blocks for s in family[1](graph, prefix, config)))


def _fan_in(linear: Linear) -> int:
    return linear.shape[0] if linear.transposed else linear.shape[-1]


def _linear(name: str, module: nn.Module, site: str | None, block: int | None, is_table: bool) -> Linear:
    cls = "Embedding" if is_table else _class(module)
    return Linear(
        name=name,
        weight=f"{name}.weight",
        shape=tuple(module.get_parameter("weight").shape),
        cls=cls,
        bias=f"{name}.bias" if getattr(module, "bias", None) is not None else None,
        site=site,
        block=block,
        transposed=cls == "Conv1D",
    )


def _class(module: nn.Module) -> str:
    """The class that a quantization scheme targets: subclasses count as Linear or Embedding if they compute the same.

    OPT's learned positions are an embedding that shifts its indices; a loader that replaces its forward breaks it. The
    token embedding is an Embedding whatever it does to its output (Gemma scales it).
    """
    for cls in (nn.Linear, nn.Embedding):
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return cls.__name__
    return type(module).__name__


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """The items of the longest `ModuleList` whose items share one class: the decoder layers."""
    best: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        nested = any(name.startswith(f"{prefix}.") for prefix in best)
        if len(module) > len(best) and not nested:
            best = tuple(f"{name}.{index}" for index in range(len(module)))
    return best


def _offsets(model: nn.Module) -> dict[str, float]:
    """Norm weights that are used as `offset + w`; one evaluation for each norm class."""
    known: dict[type, float] = {}
    offsets = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or weight is None or weight.ndim != 1:
            continue
        if type(module) not in known:
            known[type(module)] = norm_offset(module, weight.shape[0])
        if known[type(module)]:
            offsets[f"{name}.weight"] = known[type(module)]
    return offsets


def _norms(graph: Graph, prefix: str, pairs: Mapping[str, str]) -> list[Symmetry]:
    """Norm -> all readers of the activation that the named linear reads, where that norm made it."""
    found = []
    for norm, first in pairs.items():
        site = graph.sites[graph.linears[f"{prefix}.{first}"].site or ""]
        if site.producer == f"{prefix}.{norm}":
            readers = [graph.linears[name] for name in site.linears]
            found.append(norm_symmetry(graph, f"{prefix}.{norm}", readers))
    return found


def _rows_to_columns(graph: Graph, kind: str, producer: str, consumer: str, classes=None, start: int = 0) -> Symmetry:
    """Output rows of one linear -> input columns of the next; `classes` maps columns to rows."""
    made, read = graph.linears[producer], graph.linears[consumer]
    size = (max(classes) + 1) if classes else _fan_in(read)
    producers = [Axis(param=made.weight, dim=1 if made.transposed else 0, size=size, start=start)]
    if made.bias:
        producers.append(Axis(param=made.bias, dim=0, size=size, start=start))
    consumers = (Axis(param=read.weight, dim=0 if read.transposed else 1, size=_fan_in(read), classes=classes),)
    return Symmetry(
        name=producer,
        kind=kind,
        width=size,
        producers=tuple(producers),
        consumers=consumers,
        linears=(consumer,),
        site=read.site or read.name,
        site_classes=classes,
    )


def _llama(graph: Graph, prefix: str, config: Any) -> list[Symmetry]:
    found = _norms(graph, prefix, {"input_layernorm": "self_attn.q_proj", "post_attention_layernorm": "mlp.gate_proj"})
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    dim = graph.shapes[f"{prefix}.self_attn.v_proj.weight"][0] // groups
    # query head h reads key-value head h // (heads / groups), so its channels share that head's scale
    shared = None
    if heads != groups:
        shared = tuple((h // (heads // groups)) * dim + d for h in range(heads) for d in range(dim))
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    found.append(_rows_to_columns(graph, "v_o", f"{attn}.v_proj", f"{attn}.o_proj", shared))
    found.append(_rows_to_columns(graph, "up_down", f"{mlp}.up_proj", f"{mlp}.down_proj"))
    return found


def _opt(graph: Graph, prefix: str, config: Any) -> list[Symmetry]:
    found = []
    if config.do_layer_norm_before:
        found += _norms(graph, prefix, {"self_attn_layer_norm": "self_attn.q_proj", "final_layer_norm": "fc1"})
    found.append(_rows_to_columns(graph, "v_o", f"{prefix}.self_attn.v_proj", f"{prefix}.self_attn.out_proj"))
    if config.activation_function == "relu":  # homogeneous: relu(x / s) = relu(x) / s
        found.append(_rows_to_columns(graph, "up_down", f"{prefix}.fc1", f"{prefix}.fc2"))
    return found


def _gpt2(graph: Graph, prefix: str, config: Any) -> list[Symmetry]:
    found = _norms(graph, prefix, {"ln_1": "attn.c_attn", "ln_2": "mlp.c_fc"})
    # c_attn stacks q, k and v; the values are its last third
    attn = f"{prefix}.attn"
    found.append(_rows_to_columns(graph, "v_o", f"{attn}.c_attn", f"{attn}.c_proj", start=2 * config.hidden_size))
    return found


_Family = tuple[tuple[str, ...], Callable[[Graph, str, Any], list[Symmetry]]]
_FAMILIES: tuple[_Family, ...] = (
    (("llama", "mistral", "qwen2", "qwen3", "gemma"), _llama),
    (("opt",), _opt),
    (("gpt2",), _gpt2),
)
