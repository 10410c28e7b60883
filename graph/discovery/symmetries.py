"""Rescaling symmetries of a trace: what scales with what, and why the rest does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from ..types import Axis, Rejection
from .push import Push, Use
from .starts import Start, is_grouped, starts_of
from .trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A symmetry by parameters: axes that take 1/s and s, and the activations that become x / s with their classes."""

    name: str
    kind: str
    width: int
    producers: tuple[Axis, ...]
    consumers: tuple[Axis, ...]
    reads: tuple[tuple[int, tuple[int, ...]], ...]  # value number, class of each of its channels


def find_symmetries(trace: Trace) -> tuple[list[Found], list[Rejection]]:
    """Every symmetry of the trace, in the order of its producers, and every producer that has none, with reasons."""
    starts = starts_of(trace)
    users = _users_of_params(trace)
    found: list[tuple[int, Found]] = []
    rejected: list[Rejection] = []
    met: dict[int, tuple[list[Start], list[Start]]] = {}
    for start in starts:
        push = Push(trace, (start,))
        for node, from_left in push.met:
            met.setdefault(node, ([], []))[0 if from_left else 1].append(start)
        groups = list(_close(push, users, start.kind))
        found += [(start.node, group) for group in groups]
        if not groups:
            rejected.append(_rejection(push, trace, start))
    for left, right in met.values():
        for q, k in product(left, right):
            groups = list(_close(Push(trace, (q, k)), users, "q_k"))
            found += [(q.node, group) for group in groups if group.kind == "q_k"]
    found.sort(key=lambda item: item[0])
    unique = {(group.name, group.kind): group for _, group in found}
    paired = {module_of(a.param) for g in unique.values() if g.kind == "q_k" for a in (*g.producers, *g.consumers)}
    return list(unique.values()), [r for r in rejected if r.name not in paired]


def _users_of_params(trace: Trace) -> dict[str, set[int]]:
    """Nodes that take a parameter and do more than view, cast or shift it."""
    users: dict[str, set[int]] = {}
    for number, nodes in trace.users.items():
        param = trace.values[number].param
        if param is not None:
            used = {i for i in nodes if not all(trace.values[o].param == param for o in trace.nodes[i].outputs)}
            users.setdefault(param, set()).update(used)
    for number in trace.returned:
        param = trace.values[number].param
        if param is not None:
            users.setdefault(param, set()).add(-1)
    return users


def _close(push: Push, users: Mapping[str, set[int]], kind: str) -> Iterator[Found]:
    """What is left of a push as symmetries: the channels that scale alone, and those that cancel in pairs."""
    _settle(push, users)
    owner = module_of(push.producers[0].param) if push.producers else ""
    for paired in (False, True):
        producers, consumers, reads, width = _axes(push, paired)
        if not producers or not consumers:
            continue
        if paired:
            other = module_of(consumers[0].param)
            yield Found(
                name=f"{owner}:{_relative(other, owner)}", kind="q_k", width=width, producers=producers,
                consumers=consumers, reads=()
            )  # fmt: skip
        elif kind != "q_k":
            sort = kind if kind != "linear" else "v_o" if push.crossed else "up_down"
            yield Found(name=owner, kind=sort, width=width, producers=producers, consumers=consumers, reads=reads)


def _settle(push: Push, users: Mapping[str, set[int]]) -> None:
    """Pin channels of parameters that are used elsewhere too; make all uses of one parameter agree."""
    uses = [*push.producers, *push.consumers]
    for a, b in combinations(uses, 2):
        if (a.param, a.dim, a.stack) != (b.param, b.dim, b.stack):
            continue
        alike = (a.reads is None, a.offset) == (b.reads is None, b.offset)
        if alike and (a.start, a.label.shape) == (b.start, b.label.shape):
            push.classes.merge(a.label, b.label)
        elif not alike or (a.start < b.start + b.label.shape[-1] and b.start < a.start + a.label.shape[-1]):
            push.pin(torch.cat((a.label.reshape(-1), b.label.reshape(-1))), f"{a.param} is used in two ways")
    for use in uses:
        ours = {u.node for u in uses if (u.param, u.dim, u.stack) == (use.param, use.dim, use.stack)}
        if push.classes.is_free(use.label) and not users[use.param] <= ours:
            push.pin(use.label, f"{use.param} is used elsewhere too")


def _axes(push: Push, paired: bool):
    """Axes that take 1/s, axes that take s, activations with their classes, and the number of classes."""
    uses = {_key(u): u for u in (*push.producers, *push.consumers)}
    labels, mirrored = {}, {}
    for key, u in uses.items():
        low, mirrored[key], pairs = push.classes.group(u.label)
        labels[key] = torch.where(pairs == paired, low, -1)
    names = _classes(push, [labels[key] for key, u in uses.items() if u.reads is None])
    if not paired:  # a class that no consumer takes back is no symmetry
        names = names & _classes(push, [labels[key] for key, u in uses.items() if u.reads is not None])
    dense = torch.where(names, names.cumsum(0) - 1, -1)  # in the order of the first producer's channels
    labels = {key: torch.where(label < 0, -1, dense[label.clamp(min=0)]) for key, label in labels.items()}
    count = int(names.sum())
    experts = _experts(push)
    sides: tuple[list[Axis], list[Axis]] = ([], [])
    for key, u in uses.items():
        for flip in (False, True):
            own = torch.where(mirrored[key] == flip, labels[key], -1)
            if bool((own >= 0).any()):
                inverse = (u.reads is None) != flip  # what makes a channel takes 1/s, what reads it takes s
                sides[0 if inverse else 1].append(_axis(u, own, count, experts.get(u.param)))
    reads = []
    for u in push.consumers:
        label = labels[_key(u)]
        if u.reads is not None and label.ndim == 1 and not experts and bool((label >= 0).any()):
            reads.append((u.reads, tuple(label.tolist())))
    width = count * next(iter(experts.values()), 1)
    return tuple(sides[0]), tuple(sides[1]), tuple(reads), width


def _key(u: Use) -> tuple:
    """What is scaled: uses of the same channels at several nodes are one axis."""
    return u.param, u.dim, u.stack, u.start, u.reads is None


def _classes(push: Push, labels: list[Tensor]) -> Tensor:
    """True for the classes that occur."""
    seen = torch.zeros(2 * sum(push.counts), dtype=torch.bool)
    for label in labels:
        seen[label[label >= 0]] = True
    return seen


def _experts(push: Push) -> dict[str, int]:
    """Stacks of experts that may each have their own scales: chosen by token, in one order all the way."""
    uses = [*push.producers, *push.consumers]
    if push.experts is None or push.moved or any(not _is_stack(push, u) for u in uses):
        return {}
    return {u.param: push.trace.params[u.param][0] for u in uses}


def _is_stack(push: Push, use: Use) -> bool:
    """The parameter has a slice for each expert: a grouped matrix, or a bias that is picked by expert."""
    node = push.trace.nodes[use.node]
    if is_grouped(push.trace, node):
        return True
    picked = [push.trace.values[n] for n in node.inputs if push.trace.values[n].param == use.param]
    return all(value.picked is not None for value in picked)


def _axis(use: Use, label: Tensor, width: int, experts: int | None) -> Axis:
    """The axis of one use; `label` holds dense classes, -1 for channels that are left alone."""
    stack = use.stack
    if experts is not None:  # one set of classes for each expert
        shift = torch.arange(experts)[:, None] * width
        label, stack = torch.where(label < 0, -1, label + shift), 0
        width *= experts
    free = (label >= 0).reshape(-1, label.shape[-1]).any(0).nonzero().reshape(-1)
    first, last = int(free[0]), int(free[-1]) + 1
    label = label[..., first:last]
    flat = label.reshape(-1)
    plain = len(flat) == width and torch.equal(flat, torch.arange(width))
    return Axis(
        param=use.param,
        dim=use.dim,
        size=last - first,
        start=use.start + first,
        classes=None if plain else tuple(flat.tolist()),
        offset=use.offset if use.reads is None else 0.0,
        stack=stack,
    )


def module_of(param: str) -> str:
    return param.removesuffix(".weight")


def _relative(name: str, other: str) -> str:
    """`name` without the leading parts that it shares with `other`."""
    a, b = name.split("."), other.split(".")
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) - 1)
    return ".".join(a[shared:])


def _rejection(push: Push, trace: Trace, start: Start) -> Rejection:
    param = trace.values[start.uses[0][0]].param or ""
    name, ran_in = module_of(param), trace.nodes[start.node].module
    if start.kind == "linear" and not f"{name}.".startswith(f"{ran_in}."):
        name = ran_in  # a tied head has the embedding's parameter
    reasons = sorted(push.reasons, key=lambda reason: -push.reasons[reason])
    return Rejection(name=name, kind=start.kind, reasons=tuple(reasons) or ("nothing reads it",))
