"""A graph as a picture (extra `plot`): in each distinct block, symmetries from producer over activation to consumers.

Lengths are in points, y runs downwards. Columns are as wide as the widest text in them, so that no text is cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..graph import Graph
from ..graph.types import Symmetry
from .folding import Part, braces, figures, fold, owners_of, why

COLORS = {
    "norm": "#0072b2",
    "v_o": "#b34a00",
    "up_down": "#00775a",
    "q_k": "#a8467f",
    "embed": "#8a6100",
    "head": "#4a4a9c",
}
_GREY, _DARK = "#6b6b6b", "#222222"
_FONT, _SMALL, _TITLE = 8.0, 6.5, 10.0
_LINE, _PAD, _GAP, _MARGIN = 11.0, 5.0, 6.0, 16.0
_WRAP = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A name, and in smaller letters what of it scales."""

    title: str
    notes: tuple[str, ...] = ()

    @property
    def height(self) -> float:
        return _LINE * (1 + len(self.notes)) + _PAD

    @property
    def width(self) -> float:
        return max(_width(self.title, _FONT), *(_width(n, _SMALL) for n in self.notes), 0.0) + 2 * _PAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One symmetry, from left to right; a tie (two boxes), or a rejected producer (one box and its reason)."""

    kind: str
    left: tuple[Box, ...]
    label: str = ""
    middle: tuple[Box, ...] = ()  # one: the activation, or what a tied name is stored as
    right: tuple[Box, ...] = ()
    reason: tuple[str, ...] = ()

    @property
    def height(self) -> float:
        stacks = [sum(b.height + _GAP for b in boxes) - _GAP for boxes in (self.left, self.middle, self.right) if boxes]
        return max(*stacks, _LINE * len(self.reason), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where the columns begin, and how wide they are."""

    kind: float
    left: float
    left_width: float
    middle: float
    middle_width: float
    right: float
    right_width: float

    @property
    def total(self) -> float:
        return max(self.right + self.right_width, self.middle + _WRAP) + _MARGIN


def plot_graph(graph: Graph, path: Path, title: str) -> bool:
    """Write the picture as SVG, or as the suffix says. False if there is nothing to draw. Same graph, same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = panels_of(graph)
    if not panels:
        return False
    cols = _layout([band for _, bands in panels for band in bands])
    width = max(cols.total, _width(title, _TITLE) + 2 * _MARGIN)
    height = 3 * _MARGIN + _TITLE + sum(_panel_height(bands) for _, bands in panels)
    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _text(axes, _MARGIN, _MARGIN + _TITLE / 2, title, _TITLE, weight="bold")
    y = 2 * _MARGIN + _TITLE
    for name, bands in panels:
        _panel(axes, cols, y, name, bands)
        y += _panel_height(bands)
    with mpl.rc_context({"svg.hashsalt": "regauge"}):
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)
    return True


def panels_of(graph: Graph) -> list[tuple[str, list[Band]]]:
    """A panel for each part of the graph that has anything to show, and one for ties."""
    panels = []
    for part in fold(graph):
        bands = [_symmetry(part, graph, s) for s in part.symmetries]
        bands += [
            Band(
                kind="rejected",
                left=(Box(title=part.short(r.name)),),
                reason=tuple(_wrapped(why(part, r.reasons), _WRAP)),
            )
            for r in part.rejected
        ]
        if bands:
            panels.append((part.label + (f"  ({part.count} alike)" if part.count > 1 else ""), bands))
    ties = [
        Band(kind="tie", left=(Box(title=alias),), label="one tensor", middle=(Box(title=stored),))
        for alias, stored in graph.ties.items()
    ]
    return [*panels, ("ties", ties)] if ties else panels


def _symmetry(part: Part, graph: Graph, s: Symmetry) -> Band:
    if s.site is not None:
        site = Box(
            title=f"input of {part.short(s.site)}",
            notes=(*(f"and of {part.short(name)}" for name in s.more_sites), f"{s.width} scales"),
        )
    else:
        title = "no linear reads it" if s.kind == "q_k" else "not observable"
        site = Box(title=title, notes=(f"{s.width} scales",))
    return Band(
        kind=s.kind,
        left=_boxes(part, graph, s.producers),
        label=figures(graph.proofs.get(s.name)),
        middle=(site,),
        right=_boxes(part, graph, s.consumers),
    )


def _boxes(part: Part, graph: Graph, axes: Iterable[Any]) -> tuple[Box, ...]:
    owners = owners_of(graph, axes)
    whole = braces(part.short(name) for name, notes in owners.items() if not notes)
    return (
        *(Box(title=title) for title in whole),
        *(Box(title=part.short(name), notes=notes) for name, notes in owners.items() if notes),
    )


def _layout(bands: Sequence[Band]) -> Columns:
    def widest(boxes: Iterable[Box]) -> float:
        return max((box.width for box in boxes), default=0.0)

    kinds = max(_width(band.kind, _FONT) for band in bands)
    labels = max((_width(band.label, _SMALL) for band in bands), default=0.0)
    left = _MARGIN + kinds + 2 * _PAD
    left_width = widest(box for band in bands for box in band.left)
    middle = left + left_width + labels + 34  # two bends and the arrow
    middle_width = widest(box for band in bands for box in band.middle)
    right = middle + middle_width + 34
    right_width = widest(box for band in bands for box in band.right)
    return Columns(
        kind=_MARGIN,
        left=left,
        left_width=left_width,
        middle=middle,
        middle_width=middle_width,
        right=right,
        right_width=right_width,
    )


def _panel_height(bands: Sequence[Band]) -> float:
    return 2 * _LINE + sum(band.height + _GAP + 2 for band in bands) + 2 * _MARGIN


def _panel(axes: Any, cols: Columns, y: float, name: str, bands: Sequence[Band]) -> None:
    from matplotlib.patches import FancyBboxPatch

    height = _panel_height(bands) - _MARGIN
    frame = FancyBboxPatch(
        (_MARGIN / 2, y),
        cols.total - _MARGIN,
        height,
        boxstyle="round,pad=0,rounding_size=4",
        facecolor="#fafafa",
        edgecolor="#c8c8c8",
        linewidth=0.6,
    )
    axes.add_patch(frame)
    y += _LINE
    _text(axes, cols.kind, y, name, _FONT + 1, weight="bold")
    y += _LINE
    if any(band.right for band in bands):
        heads = ((cols.left, "producers, times 1/s"), (cols.middle, "activation"), (cols.right, "consumers, times s"))
        for x, head in heads:
            _text(axes, x, y, head, _SMALL, color=_GREY)
        _text(axes, cols.middle - 12, y, "change / control", _SMALL, color=_GREY, ha="right")
    y += _LINE
    for band in bands:
        _draw(axes, cols, y, band)
        y += band.height + _GAP + 2


def _draw(axes: Any, cols: Columns, y: float, band: Band) -> None:
    color = COLORS.get(band.kind, _DARK if band.kind == "tie" else _GREY)
    axis = y + band.height / 2
    _text(axes, cols.kind, axis, band.kind, _FONT, color=color)
    ends = _stack(axes, cols.left, axis, band.left, color)
    if band.reason:
        for i, line in enumerate(band.reason):
            top = axis - _LINE * (len(band.reason) - 1) / 2
            _text(axes, cols.left + cols.left_width + 12, top + _LINE * i, line, _SMALL, color=_GREY)
        return
    dashed = "--" if band.kind == "tie" else "-"
    bus = cols.left + cols.left_width + 8
    _bus(axes, [(x + w, at) for x, at, w in ends], bus, axis, color, dashed)
    _line(axes, [(bus, axis), (cols.middle, axis)], color, dashed, arrow=band.kind != "tie")
    _text(axes, (bus + cols.middle - 6) / 2, axis - 5, band.label, _SMALL, color=color, ha="center")
    ((_, _, width),) = _stack(axes, cols.middle, axis, band.middle, color, hollow=True)
    if band.right:
        out = cols.middle + cols.middle_width + 12
        _line(axes, [(cols.middle + width, axis), (out, axis)], color)
        for x, at, _ in _stack(axes, cols.right, axis, band.right, color):
            _line(axes, [(out, axis), (out, at), (x, at)], color, arrow=True)


def _bus(axes: Any, starts: Sequence[tuple[float, float]], bus: float, axis: float, color: str, dashed: str) -> None:
    for x, at in starts:
        _line(axes, [(x, at), (bus, at), (bus, axis)], color, dashed)


def _stack(
    axes: Any, x: float, axis: float, boxes: Sequence[Box], color: str, hollow: bool = False
) -> list[tuple[float, float, float]]:
    """Draw boxes below each other, centred on a line. Returns left edge, middle line and width of each."""
    from matplotlib.patches import FancyBboxPatch

    y = axis - (sum(box.height + _GAP for box in boxes) - _GAP) / 2
    places = []
    for box in boxes:
        patch = FancyBboxPatch(
            (x, y),
            box.width,
            box.height,
            boxstyle=f"round,pad=0,rounding_size={min(9, box.height / 2) if hollow else 2:g}",
            facecolor="white" if hollow else color + "18",
            edgecolor=color,
            linewidth=0.8,
        )
        axes.add_patch(patch)
        middle = y + box.height / 2
        lines = [(box.title, _FONT, _DARK), *((note, _SMALL, color) for note in box.notes)]
        for i, (text, size, ink) in enumerate(lines):
            at = middle + _LINE * (i - (len(lines) - 1) / 2)
            _text(axes, x + box.width / 2, at, text, size, color=ink, ha="center")
        places.append((x, middle, box.width))
        y += box.height + _GAP
    return places


def _line(
    axes: Any, points: Sequence[tuple[float, float]], color: str, dashed: str = "-", *, arrow: bool = False
) -> None:
    axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, linestyle=dashed, solid_joinstyle="round")
    if arrow:
        x, y = points[-1]
        axes.fill([x, x - 5, x - 5], [y, y - 2.6, y + 2.6], color=color, linewidth=0)


def _text(axes: Any, x: float, y: float, text: str, size: float, **style: Any) -> None:
    style = {"color": _DARK, "ha": "left", **style}
    axes.text(x, y, text, fontsize=size, va="center_baseline", parse_math=False, **style)


@lru_cache(maxsize=4096)
def _width(text: str, size: float) -> float:
    """Points that a text takes, with room for letters that are rounded up to whole dots."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text.replace("$", "S"), size=size).get_extents().width * 1.04 + 2 if text.strip() else 0.0


def _wrapped(text: str, width: float) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _width(f"{lines[-1]} {word}", _SMALL) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
