"""Where channels are made: the places in a trace at which labels start."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .trace import Node, Ref, Trace, Value

BIASED = {"addmm", "baddbmm"}
CONTRACTIONS = {"mm", "bmm", "_grouped_mm", *BIASED}


@dataclass(frozen=True, slots=True)
class Start:
    """A value whose channels a parameter makes, the label of the value, and the parameters with their own labels.

    `experts`: the stack is chosen by token (grouped matmul), and its labels stand for those of one expert.
    """

    kind: str
    node: int
    value: int
    label: Tensor
    uses: tuple[tuple[int, Tensor], ...]
    experts: int | None = None


def starts_of(trace: Trace) -> list[Start]:
    """Every place where a parameter makes channels: norm weights, biases aside, rows of linears, embeddings."""
    return [start for index, node in enumerate(trace.nodes) if (start := _start(trace, index, node)) is not None]


def _start(trace: Trace, index: int, node: Node) -> Start | None:
    def parameter(x: object) -> Value | None:
        value = trace.values[x.id] if isinstance(x, Ref) else None
        return value if value is not None and value.param is not None and value.picked is None else None

    args, out = node.args, node.outputs[0]
    if node.name == "mul" and len(args) == 2:
        sides = [(a, b) for a, b in (args, args[::-1]) if parameter(a) and isinstance(b, Ref) and not parameter(b)]
        value = parameter(sides[0][0]) if sides else None
        if value is None or torch.Size(value.shape).numel() < 2:
            return None
        label = torch.arange(torch.Size(value.shape).numel()).reshape(value.shape)
        wide = label.reshape((1,) * (len(trace.values[out].shape) - label.ndim) + value.shape)
        return Start("norm", index, out, wide, ((sides[0][0].id, label),))
    if node.name in ("native_layer_norm", "_fused_rms_norm", "rms_norm") and parameter(args[2]):
        if any(a is not None and not parameter(a) for a in args[3:4] if not isinstance(a, float)):
            return None  # what is added is computed, and is not scaled
        uses = [(a.id, torch.arange(_width(trace, a.id))) for a in args[2:4] if parameter(a)]
        label = torch.arange(_width(trace, out)).reshape((1,) * (len(trace.values[out].shape) - 1) + (-1,))
        return Start("norm", index, out, label, tuple(uses))
    if node.name == "embedding" and parameter(args[0]):
        label = torch.arange(_width(trace, out)).reshape((1,) * (len(trace.values[out].shape) - 1) + (-1,))
        return Start("embed", index, out, label, ((args[0].id, label.reshape(1, -1)),))
    if node.name in CONTRACTIONS:
        return _linear_start(trace, index, node, parameter)
    return None


def _linear_start(trace: Trace, index: int, node: Node, parameter) -> Start | None:
    biased = node.name in BIASED
    x, w = operands(node)
    value = parameter(w)
    if value is None or parameter(x) or (biased and parameter(node.args[0]) is None):
        return None
    width = value.shape[-1]
    label = torch.arange(width).reshape(1, width)
    if node.name == "_grouped_mm" and not is_grouped(trace, node) and len(trace.values[x.id].shape) != 3:
        return None
    if is_grouped(trace, node):
        return Start("linear", index, node.outputs[0], label, ((w.id, label[None]),), experts=node.args[2].id)
    if len(value.shape) == 3:
        stacked = value.stride[0] != 0
        label = torch.arange(width * (value.shape[0] if stacked else 1)).reshape(-1, 1, width)
    uses = [(w.id, label)]
    if biased:
        rank = len(trace.values[node.args[0].id].shape)
        if label.shape[label.ndim - rank :].numel() != label.numel():
            return None  # one bias for a whole stack
        uses.append((node.args[0].id, label.reshape(label.shape[label.ndim - rank :])))
    return Start("linear", index, node.outputs[0], label, tuple(uses))


def operands(node: Node) -> tuple[Ref, Ref]:
    """The two sides of a contraction."""
    left, right = node.args[1:3] if node.name in BIASED else node.args[:2]
    return left, right


def is_grouped(trace: Trace, node: Node) -> bool:
    """True for the matmul of rows with the matrix of the expert that each was sorted to."""
    return (
        node.name == "_grouped_mm"
        and len(node.args) > 2
        and isinstance(node.args[2], Ref)
        and len(trace.values[node.args[0].id].shape) == 2
        and len(trace.values[node.args[1].id].shape) == 3
    )


def _width(trace: Trace, number: int) -> int:
    return trace.values[number].shape[-1]
