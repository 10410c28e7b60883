"""The main job: calibrate once, equalize, quantize, write a checkpoint, measure it."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..graph import LayoutError, PlanError
from ..graph.adapters import ShardWriter, execute
from ..graph.skeleton import is_causal_lm, model_class, reads_tokens_alone
from ..transforms import (
    Encode,
    Params,
    Plan,
    Step,
    Transform,
    chain,
    dequantize,
    must_untie,
    plan,
    split_key,
)
from .checkpoint import (
    Checkpoint,
    copy_side_files,
    fingerprint,
    finish,
    open_checkpoint,
    partial_folder,
    quantized_config,
    read_json,
    write_json,
)
from .data import Data, sequences
from .evaluate import Evaluation, compare, load_model, load_tokenizer
from .plots import can_plot, plot_ranges, plot_sqnr
from .recipes import load_recipe
from .report import LinearRow, Report, peak_memory
from .smollm2 import model_folder
from .statistics import collect, statistics_key

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calibration:
    """Statistics, their key, and the sequences they came from; all empty when the recipe needs none."""

    stats: Mapping[str, Tensor]
    key: str | None
    reused: bool


def oneshot(
    model: str | Path = "smollm2",
    dataset: str | Data = "pydoc",
    output_dir: str | Path = "regauge-output",
    recipe: str | Path | Mapping[str, Any] | Transform = "smooth_w8a8",
    *,
    overwrite_output_dir: bool = False,
    splits: Mapping[str, str] | str | None = None,
    concatenate_data: bool | None = None,
    num_calibration_samples: int = 64,
    max_seq_length: int = 512,
    batch_size: int | None = None,
    max_shard_size: int | str = "5GB",
    evaluation: Data | None = None,
    reuse_statistics: bool = True,
    plots: bool = True,
) -> Report:
    """Equalize and quantize a checkpoint, and write one that transformers and vLLM load.

    Args:
      model: a checkpoint folder of safetensors, or "smollm2", the demo model.
      dataset: calibration text, by name or path, or a `Data`. Read only if the recipe needs statistics.
      output_dir: the folder to write. It must not exist unless `overwrite_output_dir`; work goes on in
        `OUTPUT_DIR.partial`, which is renamed at the end.
      recipe: a packaged name, a YAML file, a mapping, or a `Transform`.
      splits: `{"calibration": "train"}`, or the split's name.
      concatenate_data: join documents and cut the stream; None joins plain text and leaves rows as they are.
      num_calibration_samples, max_seq_length: how many sequences, of how many tokens.
      batch_size: sequences in one forward; None takes about 2048 tokens.
      max_shard_size: largest file, in bytes or as "5GB".
      evaluation: text on which to measure the model before and after; None does not measure.
      reuse_statistics: take statistics of the same model on the same tokens from the cache, and keep them there.
      plots: draw plots into the output folder where matplotlib is installed.

    Returns:
      What was done, measured and left out. The same is in `report.json`, and what makes the bytes in `regauge.json`.

    Raises `PlanError` or `LayoutError` before any work when the recipe, the model, the data or the folder are wrong.
    """
    seconds: dict[str, float] = {}
    with _phase(seconds, "check"):
        transform, description = load_recipe(recipe)
        limit = parse_size(max_shard_size)
        target = Path(output_dir)
        _check_output(target, overwrite_output_dir)
        source = model_folder(model)
        checkpoint = open_checkpoint(source)
        planned = plan_output(transform, checkpoint)
        data = _calibration_data(dataset, splits, concatenate_data, num_calibration_samples, max_seq_length)
        tokenizer = load_tokenizer(source) if planned.needs or evaluation else None
        ids = sequences(data, tokenizer) if planned.needs else []
        held_out = sequences(evaluation, tokenizer) if evaluation else []
        _check_model(checkpoint, bool(planned.needs), bool(held_out))
        if held_out and planned.schemes:
            _require("compressed_tensors", "measuring the written checkpoint")
    with _phase(seconds, "calibrate"):
        size = batch_size or max(1, 2048 // data.max_seq_length)
        calibration = _calibrate(checkpoint, planned, ids, size, reuse_statistics)
    partial = partial_folder(target, overwrite_output_dir)
    with _phase(seconds, "write"):
        rows, final = _write(checkpoint, planned, calibration, partial, limit)
        config = quantized_config(read_json(source / "config.json"), checkpoint.graph, _integer_schemes(planned))
        write_json(partial / "config.json", config)
        pictures = _plot(rows, calibration.stats, final, checkpoint, partial) if plots else ()
        write_json(partial / "regauge.json", _provenance(description, planned, calibration, partial))
    report = Report(
        output_dir=str(target),
        model=str(model),
        model_type=checkpoint.config.model_type,
        recipe=description,
        num_samples=len(ids),
        max_seq_length=data.max_seq_length,
        statistics_key=calibration.key,
        statistics_reused=calibration.reused,
        bytes_before=sum(p.nbytes for p in checkpoint.params.values()),
        bytes_after=sum(p.nbytes for p in planned.target.values()),
        linears=rows,
        unquantized=_unquantized(checkpoint, planned),
        dead_channels=_dead_channels(planned, calibration.stats),
        seconds=seconds,
        peak_memory=peak_memory(),
        plots=tuple(str(target / name) for name in pictures),
    )
    write_json(partial / "report.json", report.to_json())
    finish(partial, target)
    if held_out:
        with _phase(seconds, "evaluate"):
            before, after = _evaluate(source, target, held_out)
        report = replace(report, before=before, after=after, seconds=seconds, peak_memory=peak_memory())
        write_json(target / "report.json", report.to_json())
    return report


def _check_model(checkpoint: Checkpoint, calibrated: bool, evaluated: bool) -> None:
    """Raise `LayoutError` when the model is of a kind that text cannot be run through, or measured on."""
    config, name = checkpoint.config, model_class(checkpoint.config).__name__
    if calibrated and not reads_tokens_alone(config):
        raise LayoutError(
            f"{checkpoint.folder}: {name} reads more than token ids, so it cannot be calibrated on text; use a recipe "
            "that needs no data (cle_w8a8, rtn_w8a8), or collect statistics with `observe` in your own code"
        )
    if evaluated and not is_causal_lm(config):
        raise LayoutError(
            f"{checkpoint.folder}: {name} has no causal language model head, so there is no perplexity to measure; "
            "run with evaluation=none"
        )


def plan_output(transform: Transform, checkpoint: Checkpoint) -> Plan:
    """The plan of the recipe, with the encoding of what it quantizes to integers."""
    planned = plan(transform, checkpoint.params, checkpoint.graph)
    schemes = _integer_schemes(planned)
    if not schemes:
        return planned
    encode = Encode(schemes=schemes, untie=must_untie(schemes, checkpoint.graph))
    return plan(chain(transform, encode), checkpoint.params, checkpoint.graph)


def parse_size(size: int | str) -> int:
    """Bytes of "5GB" or of a number. Raises `PlanError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(size).strip().upper())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise PlanError(f"max_shard_size: expected bytes or a size such as '5GB', got {size!r}")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def progress_bar(total: int, what: str, unit: str) -> tqdm:
    """A bar with rate and ETA; silent when the output is not a terminal."""
    return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", disable=None, leave=False)


def _calibrate(checkpoint: Checkpoint, planned: Plan, ids: list, batch_size: int, reuse: bool) -> _Calibration:
    with progress_bar(sum(p.nbytes for p in checkpoint.params.values()), "checking weights", "B") as bar:
        model_hash = fingerprint(checkpoint, bar.update)
    if not planned.needs:
        return _Calibration(stats={}, key=None, reused=False)
    key = statistics_key(model_hash, ids)
    with progress_bar(len(ids), "calibrating", "sequence") as bar:
        stats, reused = collect(
            key,
            planned.needs,
            checkpoint.graph,
            ids,
            lambda: _load_quietly(checkpoint.folder),
            batch_size=batch_size,
            reuse=reuse,
            progress=bar.update,
        )
    return _Calibration(stats=stats, key=key, reused=reused)


def _write(
    checkpoint: Checkpoint, planned: Plan, calibration: _Calibration, partial: Path, limit: int
) -> tuple[tuple[LinearRow, ...], dict[str, Tensor]]:
    """Side files, then all tensors. Returns a row for each rounded weight, and the statistics after all edits."""
    copy_side_files(checkpoint.folder, partial)
    rows: list[LinearRow] = []
    writer = ShardWriter(partial, planned.target, limit)
    try:
        with progress_bar(sum(p.nbytes for p in planned.source.values()), "writing", "B") as bar:
            final = execute(
                planned,
                checkpoint.shards,
                writer,
                calibration.stats,
                progress=bar.update,
                on_step=lambda step, before, after: rows.extend(_sqnr_rows(step, before, after)),
            )
        writer.close()
    finally:
        writer.abort()
    return tuple(rows), final


def _sqnr_rows(step: Step, before: Params, after: Params) -> Iterator[LinearRow]:
    """A row for the module of a quantizing step (not for the others that read the same tensor)."""
    if not step.schemes:
        return
    name, scheme = next(iter(step.schemes.items()))
    weight = step.reads[0]
    w, q = before[weight].float(), after[weight]
    if not q.dtype.is_floating_point:
        scale, zeros = after[f"{weight}_scale"], after.get(f"{weight}_zero_point")
        q = dequantize(q, scale, zeros, scheme.weights, torch.float32)
    noise, signal = (w - q.float()).square().sum(), w.square().sum()
    db = 10 * torch.log10(signal / noise.clamp(min=1e-30)) if signal > 0 else torch.tensor(0.0)
    yield LinearRow(name=name, scheme=scheme.label, sqnr_db=round(float(db), 3))


def _evaluate(source: Path, target: Path, ids: list) -> tuple[Evaluation, Evaluation]:
    reference, quantized = _load_quietly(source), _load_quietly(target, warm=True)
    with progress_bar(2 * len(ids), "measuring", "sequence") as bar:
        before = compare(reference, ids, progress=bar.update)
        after = compare(quantized, ids, reference=reference, progress=bar.update)
    return before, after


def _plot(rows, before: Mapping[str, Tensor], after: Mapping[str, Tensor], checkpoint: Checkpoint, folder: Path):
    if not can_plot():
        _log.info("no plots: they need matplotlib, pip install 'regauge[plot]'")
        return ()
    names = []
    if rows:
        plot_sqnr(rows, checkpoint.graph, folder / "sqnr.png")
        names.append("sqnr.png")
    if plot_ranges(before, after, folder / "ranges.png"):
        names.append("ranges.png")
    return tuple(names)


def _integer_schemes(planned: Plan) -> dict[str, Any]:
    """Schemes of the modules whose codes are stored; fake-quantized ones are plain float weights."""
    return {} if any(step.fake for step in planned.steps) else dict(planned.schemes)


def _unquantized(checkpoint: Checkpoint, planned: Plan) -> dict[str, str]:
    """Linears that stay as they are, and contracted parameters that the graph does not know."""
    left = {
        x.name: f"{x.cls}, ignored or not targeted"
        for x in checkpoint.graph.linears.values()
        if x.name not in planned.schemes and planned.schemes
    }
    known = {x.weight for x in checkpoint.graph.linears.values()}
    for name, shape in checkpoint.graph.shapes.items():
        if len(shape) > 2 and name not in known and planned.schemes:
            left[name] = f"{len(shape)}-D parameter {shape}, not supported yet"
    return left


def _dead_channels(planned: Plan, stats: Mapping[str, Tensor]) -> dict[str, int]:
    """Channels at each edited site whose statistic is zero or constant, which equalization scales by 1."""
    edited = {site for step in planned.steps for site in step.edits}
    counts = {}
    for key, state in stats.items():
        kind, site = split_key(key)
        if site in edited and kind.name in ("absmax", "range"):
            peak = state[1] - state[0] if kind.name == "range" else state
            counts[site] = int((peak <= 1e-6).sum())
    return {site: count for site, count in counts.items() if count}


def _provenance(recipe: Mapping[str, Any], planned: Plan, calibration: _Calibration, folder: Path) -> dict[str, Any]:
    """What determines the bytes of the output, and their hashes. No times: equal inputs give equal files."""
    packages = ("regauge", "torch", "transformers", "safetensors")
    return {
        "recipe": recipe,
        "steps": [step.name for step in planned.steps],
        "statistics_key": calibration.key,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "sha256": {path.name: _sha256(path) for path in sorted(folder.glob("*.safetensors"))},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_output(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise LayoutError(f"output_dir: {target} exists; choose another folder or pass overwrite_output_dir=true")
    parent = next(p for p in target.absolute().parents if p.exists())
    if not os.access(parent, os.W_OK):
        raise LayoutError(f"output_dir: {parent} is not writable")


def _calibration_data(dataset: str | Data, splits, concatenate: bool | None, samples: int, length: int) -> Data:
    if isinstance(dataset, Data):
        return dataset
    split = splits.get("calibration", "train") if isinstance(splits, Mapping) else splits or "train"
    if isinstance(splits, Mapping) and set(splits) - {"calibration"}:
        raise PlanError(f"splits: expected the key 'calibration', got {sorted(splits)}")
    return Data(name=dataset, split=split, num_samples=samples, max_seq_length=length, concatenate=concatenate)


def _require(package: str, purpose: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise LayoutError(f"{purpose} needs the package {package}: pip install 'regauge[demo]'")


def _load_quietly(folder: Path, warm: bool = False) -> nn.Module:
    """Load without the loaders' own progress bars, which would break ours; what they say of a failure is shown.

    `warm` sends one token through the model, at which compressed-tensors decodes weights, with a bar.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            model = load_model(folder)
            if warm:
                with torch.inference_mode():
                    model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        return model
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


@contextlib.contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 3)
