"""What a run did, as a frozen dataclass, a table and JSON."""

import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .evaluate import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRow:
    """One quantized module: signal-to-noise of its rounded weight in dB, 10 log10(sum w^2 / sum (w - q)^2)."""

    name: str
    scheme: str
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of `oneshot`. Sizes in bytes, times in seconds, memory in bytes (peak of a whole process,
    the largest of all)."""

    output_dir: str
    model: str
    model_type: str
    recipe: Mapping[str, Any]
    placement: str
    processes: int
    num_samples: int
    max_seq_length: int
    statistics_key: str | None
    statistics_reused: bool
    cells_resumed: int
    bytes_before: int
    bytes_after: int
    linears: tuple[LinearRow, ...]
    unquantized: Mapping[str, str]
    dead_channels: Mapping[str, int]
    seconds: Mapping[str, float]
    peak_memory: int
    before: Evaluation | None = None
    after: Evaluation | None = None
    plots: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """The report as text for a terminal."""
        rows = [("model", f"{self.model} ({self.model_type})"), ("written to", self.output_dir)]
        rows += [("linears quantized", _schemes(self.linears))]
        if self.unquantized:
            rows.append(("left as they were", _reasons(self.unquantized)))
        if self.dead_channels:
            total = sum(self.dead_channels.values())
            rows.append(("dead channels", f"{total} in {len(self.dead_channels)} sites, scaled by 1"))
        ratio = self.bytes_after / self.bytes_before
        rows.append(("size", f"{_mb(self.bytes_before)} -> {_mb(self.bytes_after)}  ({ratio:.2f} x)"))
        if self.linears:
            worst = min(self.linears, key=lambda row: row.sqnr_db)
            rows.append(("lowest weight SQNR", f"{worst.sqnr_db:.1f} dB  {worst.name}"))
        rows += self._evaluation_rows()
        reused = " (statistics reused)" if self.statistics_reused else ""
        parts = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        rows.append(("seconds", f"{sum(self.seconds.values()):.1f} = {parts}{reused}"))
        if self.cells_resumed:
            rows.append(("taken up again", f"{self.cells_resumed} cells that an earlier run had finished"))
        many = f" in each of {self.processes} processes, {self.placement}" if self.processes > 1 else ""
        rows.append(("peak memory", _mb(self.peak_memory) + many))
        rows += [("plot", path) for path in self.plots]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _evaluation_rows(self) -> list[tuple[str, str]]:
        if self.before is None or self.after is None:
            return []
        before, after = self.before.perplexity, self.after.perplexity
        rows = [
            ("perplexity", f"{before:.3f} -> {after:.3f}  ({after / before - 1:+.2%}, {self.after.tokens:,} tokens)")
        ]
        if self.after.kl is not None and self.after.top1 is not None:
            rows.append(("KL, same top token", f"{self.after.kl:.4f} nats, {self.after.top1:.1%}"))
        return rows


def peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts the parent's memory too, from before the program was loaded
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match:
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int | None:
    """Bytes that processes can still take without swapping; None where the system does not say."""
    info = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return int(match[1]) * 1024 if match else None


def _schemes(linears: tuple[LinearRow, ...]) -> str:
    counts: dict[str, int] = {}
    for row in linears:
        counts[row.scheme] = counts.get(row.scheme, 0) + 1
    return ", ".join(f"{count} x {scheme}" for scheme, count in counts.items()) or "none"


def _reasons(unquantized: Mapping[str, str]) -> str:
    names = [f"{name} ({reason})" for name, reason in unquantized.items()]
    more = f" and {len(names) - 4} more, see report.json" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
