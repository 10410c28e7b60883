"""A graph as the parts that differ, for people: blocks that are alike are one part, names are relative to the block."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..graph import Graph
from ..graph.types import Axis, Linear, Proof, Rejection, Site, Symmetry

# Where it is, not what it is: the first block reads what another producer makes, and all may share an activation.
_PLACE = {Linear: {"block", "site"}, Site: {"block", "producer"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Blocks that are alike, with what the first of them holds; or what is outside all blocks (`prefix` is empty)."""

    label: str
    prefix: str
    count: int
    linears: tuple[Linear, ...]
    sites: tuple[Site, ...]
    symmetries: tuple[Symmetry, ...]
    rejected: tuple[Rejection, ...]

    def short(self, name: str) -> str:
        """The name inside the block. A text that names the block gets `*` in its place, `*+1` is the next block."""
        return relative(name, self.prefix, reach=1 if self.count > 1 else 0).removeprefix("*.")


def fold(graph: Graph) -> tuple[Part, ...]:
    """Distinct blocks in order, then what is outside all blocks. Alike: all but the names of the blocks is equal."""
    members = _by_block(graph)
    alike: dict[tuple, list[int]] = {}
    for index, prefix in enumerate(graph.blocks):
        if index in members:
            parent = prefix.rpartition(".")[0]
            alike.setdefault((parent, _general(members[index], prefix)), []).append(index)
    parts = [
        _part(members[indices[0]], label_of([graph.blocks[i] for i in indices]), graph.blocks[indices[0]], len(indices))
        for indices in alike.values()
    ]
    if None in members:
        parts.append(_part(members[None], "outside all blocks" if graph.blocks else "the model", "", 1))
    return tuple(parts)


def _by_block(graph: Graph) -> dict[int | None, tuple[list, list, list, list]]:
    """Linears, sites, symmetries and rejections of each block."""
    members: dict[int | None, tuple[list, list, list, list]] = {}
    tables: tuple[Iterable[Any], ...] = (
        graph.linears.values(),
        graph.sites.values(),
        graph.symmetries,
        graph.rejected,
    )
    for kind, table in enumerate(tables):
        for item in table:
            block = graph.block_of(item.name.split(":")[0])
            members.setdefault(block, ([], [], [], []))[kind].append(item)
    return members


def _part(members: tuple[list, list, list, list], label: str, prefix: str, count: int) -> Part:
    linears, sites, symmetries, rejected = (tuple(m) for m in members)
    return Part(
        label=label, prefix=prefix, count=count, linears=linears, sites=sites, symmetries=symmetries, rejected=rejected
    )


def _general(value: Any, prefix: str) -> Any:
    """The value as nested tuples, without the block's own name."""
    if isinstance(value, str):
        return relative(value, prefix)
    if is_dataclass(value):
        names = [f.name for f in fields(value) if f.name not in _PLACE.get(type(value), ())]
        return tuple(_general(getattr(value, name), prefix) for name in names)
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], int):  # classes, which may be long
            return tuple(value)
        return tuple(_general(item, prefix) for item in value)
    return value


def relative(text: str, prefix: str, reach: int = 1) -> str:
    """The text with `*` for the block `prefix`, `*+1` and `*-1` for its neighbours, if `reach` is 1."""
    parent, _, own = prefix.rpartition(".")
    if not parent or parent not in text:
        return text

    def star(match: re.Match) -> str:
        offset = int(match[1]) - int(own)
        return match[0] if abs(offset) > reach else f"*{offset:+d}" if offset else "*"

    return re.sub(rf"(?<![\w.]){re.escape(parent)}\.(\d+)(?!\w)", star, text)


def label_of(blocks: Sequence[str]) -> str:
    """`model.layers.0-2,7` for blocks of one list."""
    parent = blocks[0].rpartition(".")[0]
    return f"{parent}.{_runs([int(block.rpartition('.')[2]) for block in blocks])}"


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def braces(names: Iterable[str]) -> list[str]:
    """`self_attn.{q_proj, k_proj}` and `experts.0-7.up` for names that differ in one part, in the order given."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, []).append(leaf)
    numbered: dict[tuple[str, str], list[int]] = {}
    for owner, leaves in owners.items():
        name = ".".join(filter(None, (owner, leaves[0] if len(leaves) == 1 else "{" + ", ".join(leaves) + "}")))
        match = re.fullmatch(r"(.*?)\b(\d+)((?:\..*)?)", name)
        numbered.setdefault((match[1], match[3]) if match else (name, ""), []).extend([int(match[2])] if match else [])
    return [f"{head}{_runs(numbers)}{tail}" for (head, tail), numbers in numbered.items()]


def owners_of(graph: Graph, axes: Iterable[Axis]) -> dict[str, tuple[str, ...]]:
    """Module (or the stack of experts by its own name) -> notes on its axes, for those that do not scale whole."""
    named = _linear_of_param(graph)
    owners: dict[str, list[str]] = {}
    for axis in axes:
        owner, _, leaf = axis.param.rpartition(".")
        name = named.get(axis.param, owner if leaf in ("weight", "bias") else axis.param)
        notes = owners.setdefault(name, [])
        note = axis_note(axis, graph.shapes)
        if note and note not in notes and leaf != "bias":  # a bias scales as the rows do
            notes.append(note)
    return {name: tuple(notes) for name, notes in owners.items()}


def _linear_of_param(graph: Graph) -> dict[str, str]:
    named: dict[str, str] = {}
    for linear in graph.linears.values():
        for param in filter(None, (linear.weight, linear.bias)):
            named.setdefault(graph.ties.get(param, param), linear.name)
    return named


def axis_note(axis: Axis, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What of a parameter scales, in words: `rows 48-95`, `32 rows in 8 classes`; empty where each channel does."""
    shape = shapes[axis.param]
    what = "channels" if len(shape) == 1 else "rows" if axis.dim == len(shape) - 2 else "columns"
    classes = range(axis.size) if axis.classes is None else axis.classes[: axis.size]  # those of one slice
    scaled = [c for c in classes if c >= 0]
    some, merged = len(scaled) < axis.size, len(set(scaled)) < len(scaled)
    if axis.size < shape[axis.dim]:
        text = f"{what} {axis.start}-{axis.start + axis.size - 1}" + (f", {len(scaled)} of them" if some else "")
    elif some:
        text = f"{len(scaled)} of {axis.size} {what}"
    else:
        text = f"{axis.size} {what}" if merged else ""
    count = len(set(scaled))
    text += f" in {count} class{'es' if count > 1 else ''}" if merged else ""
    notes = [text]
    if axis.stack is not None:
        notes.append(f"each of {shape[axis.stack]} {'experts' if 'expert' in axis.param else 'matrices'}")
    if axis.offset:
        notes.append(f"as {axis.offset:g} + w")
    return ", ".join(filter(None, notes))


def why(part: Part, reasons: Sequence[str]) -> str:
    """The first two reasons, those that hold for most channels."""
    more = f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else ""
    return "; ".join(part.short(reason) for reason in reasons[:2]) + more


def figures(proof: Proof | None) -> str:
    """`jvp 3e-16 / 2e-01`: how much the output moves, and how much if half of the symmetry is applied."""
    return "" if proof is None else f"{proof.method} {proof.change:.0e} / {proof.control:.0e}"


def columns(rows: Sequence[Sequence[Sequence[str]]], indent: str = "  ") -> list[list[str]]:
    """Lines of each row of a table. A cell is a list of lines; columns are as wide as their widest line."""
    if not rows:
        return []
    widths = [max((len(line) for row in rows for line in row[c]), default=0) for c in range(len(rows[0]))]
    out = []
    for row in rows:
        height = max(len(cell) for cell in row)
        lines = [[cell[i] if i < len(cell) else "" for cell in row] for i in range(height)]
        out.append(
            [
                (indent + "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True))).rstrip()
                for line in lines
            ]
        )
    return out
