"""The layout of compressed-tensors checkpoints as a pair of transforms: `Encode` and `Decode`.

  int-quantized    X.weight int8 (O, I), X.weight_scale, [X.weight_zero_point int8]
  pack-quantized   X.weight_packed int32 (O, ceil(I b / 32)), X.weight_scale, X.weight_shape int64 (2,),
                   [X.weight_zero_point, packed along its rows: int32 (ceil(O b / 32), G)]

Packing: element i of a row, as the unsigned number q + 2^(b-1), takes the bits from i b on of a little-endian stream of
32-bit words; values may cross words. Source: the library's documentation of its formats; tests compare with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..graph import Graph, PlanError
from ._scheme import QuantArgs, Scheme
from ._types import Params, Stats, Step, StepFn


def formats_of(schemes: Mapping[str, Scheme], graph: Graph) -> dict[str, str]:
    """The compressed-tensors format of each linear: "int-quantized" with quantized activations, else "pack-quantized".

    Beside quantized activations an embedding is "int-quantized" too: transformers then keeps codes in its modules, and
    cannot look up packed ones.
    """
    activations = any(scheme.input_activations is not None for scheme in schemes.values())
    return {
        name: "int-quantized"
        if scheme.input_activations is not None or (activations and graph.linears[name].cls == "Embedding")
        else "pack-quantized"
        for name, scheme in schemes.items()
    }


def pack_rows(codes: Tensor, num_bits: int) -> Tensor:
    """Signed codes (R, N) in int8 -> words (R, ceil(N b / 32)) in int32."""
    rows, columns = codes.shape
    u = torch.nn.functional.pad((codes.to(torch.int16) + 2 ** (num_bits - 1)).to(torch.uint8), (0, -columns % 32))
    bits = torch.arange(num_bits, dtype=torch.uint8, device=codes.device)
    if 8 % num_bits == 0:  # values do not cross bytes
        per_byte = u.reshape(rows, -1, 8 // num_bits)
        shift = num_bits * torch.arange(8 // num_bits, dtype=torch.uint8, device=codes.device)
        octets = (per_byte << shift).sum(-1, dtype=torch.uint8)
    else:
        stream = ((u[..., None] >> bits) & 1).reshape(rows, -1, 8)
        place = torch.arange(8, dtype=torch.uint8, device=codes.device)
        octets = (stream << place).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)[:, : -(-columns * num_bits // 32)].contiguous()


def unpack_rows(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """The inverse of `pack_rows`: words (R, W) in int32 -> codes (R, columns) in int8."""
    octets = words.contiguous().view(torch.uint8)
    place = torch.arange(8, dtype=torch.uint8, device=words.device)
    stream = ((octets[..., None] >> place) & 1).flatten(-2)[:, : columns * num_bits]
    bits = torch.arange(num_bits, dtype=torch.uint8, device=words.device)
    u = (stream.unflatten(-1, (columns, num_bits)) << bits).sum(-1, dtype=torch.uint8)
    return (u.to(torch.int16) - 2 ** (num_bits - 1)).to(torch.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Integer codes, as `Quantize(form="integer")` leaves them, to the compressed-tensors layout.

    `schemes` maps linears to their schemes, as `Plan.schemes` gives them. No number changes. `untie` also writes each
    tied module's own copy, for readers that do not tie quantized modules (`must_untie` tells when).
    """

    schemes: Mapping[str, Scheme]
    untie: bool = False

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        return _plan("encode", self.schemes, self.untie, specs, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The compressed-tensors layout back to integer codes; the exact inverse of `Encode` with the same arguments."""

    schemes: Mapping[str, Scheme]
    untie: bool = False

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        return _plan("decode", self.schemes, self.untie, specs, graph)


def must_untie(schemes: Mapping[str, Scheme], graph: Graph) -> bool:
    """True when a tied pair is quantized and some activation is too.

    With weights alone transformers can decode a checkpoint while loading it, and ties afterwards.
    """
    tied = any(graph.linears[name].weight in graph.ties for name in schemes)
    return tied and any(scheme.input_activations is not None for scheme in schemes.values())


def _plan(label: str, schemes: Mapping[str, Scheme], untie: bool, specs: Params, graph: Graph) -> tuple[Step, ...]:
    steps, problems = [], []
    unknown = [name for name in schemes if name not in graph.linears]
    if unknown:
        raise PlanError(f"{label}: the graph has no linear {unknown[0]}")
    format_of = formats_of(schemes, graph)
    for linear in graph.linears.values():
        if linear.name not in schemes or linear.weight in graph.ties:
            continue
        readers = [linear]
        if untie:
            readers += [x for x in graph.linears.values() if graph.ties.get(x.weight) == linear.weight]
        formats = {x.weight: format_of[x.name] for x in readers}
        args = schemes[linear.name].weights
        where = f"{label}[{linear.name}]"
        stored = [key for weight, kind in formats.items() for key in _names(weight, kind, args)]
        reads = _names(linear.weight, "int-quantized", args) if label == "encode" else tuple(stored)
        missing = [key for key in reads if key not in specs]
        if linear.cls == "Conv1D":
            problems.append(f"{where}: compressed-tensors has no layout for Conv1D; use form='fake'")
        elif missing:
            problems.append(f"{where}: expected a tensor {missing[0]}; quantize with form='integer' first")
        elif set(stored) != set(_names(linear.weight, "int-quantized", args)):
            fn: StepFn = (
                partial(_encode, name=linear.weight, args=args, formats=formats)
                if label == "encode"
                else partial(_decode, name=linear.weight, args=args, shape=linear.shape)
            )
            writes = dict(fn({key: specs[key] for key in reads}, {})[0])
            drops = tuple(key for key in reads if key not in writes)
            steps.append(Step(name=where, reads=reads, writes=writes, drops=drops, fn=fn))
    if problems:
        raise PlanError(problems)
    return tuple(steps)


def _names(weight: str, kind: str, args: QuantArgs) -> tuple[str, ...]:
    """The tensors of one quantized module."""
    body = (weight,) if kind == "int-quantized" else (f"{weight}_packed", f"{weight}_shape")
    return (*body, f"{weight}_scale") if args.symmetric else (*body, f"{weight}_scale", f"{weight}_zero_point")


def _encode(params: Params, stats: Stats, *, name: str, args: QuantArgs, formats: Mapping[str, str]):
    codes, scale, zeros = params[name], params[f"{name}_scale"], params.get(f"{name}_zero_point")
    out: dict[str, Tensor] = {}
    for weight, kind in formats.items():
        out[f"{weight}_scale"] = scale
        packed = kind == "pack-quantized"
        if packed:
            out[f"{weight}_packed"] = pack_rows(codes, args.num_bits)
            out[f"{weight}_shape"] = torch.tensor(tuple(codes.shape), dtype=torch.int64, device=codes.device)
        else:
            out[weight] = codes
        if zeros is not None:
            pack_zeros = packed and args.strategy != "tensor"
            out[f"{weight}_zero_point"] = pack_rows(zeros.T, args.num_bits).T.contiguous() if pack_zeros else zeros
    return out, {}


def _decode(params: Params, stats: Stats, *, name: str, args: QuantArgs, shape: tuple[int, ...]):
    out = {f"{name}_scale": params[f"{name}_scale"]}
    packed = f"{name}_packed" in params
    out[name] = unpack_rows(params[f"{name}_packed"], args.num_bits, shape[1]) if packed else params[name]
    if not args.symmetric:
        zeros = params[f"{name}_zero_point"]
        pack_zeros = packed and args.strategy != "tensor"
        out[f"{name}_zero_point"] = (
            unpack_rows(zeros.T, args.num_bits, shape[0]).T.contiguous() if pack_zeros else zeros
        )
    return out, {}
