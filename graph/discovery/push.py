"""Push the labels of a producer's channels forward through a trace, operator by operator.

Operators that only move elements are run on the labels themselves, so no rule about shapes has to be written down. The
other rules are few:

  homogeneous of degree one (cast, negate, relu, times or over an untouched value)      labels pass
  two labelled operands that are added                                                   labels are merged
  a parameter that is added                                                              it is scaled as a producer too
  a contraction over labelled channels with a parameter                                  that parameter is a consumer
  a contraction over channels that both operands label (queries with keys)               opposite labels are merged
  a contraction over unlabelled channels with an untouched value                         labels pass (probabilities x V)
  anything else                                                                          labels are pinned to s = 1

Pinned labels keep the operator and the module that pinned them as the reason.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .labels import UNSCALED, Classes, narrow
from .starts import BIASED, CONTRACTIONS, Start, is_grouped, operands
from .trace import WRITTEN, Node, Ref, Trace, Value

_MOVES = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "slice", "select",
    "clone", "alias", "detach", "cat", "stack", "split", "split_with_sizes", "unbind", "repeat", "flatten", "unflatten",
    "roll", "flip", "_reshape_alias", "unfold", "movedim", "chunk", "contiguous", "repeat_interleave",
}  # fmt: skip
_HOMOGENEOUS = {"neg", "relu", "_to_copy", "abs", "leaky_relu", "lift_fresh", "dropout", "to", "positive"}
# moves that leave rows (all dims but the last) in their order, and those that do if their number stays
_SAME_ROWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "clone", "alias", "detach", "contiguous"}
_CUT_OR_JOIN = {"slice", "split", "split_with_sizes", "chunk", "cat"}
_ROUTES = {"index", "index_select", "gather"}
_SHAPE_ONLY = {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter that is scaled: along `dim` from `start` on, by the classes of `label`, at one node.

    `label` is (size,), or (slices, size) where a stack of matrices is scaled slice by slice along `stack`.
    `reads`: for a consumer, the activation that it is contracted with.
    """

    param: str
    dim: int
    stack: int | None
    start: int
    label: Tensor
    offset: float
    node: int
    reads: int | None = None


class Push:
    """The labels of one producer, or of two (queries and keys), on their way through a trace."""

    def __init__(self, trace: Trace, starts: tuple[Start, ...]):
        self.trace = trace
        self.counts = [int(start.label.max()) + 1 for start in starts]
        self.classes = Classes(sum(self.counts))
        self.labels: dict[int, Tensor] = {}
        self.producers: list[Use] = []
        self.consumers: list[Use] = []
        self.reasons: dict[str, int] = {}
        self.crossed = False  # labels went through probabilities x V
        self.moved = False  # rows were reordered or summed on the way: labels of one expert stay those of all
        self.met: list[tuple[int, bool]] = []  # contractions with an activation, and whether from the left
        self.experts = starts[0].experts if len(starts) == 1 else None
        self.starts = {start.node: (start, 2 * sum(self.counts[:i])) for i, start in enumerate(starts)}
        self._run()

    def _run(self) -> None:
        queue = sorted(self.starts)
        done: set[int] = set()
        while queue:
            index = heapq.heappop(queue)
            if index in done:
                continue
            done.add(index)
            made = self._apply(index, self.trace.nodes[index])
            for number, label in made.items():
                self.labels[number] = narrow(label)
                for user in self.trace.users.get(number, ()):
                    heapq.heappush(queue, user)
        for number in self.trace.returned & set(self.labels):
            self.pin(self.labels[number], "it is the output of the model")

    def _apply(self, index: int, node: Node) -> dict[int, Tensor]:
        """Labels of the node's outputs; pins what it cannot pass."""
        live = dict(self._live(node))
        if live:
            return self._pass(index, node, live)
        if index not in self.starts:
            return {}
        start, first = self.starts[index]
        label = start.label * 2 + first
        used = [self._use(self.producers, number, own * 2 + first, index) for number, own in start.uses]
        if not all(used):
            self.pin(label, f"not a plain view of a parameter: {node.name} in {node.module}")
        return {start.value: label}

    def _live(self, node: Node) -> Iterator[tuple[int, Tensor]]:
        for number in node.inputs & self.labels.keys():
            label = self.classes.canonical(self.labels[number])
            if bool((label >= 0).any()):
                yield number, label

    def _pass(self, index: int, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        name, first = node.name, _first(node)
        if name in _SHAPE_ONLY:
            return {}
        if not all(self.trace.values[number].floating for number in node.outputs):
            return self._reject(live, node)
        if name in _MOVES or (name in _ROUTES and first in live and self._is_fixed(node)):
            return self._move(node, live)
        if name == "copy" and _first(node, 1) in live:
            return {node.outputs[0]: self._align(live[_first(node, 1)], node)}
        if name == WRITTEN and len(node.args[0]) == 1:
            return self._write(node, live)
        if name in _HOMOGENEOUS and first in live:
            return {node.outputs[0]: live[first]}
        if name in ("masked_fill", "constant_pad_nd") and first in live and _is_zero(node.args[2:]):
            return (
                self._move(node, live, fill=UNSCALED) if name == "constant_pad_nd" else {node.outputs[0]: live[first]}
            )
        if name in ("mul", "div") and not node.kwargs:  # division may be asked to round
            return self._scale(node, live)
        if name in ("add", "sub"):
            return self._add(index, node, live)
        if name in CONTRACTIONS:
            return self._contract(index, node, live)
        if name in ("sum", "mean") and first in live:
            return self._reduce(node, live)
        if name in _ROUTES and first in live:
            return self._route(node, live)
        return self._reject(live, node)

    def _move(self, node: Node, live: dict[int, Tensor], fill: int | None = None) -> dict[int, Tensor]:
        def label(x: Any) -> Any:
            if isinstance(x, Ref):
                if node.name in _ROUTES and x.id != _first(node):
                    return self.trace.constants[x.id]
                shape = self.trace.values[x.id].shape
                known = live.get(x.id)
                return torch.full(shape, UNSCALED) if known is None else known.expand(shape).contiguous()
            return [label(item) for item in x] if isinstance(x, list | tuple) else x

        if any(isinstance(x, Ref) for x in node.kwargs.values()):
            return self._reject(live, node)
        self.moved |= self._moves_rows(node)
        args = [label(x) for x in node.args]
        if fill is not None:
            args[2:] = [fill]
        if node.name == "_reshape_alias":  # its strides are those of the real tensor
            return {node.outputs[0]: args[0].reshape(args[1])}
        kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        out = node.op(*args, **kwargs)
        made = [out] if isinstance(out, Tensor) else list(out)
        return dict(zip(node.outputs, made, strict=True))

    def _moves_rows(self, node: Node) -> bool:
        """False if the rows of the value, all but its last dim, are surely the same and in the same order."""
        if node.name in _SAME_ROWS:
            return False
        shapes = {self.trace.values[n].shape[:-1] for n in (*node.inputs, *node.outputs)}
        return node.name not in _CUT_OR_JOIN or len(shapes) > 1

    def _is_fixed(self, node: Node) -> bool:
        """What is picked is written in the code."""
        return node.inputs - {_first(node)} <= self.trace.constants.keys()

    def _write(self, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        """Views of memory written in place: their own labels, and those of what was written where they meet."""
        written, made = node.args[0][0].id, {}
        for ref, out in zip(node.args[1], node.outputs, strict=True):
            parts = [(self.trace.values[n], live.get(n)) for n in (ref.id, written)]
            extents = [v.offset + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True)) for v, _ in parts]
            memory = torch.full((max(extents) + 1,), UNSCALED)
            for value, label in parts:
                view = memory.as_strided(value.shape, value.stride, value.offset)
                view.copy_(torch.tensor(UNSCALED) if label is None else label)
            value = parts[0][0]
            made[out] = memory.as_strided(value.shape, value.stride, value.offset).clone()
        return made

    def _scale(self, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        a, b = (x.id if isinstance(x, Ref) else None for x in node.args[:2])
        if a in live and b not in live:
            return {node.outputs[0]: self._align(live[a], node)}
        if node.name == "mul" and b in live and a not in live:
            return {node.outputs[0]: self._align(live[b], node)}
        return self._reject(live, node, "two scaled values meet in ")

    def _add(self, index: int, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        if node.kwargs.get("alpha", 1) != 1:
            return self._reject(live, node)
        known = [x.id for x in node.args[:2] if isinstance(x, Ref) and x.id in live]
        label = self._align(live[known[0]], node)
        if len(known) == 2:
            a, b = torch.broadcast_tensors(label, self._align(live[known[1]], node))
            self.classes.merge(a, b)
            self.moved = True
            return {node.outputs[0]: a}
        other = next((x for x in node.args[:2] if not (isinstance(x, Ref) and x.id in live)), 0)
        if not isinstance(other, Ref):
            return {node.outputs[0]: label} if other == 0 else self._reject(live, node, "a constant: ")
        value = self.trace.values[other.id]
        if value.param and value.shape and node.name == "add":
            rank = len(value.shape)
            own = (
                label.reshape(label.shape[label.ndim - rank :])
                if label.shape[-rank:].numel() == label.numel()
                else None
            )
            if own is not None and self._use(self.producers, other.id, own, index):
                return {node.outputs[0]: label}
        return self._reject(live, node, "a value that is not scaled: ")

    def _contract(self, index: int, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        left, right = (x.id for x in operands(node))
        if set(live) - {left, right}:
            return self._reject(live, node)
        if left in live and right in live:
            return self._cancel(node, live, live[left], live[right])
        number, other, inner = (left, right, -1) if left in live else (right, left, -2)
        label = live[number]
        if label.shape[inner] == 1:
            if node.name in BIASED or node.name == "_grouped_mm":
                return self._reject(live, node)
            self.crossed |= self.trace.values[other].param is None
            return {node.outputs[0]: label}
        if self.trace.values[other].param is None:
            self.met.append((index, number == left))
            return self._reject(live, node, "contracted with an activation: ")
        grouped = is_grouped(self.trace, node)
        self.moved |= not grouped or node.args[2].id != self.experts
        if label.shape[-3 - inner] != 1:  # the other matrix dim: rows that are scaled apart
            return self._reject(live, node)
        # channels lie in the last dim of an activation on the left and in the one before on the right
        own = label.transpose(-1, -2)
        if grouped:
            own = own[None]
        if not self._use(self.consumers, other, own, index, reads=number):
            return self._reject(live, node, "not a plain view of a parameter: ")
        return {}

    def _cancel(self, node: Node, live: dict[int, Tensor], left: Tensor, right: Tensor) -> dict[int, Tensor]:
        """Contraction of two labelled values: the scales cancel where their labels are opposite."""
        if left.shape[-2] != 1 or right.shape[-1] != 1:
            return self._reject(live, node, "two scaled values meet in ")
        self.classes.merge(left.squeeze(-2), right.squeeze(-1), opposite=True)
        return {}

    def _reduce(self, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        label = live[_first(node)]
        dims = node.args[1] if len(node.args) > 1 else None
        if not isinstance(dims, list | tuple) or not dims or any(label.shape[d] != 1 for d in dims):
            return self._reject(live, node)
        self.moved = True
        keep = bool(node.args[2]) if len(node.args) > 2 else False
        gone = {d % label.ndim for d in dims}
        return {
            node.outputs[0]: label if keep else label.reshape([n for d, n in enumerate(label.shape) if d not in gone])
        }

    def _route(self, node: Node, live: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tokens are picked by data: labels pass when they are the same for all tokens."""
        label, out = live[_first(node)], self.trace.values[node.outputs[0]].shape
        picks_channels = (
            len(node.args[1]) >= label.ndim and node.args[1][label.ndim - 1] is not None
            if node.name == "index"
            else node.args[1] % label.ndim == label.ndim - 1
        )
        if picks_channels or label.numel() != label.shape[-1] or not out or out[-1] != label.shape[-1]:
            return self._reject(live, node)
        self.moved = True
        return {node.outputs[0]: label.reshape((1,) * (len(out) - 1) + (-1,))}

    def _align(self, label: Tensor, node: Node) -> Tensor:
        ndim = len(self.trace.values[node.outputs[0]].shape)
        return label.reshape((1,) * (ndim - label.ndim) + tuple(label.shape))

    def _use(self, side: list[Use], number: int, label: Tensor, index: int, reads: int | None = None) -> bool:
        """Record that a parameter is scaled by a label over its view; False if that is no view of whole channels."""
        value = self.trace.values[number]
        place = _place(value, self.trace.params.get(value.param or ""), label)
        if place is None or value.param is None or (reads is not None and value.added):
            return False
        if value.picked is not None and place[1] is not None:  # slices in an order that is known at run time only
            return False
        dim, stack, start, own = place
        side.append(Use(value.param, dim, stack, start, own, value.added, index, reads))
        return True

    def _reject(self, live: Mapping[int, Tensor], node: Node, why: str = "") -> dict[int, Tensor]:
        for label in live.values():
            self.pin(label, f"{why}{node.name} in {node.module or 'the model'}")
        return {}

    def pin(self, label: Tensor, reason: str) -> None:
        count = self.classes.pin(label)
        if count:
            self.reasons[reason] = self.reasons.get(reason, 0) + count


def _place(value: Value, base: tuple[int, ...] | None, label: Tensor) -> tuple[int, int | None, int, Tensor] | None:
    """The parameter's dim, stack dim and first channel behind the labelled dims of a view of it, and the label there.

    None unless the view shows whole channels of the parameter, in their order.
    """
    if base is None or label.ndim != len(value.shape):
        return None
    if any(n not in (1, m) for n, m in zip(label.shape, value.shape, strict=True)):
        return None  # the parameter is broadcast over channels that scale apart
    strides = [1] * len(base)
    for j in range(len(base) - 2, -1, -1):
        strides[j] = strides[j + 1] * base[j + 1]
    wide = [d for d in range(label.ndim) if label.shape[d] > 1] or [d for d in range(label.ndim) if value.shape[d] == 1]
    dims = []
    for d in wide[-2:]:
        fits = [j for j in range(len(base)) if strides[j] == value.stride[d] and base[j] >= value.shape[d]]
        if not fits or len(wide) > 2:
            return None
        dims.append((fits[0], value.shape[d]))
    if not dims or len({j for j, _ in dims}) != len(dims):
        return None
    # in a stack the slices come first: (experts, out, in)
    (dim, size), stack = (dims[-1], dims[0][0] if len(dims) == 2 else None)
    own = label.squeeze() if label.numel() > 1 else label.reshape(1)
    if stack is not None and stack > dim:
        (dim, size), stack, own = dims[0], dim, own.T
    start = value.offset // strides[dim] % base[dim]
    exact = value.offset == start * strides[dim] and start + size <= base[dim]
    seen = torch.Size(n for n, stride in zip(value.shape, value.stride, strict=True) if stride).numel()
    whole = torch.Size(base).numel() // base[dim] * size
    if (
        not exact
        or (seen != whole and value.picked is None)
        or (stack is not None and dict(dims)[stack] != base[stack])
    ):
        return None
    return dim, stack, start, own.expand((*own.shape[:-1], size))


def _first(node: Node, position: int = 0) -> int:
    arg = node.args[position] if len(node.args) > position else None
    return arg.id if isinstance(arg, Ref) else -1


def _is_zero(rest: tuple) -> bool:
    return not rest or (not isinstance(rest[0], Ref) and rest[0] == 0)
