"""Prove symmetries: the output of a narrow instance does not move along the orbit that rescales its parameters.

For a symmetry with producers p and consumers q, and a direction d of one number for each class, the orbit is
p(t) = p exp(-t d), q(t) = q exp(t d). The derivative of the output at t = 0, by `torch.func.jvp` in float64, is zero up
to rounding; when only the consumers move it is not, which is the negative control. Where an operator has no forward
derivative, outputs at t = 0 and t = 1 are compared instead.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...transforms._smooth import per_channel, spread
from .._errors import first_line
from ..mappings import named_symmetry
from ..skeleton import example_inputs, new_model, skeleton
from ..types import Axis, Graph, Proof, Symmetry
from .narrow import narrowed
from .structure import structure_of
from .trace import main_output, use_plain_operators

_MAX_PARAMETERS = 1 << 29  # 4 GiB in float64


@dataclass(frozen=True, slots=True)
class Instance:
    """A narrow model in float64 with weights drawn at random, its graph, and inputs."""

    model: nn.Module
    graph: Graph
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    note: str  # what was made smaller


def find_instance(config: Any, graph: Graph) -> Instance | str:
    """The smallest instance of `config` with a counterpart for everything in `graph`, or why there is none."""
    wanted, problem = _parts(graph), "no narrow instance was tried"
    for note, make in narrowed(config):
        try:
            small = make()
            model = skeleton(small)
            count = sum(p.numel() for p in model.parameters())
            if count > _MAX_PARAMETERS:
                problem = f"{note}: {count:,} parameters are too many to run in float64"
                continue
            narrow_graph = structure_of(model)
            missing = wanted - _parts(narrow_graph)
            if missing or (narrow_graph.untraced is None) != (graph.untraced is None):
                problem = f"{note}: {len(missing)} parts have no counterpart"
                continue
            return _instance(small, narrow_graph, note)
        except Exception as error:  # whatever the model's own code raises at sizes that it does not foresee
            problem = f"{note}: {type(error).__name__}: {first_line(error)}"
    return problem


def _parts(graph: Graph) -> set[tuple]:
    """Everything that must have a counterpart: blocks, and symmetries by their keys."""
    blocks = signatures(graph)
    return {*blocks, *keys_of(graph, blocks).values()}


def _instance(config: Any, graph: Graph, note: str) -> Instance:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = new_model(config).double()
    use_plain_operators(model, "eager")  # the grouped matmul has no float64
    params = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(generator=generator)
            # norms and biases away from their start, matrices that keep the size of what they multiply
            p.mul_(0.25).add_(1.0 if name.endswith("weight") else 0.0) if p.ndim == 1 else p.div_(p.shape[-1] ** 0.5)
            p.requires_grad_(False)
            params[name] = p
    inputs: dict[str, Tensor] = {}
    for name, x in example_inputs(model).items():
        if x.is_floating_point():
            inputs[name] = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        else:
            inputs[name] = torch.randint(0, _vocabulary(model), (2, 2 * x.shape[1]), generator=generator)
    _forward(model, params, inputs)
    return Instance(model, graph, params, inputs, note)


def _vocabulary(model: nn.Module) -> int:
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    named = getattr(model.config, "vocab_size", None)
    return min(named, *tables) if isinstance(named, int) else min(tables)


def _forward(model: nn.Module, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # masks that are made on the way must hold the lowest float64
        with _InFloat64():
            return main_output(torch.func.functional_call(model, dict(params), kwargs=dict(inputs)))
    finally:
        torch.set_default_dtype(usual)


class _InFloat64(TorchFunctionMode):
    """Norms, softmax and routers that ask for float32 get float64, so that a proof is not blurred by rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args, kwargs = tree_map_only(torch.dtype, lambda d: wide.get(d, d), (args, kwargs or {}))
        return func(*args, **kwargs)


def prove(instance: Instance, symmetry: Symmetry) -> Proof:
    """Differentiate the output of the instance along the orbit of one of its own symmetries."""
    direction = torch.randn(symmetry.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    both = _exponents(instance, direction, symmetry.producers, symmetry.consumers)
    half = _exponents(instance, direction, (), symmetry.consumers)
    rest = _exponents(instance, direction, symmetry.producers, ())
    twice = [n for n in half if n in rest and bool((half[n][0] * rest[n][0]).any())]
    if twice:  # 1/s and s on the same numbers change nothing, which would pass for a symmetry
        return Proof(method="none", error=f"{', '.join(twice)} would be scaled both ways")
    for method, move in (("jvp", _derivative), ("finite", _difference)):
        try:
            with torch.no_grad():
                return Proof(method=method, change=move(instance, both), control=move(instance, half))
        except (RuntimeError, NotImplementedError) as error:
            failure = f"{type(error).__name__}: {first_line(error)}"
    return Proof(method="none", error=failure)


def _exponents(
    instance: Instance, direction: Tensor, producers: Iterable[Axis], consumers: Iterable[Axis]
) -> dict[str, tuple[Tensor, float]]:
    """Parameter -> the exponent of each of its elements at t = 1, and its offset."""
    out: dict[str, tuple[Tensor, float]] = {}
    for sign, axes in ((-1.0, producers), (1.0, consumers)):
        for axis in axes:
            p = instance.params[axis.param]
            exponent, _ = out.get(axis.param, (torch.zeros_like(p), 0.0))
            own = spread(per_channel(direction, axis.classes, rest=0.0), axis, p)
            exponent.narrow(axis.dim, axis.start, axis.size).add_(sign * own)
            out[axis.param] = (exponent, axis.offset)
    return out


def _derivative(instance: Instance, exponents: Mapping[str, tuple[Tensor, float]]) -> float:
    primals = {name: instance.params[name] for name in exponents}
    tangents = {name: (instance.params[name] + offset) * e for name, (e, offset) in exponents.items()}
    result = torch.func.jvp(
        lambda p: _forward(instance.model, {**instance.params, **p}, instance.inputs), (primals,), (tangents,)
    )
    out, moved = result[0], result[1]
    return float(moved.double().norm() / out.double().norm())


def _difference(instance: Instance, exponents: Mapping[str, tuple[Tensor, float]]) -> float:
    moved = {name: (instance.params[name] + offset) * e.exp() - offset for name, (e, offset) in exponents.items()}
    before = _forward(instance.model, instance.params, instance.inputs).double()
    after = _forward(instance.model, {**instance.params, **moved}, instance.inputs).double()
    return float((after - before).norm() / before.norm())


def signatures(graph: Graph) -> list[tuple]:
    """What each block is made of: modules and symmetries, without sizes and without its own number."""
    modules: list[list] = [[] for _ in graph.blocks]
    for name, cls in graph.modules.items():
        block = graph.block_of(name)
        if block is not None and name != graph.blocks[block]:
            modules[block].append((name.removeprefix(graph.blocks[block]), cls))
    symmetries: list[list] = [[] for _ in graph.blocks]
    for s in graph.symmetries:
        block = graph.block_of(_first(s))
        if block is not None:
            symmetries[block].append(_shape_of(s, graph.blocks[block]))
    return [
        (prefix.rpartition(".")[0], tuple(own), tuple(sorted(shapes)))
        for prefix, own, shapes in zip(graph.blocks, modules, symmetries, strict=True)
    ]


def keys_of(graph: Graph, blocks: Sequence[tuple]) -> dict[str, tuple]:
    """Symmetry -> a key that its counterpart in an instance of other sizes has too. `blocks`: their signatures."""
    keys = {}
    for s in graph.symmetries:
        block = graph.block_of(_first(s))
        keys[s.name] = _shape_of(s, "") if block is None else (blocks[block], _shape_of(s, graph.blocks[block]))
    return keys


def _shape_of(symmetry: Symmetry, prefix: str) -> tuple:
    def general(name: str) -> str:
        own = prefix and name.startswith(f"{prefix}.")
        return name.removeprefix(prefix) if own else re.sub(r"\.\d+(?=\.|$)", ".#", name)

    sides = (symmetry.producers, symmetry.consumers)
    axes = tuple(tuple(sorted({(general(a.param), a.dim, a.stack is None) for a in side})) for side in sides)
    return symmetry.kind, general(symmetry.name), axes


def _first(symmetry: Symmetry) -> str:
    return symmetry.name.split(":")[0]


def prove_all(graph: Graph, find: Callable[[], Instance | str]) -> dict[str, Proof]:
    """A proof for every symmetry of `graph` on the instance that `find` returns. Blocks that are alike share one."""
    if not graph.symmetries:
        return {}
    instance = find()
    if isinstance(instance, str):
        return {
            s.name: Proof(method="none", error=f"no instance to prove it on ({instance})") for s in graph.symmetries
        }
    narrow_keys = keys_of(instance.graph, signatures(instance.graph))
    counterparts = {narrow_keys[s.name]: s for s in instance.graph.symmetries}
    known: dict[tuple, Proof] = {}
    proofs = {}
    for name, key in keys_of(graph, signatures(graph)).items():
        if key not in known:
            known[key] = prove(instance, counterparts[key])
        proofs[name] = known[key]
    return proofs


def prove_mapping(
    graph: Graph, find: Callable[[], Instance | str], producer: str, names: Sequence[str]
) -> tuple[Symmetry | None, Proof]:
    """The symmetry that a user's mapping means in `graph`, if it holds on the instance that `find` returns."""
    instance = find()
    if isinstance(instance, str):
        return None, Proof(method="none", error=f"no instance to prove it on ({instance})")
    there = _counterparts(graph, instance.graph, (producer, *names))
    proof = Proof(method="none", error=f"{producer} has no counterpart on the narrow instance ({instance.note})")
    for offset in (0.0, 1.0):  # norms multiply by w, or by 1 + w
        ours = named_symmetry(graph, producer, names, offset)
        if there is None or isinstance(ours, str):
            break
        theirs = named_symmetry(instance.graph, there[0], there[1:], offset)
        if isinstance(theirs, str):
            return None, Proof(method="none", error=theirs)
        proof = prove(instance, theirs)
        if proof.holds:
            return ours, proof
    return None, proof


def _counterparts(graph: Graph, narrow: Graph, names: Iterable[str]) -> list[str] | None:
    """The modules of the narrow instance that stand for these, None if one of them has none."""
    ours, theirs = signatures(graph), signatures(narrow)
    there = []
    for name in names:
        block = graph.block_of(name)
        if block is None:
            there.append(name)
        elif ours[block] in theirs:
            there.append(narrow.blocks[theirs.index(ours[block])] + name.removeprefix(graph.blocks[block]))
        else:
            return None
    return there
