"""Plots of a run, as PNG files (extra `plot`)."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..graph import Graph
from .report import LinearRow


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_sqnr(rows: Sequence[LinearRow], graph: Graph, path: Path) -> None:
    """Signal-to-noise of each rounded weight over the depth of the model, one line for each role in a block."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    roles: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        block = graph.linears[row.name].block
        role = row.name if block is None else row.name.removeprefix(graph.blocks[block] + ".")
        roles.setdefault(role, []).append((-1 if block is None else block, row.sqnr_db))
    for role, points in roles.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1, label=role)
    axes.set(xlabel="block (-1: outside all blocks)", ylabel="weight SQNR (dB)", title="Rounding error of each linear")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def plot_peaks(peaks: Mapping[str, tuple[Tensor, Tensor]], path: Path) -> None:
    """Peak of each channel before and after equalization, for each site."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(peaks)), layout="constrained")
    for axes, (site, (old, new)) in zip(figure.subplots(len(peaks), squeeze=False)[:, 0], peaks.items(), strict=True):
        order = old.argsort(descending=True)
        axes.plot(old[order].numpy(), linewidth=1, label="before")
        axes.plot(new[order].numpy(), linewidth=0.7, label="after")
        axes.set(yscale="log", ylabel="peak |x|", title=site)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    axes.set_xlabel("channel, in the order of its peak before")
    figure.savefig(path, dpi=120)
