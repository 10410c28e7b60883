"""Round weights to integers, round to nearest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..graph import Graph, Linear, PlanError
from ..graph.patterns import check_patterns, matches, unmatched
from ._integer import dequantize, fake_quantize, quantization_parameters, quantize
from ._scheme import QuantArgs, Scheme, make_scheme
from ._types import Params, Stats, Step, spec

FORMS = ("integer", "fake")


def _is_float(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """Round-to-nearest quantization of the weights of linears and embeddings.

    Args:
      scheme: a preset ("W8A8", "W8A16", "W4A16", "W4A16_ASYM"), a `Scheme`, or a mapping
        `{weights: {num_bits, symmetric, strategy, group_size}, input_activations: ...}`.
      group_size: overrides the scheme's.
      targets: classes or modules to quantize: exact names, `re:` regexes, or the classes "Linear", "Embedding".
      ignore: modules to leave as they are, in the same words.
      form: "integer" replaces `X.weight` by int8 codes beside `X.weight_scale` (and `X.weight_zero_point`); "fake"
        keeps `X.weight` in its dtype, rounded to the grid. Both describe exactly the same numbers.
      scale_dtype: name of the dtype of scales, such as "float32"; None is the weight's own.

    A tied head follows its embedding: they are one tensor. Raises `PlanError` for a pattern that matches nothing, a
    group size that does not divide, and a tied pair of which only the head is chosen.
    """

    scheme: str | Scheme | Mapping[str, Any] = "W8A8"
    group_size: int | None = None
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    form: str = "integer"
    scale_dtype: str | None = None

    def __post_init__(self):
        make_scheme(self.scheme, self.group_size)
        if self.form not in FORMS:
            raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {self.form!r}")
        for name in ("targets", "ignore"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name}: expected a list of patterns, got the string {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.scale_dtype is not None and not _is_float(self.scale_dtype):
            raise ValueError(f"scale_dtype: expected a torch dtype's name, got {self.scale_dtype!r}")

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        where = "quantize"
        patterns = (*self.targets, *self.ignore)
        problems = check_patterns(patterns, where)
        # a select() may have taken away linears that a pattern names: patterns are checked against all modules
        problems = problems or unmatched(self.targets, _with_classes(graph), f"{where}: targets")
        problems = problems or unmatched(self.ignore, graph.modules, f"{where}: ignore")
        chosen = [] if problems else self._chosen(graph)
        scheme = make_scheme(self.scheme, self.group_size)
        problems += [p for linear in chosen for p in _problems(linear, specs, graph, chosen, self.ignore)]
        stored = [linear for linear in chosen if linear.weight not in graph.ties]
        if not problems:
            problems += _misfits(stored, specs, scheme.weights.group_size)
        if not problems and not stored:
            problems.append(f"{where}: no module is left: targets {list(self.targets)}, ignore {list(self.ignore)}")
        if problems:
            raise PlanError(problems)
        return tuple(self._step(linear, scheme, specs, graph) for linear in stored)

    def _chosen(self, graph: Graph) -> list[Linear]:
        def named(patterns: tuple[str, ...], linear: Linear) -> bool:
            return any(matches(p, linear.name, linear.cls) for p in patterns)

        # a Conv1D is a linear with its weight transposed
        return [
            linear
            for linear in graph.linears.values()
            if (named(self.targets, linear) or (linear.cls == "Conv1D" and "Linear" in self.targets))
            and not named(self.ignore, linear)
        ]

    def _step(self, linear: Linear, scheme: Scheme, specs: Params, graph: Graph) -> Step:
        weight = specs[linear.weight]
        dtype = getattr(torch, self.scale_dtype) if self.scale_dtype else weight.dtype
        args = scheme.weights
        # every module that reads this very tensor is quantized with it
        tied = [x for x in graph.linears.values() if graph.ties.get(x.weight) == linear.weight]
        schemes = {x.name: scheme if x.cls != "Embedding" else Scheme(weights=args) for x in (linear, *tied)}
        name = f"quantize[{linear.name}]"
        if self.form == "fake":
            fn = partial(_fake, name=linear.weight, args=args, dtype=dtype, transposed=linear.transposed)
            writes = {linear.weight: weight}
            return Step(name=name, reads=(linear.weight,), writes=writes, fn=fn, schemes=schemes, fake=True)
        rows, columns = weight.shape
        shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // (args.group_size or 1))}
        writes = {
            linear.weight: spec(weight.shape, torch.int8),
            f"{linear.weight}_scale": spec(shape[args.strategy], dtype),
        }
        if not args.symmetric:
            writes[f"{linear.weight}_zero_point"] = spec(shape[args.strategy], torch.int8)
        fn = partial(_integer, name=linear.weight, args=args, dtype=dtype)
        return Step(name=name, reads=(linear.weight,), writes=writes, fn=fn, schemes=schemes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dequantize:
    """Back from integer codes to float weights: `(q - zero_point) * scale`, rounded once to `dtype`.

    `schemes` maps linears to their schemes, as `Plan.schemes` gives them. After `Quantize(form="integer")` it leaves
    exactly what `Quantize(form="fake")` leaves.
    """

    schemes: Mapping[str, Scheme]
    dtype: str = "bfloat16"

    def __post_init__(self):
        if not _is_float(self.dtype):
            raise ValueError(f"dtype: expected a float torch dtype's name, got {self.dtype!r}")

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        steps, problems = [], []
        for linear in graph.linears.values():
            if linear.name not in self.schemes or linear.weight in graph.ties:
                continue
            args = self.schemes[linear.name].weights
            reads = [linear.weight, f"{linear.weight}_scale"]
            reads += [] if args.symmetric else [f"{linear.weight}_zero_point"]
            missing = [name for name in reads if name not in specs]
            if missing:
                problems.append(f"dequantize: {linear.name}: expected {missing[0]}; quantize with form='integer' first")
                continue
            dtype = getattr(torch, self.dtype)
            steps.append(
                Step(
                    name=f"dequantize[{linear.name}]",
                    reads=tuple(reads),
                    writes={linear.weight: spec(specs[linear.weight].shape, dtype)},
                    drops=tuple(reads[1:]),
                    fn=partial(_float, name=linear.weight, args=args, dtype=dtype),
                )
            )
        if problems:
            raise PlanError(problems)
        return tuple(steps)


def _integer(params: Params, stats: Stats, *, name: str, args: QuantArgs, dtype: torch.dtype) -> tuple[Params, Stats]:
    w_OI = params[name]
    scale, zero_point = quantization_parameters(w_OI, args, dtype)
    out = {name: quantize(w_OI, scale, zero_point, args), f"{name}_scale": scale}
    if zero_point is not None:
        out[f"{name}_zero_point"] = zero_point
    return out, {}


def _fake(params: Params, stats: Stats, *, name, args, dtype, transposed) -> tuple[Params, Stats]:
    w = params[name]
    rounded = fake_quantize(w.T, args, dtype).T.contiguous() if transposed else fake_quantize(w, args, dtype)
    return {name: rounded}, {}


def _float(params: Params, stats: Stats, *, name: str, args: QuantArgs, dtype: torch.dtype) -> tuple[Params, Stats]:
    zero_point = params.get(f"{name}_zero_point")
    return {name: dequantize(params[name], params[f"{name}_scale"], zero_point, args, dtype)}, {}


def _with_classes(graph: Graph) -> dict[str, str]:
    """Modules by name, with Linear and Embedding standing for their subclasses and for Conv1D."""
    classes = dict(graph.modules)
    for linear in graph.linears.values():
        classes[linear.name] = "Linear" if linear.cls == "Conv1D" else linear.cls
    return classes


def _problems(linear: Linear, specs: Params, graph: Graph, chosen: list[Linear], ignore: tuple[str, ...]) -> list[str]:
    where = f"quantize[{linear.name}]"
    tied = [x for x in graph.linears.values() if graph.ties.get(x.weight) == linear.weight]
    for other in tied:
        if any(matches(p, other.name, other.cls) for p in ignore):
            return [f"{where}: {other.name} is ignored, but it is tied to {linear.weight}; ignore both or neither"]
    stored = graph.ties.get(linear.weight)
    if stored is not None and stored not in {x.weight for x in chosen}:
        return [
            f"{where}: {linear.weight} is tied to {stored}, which is not quantized; add 'Embedding' to targets, or "
            f"'{linear.name}' to ignore"
        ]
    if stored is not None:
        return []
    weight = specs.get(linear.weight)
    if weight is None:
        return [f"{where}: expected a tensor {linear.weight}; it is not in the checkpoint, or was quantized before"]
    if weight.ndim != 2 or not weight.dtype.is_floating_point:
        return [f"{where}: expected a 2-D float weight, found {weight.dtype} {tuple(weight.shape)}"]
    return []


def _misfits(linears: list[Linear], specs: Params, size: int | None) -> list[str]:
    """One problem for all linears whose width the group size does not divide, with the sizes that fit them all."""
    if size is None:
        return []
    widths = {x.name: specs[x.weight].shape[0 if x.transposed else 1] for x in linears}
    odd = {name: width for name, width in widths.items() if width % size}
    if not odd:
        return []
    common = math.gcd(*widths.values())
    fitting = [str(n) for n in range(size - 1, 1, -1) if common % n == 0][:4]
    return [
        f"quantize: group_size {size} does not divide the {' or '.join(map(str, sorted(set(odd.values()))))} input "
        f"channels of {len(odd)} linears, first {next(iter(odd))}; sizes that fit all: {', '.join(fitting) or 'none'}"
    ]
