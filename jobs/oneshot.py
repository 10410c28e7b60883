"""The main job: calibrate once, equalize, quantize, write a checkpoint, measure it. On one process or on many."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ..graph import LayoutError, PlanError
from ..graph.adapters import everyones, process_group, rank, together, world
from ..graph.adapters.partial import check_target, tidy, write_json
from ..graph.skeleton import is_causal_lm, model_class, reads_tokens_alone
from ..transforms import Encode, Plan, Transform, chain, must_untie, plan, split_key
from .checkpoint import Checkpoint, fingerprint, open_checkpoint, quantized_config, read_json
from .data import Data, sequences
from .evaluate import Evaluation, compare, load_quietly, load_tokenizer
from .placement import Placement, make_placement, resolve
from .plots import can_plot, plot_peaks, plot_sqnr
from .recipes import load_recipe
from .report import Report, available_memory, peak_memory
from .smollm2 import model_folder
from .statistics import collect, read_statistics, statistics_key
from .writing import Written, hashes_of, open_partial, require_room, run_key, write_tensors

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calibration:
    """Statistics, their key, and the hash of the model that they are of; no statistics when the recipe needs none."""

    model_hash: str
    stats: Mapping[str, Tensor]
    key: str | None
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Everything that a run needs, checked."""

    checkpoint: Checkpoint
    planned: Plan
    recipe: Mapping[str, Any]
    given: Mapping[str, Tensor] | None
    ids: list
    held_out: list
    max_seq_length: int
    batch_size: int


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
    statistics: str | Path | Mapping[str, Tensor] | None = None,
    reuse_statistics: bool = True,
    placement: Placement | str | Mapping[str, Any] = "auto",
    plots: bool = True,
) -> Report:
    """Equalize and quantize a checkpoint, and write one that transformers and vLLM load.

    The same call works under `torchrun` and `accelerate launch`: calibration samples, tensors to write and text to
    measure on are dealt to the processes, and the folder has the same bytes. A run that was killed is taken up again by
    the same call: what it has written and journalled is compared and kept.

    Args:
      model: a checkpoint folder of safetensors, or "smollm2", the demo model.
      dataset: calibration text, by name or path, or a `Data`. Read only if the recipe needs statistics.
      output_dir: the folder to write. It must not exist unless `overwrite_output_dir`; work goes on in
        `OUTPUT_DIR.partial`, which is renamed at the end. All processes must reach it by this path.
      recipe: a packaged name, a YAML file, a mapping, or a `Transform`.
      splits: `{"calibration": "train"}`, or the split's name.
      concatenate_data: join documents and cut the stream; None joins plain text and leaves rows as they are.
      num_calibration_samples, max_seq_length: how many sequences, of how many tokens.
      batch_size: sequences in one forward; None takes about 2048 tokens.
      max_shard_size: largest file, in bytes or as "5GB".
      evaluation: text on which to measure the model before and after; None does not measure.
      statistics: statistics from elsewhere, as a dict or a safetensors file; then no data is read.
      reuse_statistics: take statistics of the same model on the same tokens from the cache, and keep them there.
      placement: where the model lives during calibration: "whole", "stream" (layer by layer from disk), "fsdp1",
        "fsdp2", a `Placement` with settings, or "auto".
      plots: draw plots into the output folder where matplotlib is installed.

    Returns:
      What was done, measured and left out, on every process. The same is in `report.json`, and what makes the bytes in
      `regauge.json`.

    Raises `PlanError` or `LayoutError` before any work when the recipe, the model, the data or the folder are wrong, on
    all processes.
    """
    settings = make_placement(placement)
    with process_group(settings.timeout, resolve(settings).is_sharded):
        placed = resolve(settings)
        target = Path(everyones(str(Path(output_dir).absolute()) if world() > 1 else str(output_dir), "starting")[0])
        seconds: dict[str, float] = {}
        with _phase(seconds, "check"):
            with together("check"):
                limit = parse_size(max_shard_size)
                data = _calibration_data(dataset, splits, concatenate_data, num_calibration_samples, max_seq_length)
            job = _check(model, recipe, data, target, overwrite_output_dir, evaluation, statistics, batch_size)
        with _phase(seconds, "calibrate"):
            calibration = _calibrate(job, placed, reuse_statistics)
        key = run_key(job.planned, calibration.stats, calibration.model_hash, limit)
        partial = open_partial(target, key, overwrite_output_dir)
        try:
            with _phase(seconds, "write"), progress_bar(_bytes(job.planned.source), "writing", "B") as bar:
                written = write_tensors(job.checkpoint, job.planned, calibration.stats, partial, limit, bar.update)
                hashes = hashes_of(partial.folder)
            report = _report(job, calibration, written, target, model, placed, seconds)
            with together("finishing the folder"):
                if rank() == 0:
                    report = _finish(job, calibration, written, report, hashes, partial.folder, plots)
                    partial.finish()
        finally:
            partial.close()
        if job.held_out:
            with _phase(seconds, "evaluate"):
                before, after = _evaluate(job.checkpoint.folder, target, job.held_out)
            report = replace(report, before=before, after=after, seconds=seconds, peak_memory=_peak())
            if rank() == 0:
                write_json(target / "report.json", report.to_json())
        return everyones(report, "finishing")[0]


def _check(model, recipe, data: Data, target: Path, overwrite, evaluation, statistics, batch_size) -> _Job:
    """Everything that can be wrong, before any work."""
    with together("check"):
        transform, description = load_recipe(recipe)
        if target.exists() and rank() == 0:
            tidy(target)
        check_target(target, overwrite)
        _check_parent(target)
    source, checkpoint = _in_turn(lambda: _open(model))
    with together("check"):
        planned = plan_output(transform, checkpoint)
        require_room(target, planned)
        given = None if statistics is None else _given(statistics, planned)
        calibrated = bool(planned.needs) and given is None
        tokenizer = load_tokenizer(source) if calibrated or evaluation else None
        ids = sequences(data, tokenizer) if calibrated else []
        held_out = sequences(evaluation, tokenizer) if evaluation else []
        _check_model(checkpoint, calibrated, bool(held_out))
        if held_out and planned.schemes:
            _require("compressed_tensors", "measuring the written checkpoint")
        if held_out:
            _require_memory(checkpoint)
    return _Job(
        checkpoint=checkpoint,
        planned=planned,
        recipe=description,
        given=given,
        ids=ids,
        held_out=held_out,
        max_seq_length=data.max_seq_length,
        batch_size=batch_size or max(1, 2048 // data.max_seq_length),
    )


def _require_memory(checkpoint: Checkpoint) -> None:
    """Measuring holds the model and the output, whole, in each process."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1) if world() > 1 else 1
    needed, found = 2 * here * _bytes(checkpoint.params), available_memory()
    if found is not None and needed > found:
        raise LayoutError(
            f"evaluation: holds the model and the output whole in {here} process{'es' if here > 1 else ''}, "
            f"{needed / 1e9:.1f} GB, and {found / 1e9:.1f} GB of memory are free; run with evaluation=none"
        )


def _open(model: str | Path) -> tuple[Path, Checkpoint]:
    source = model_folder(model)
    return source, open_checkpoint(source)


def _in_turn(work):
    """The first rank works before the others, which then find its files: the demo model, the proofs."""
    result = None
    for turn in (rank() == 0, rank() != 0):
        with together("check"):
            if turn:
                result = work()
    return result


def _given(statistics: str | Path | Mapping[str, Tensor], planned: Plan) -> Mapping[str, Tensor]:
    """The statistics of the user, which must be those that the plan needs."""
    if not isinstance(statistics, Mapping) and not Path(statistics).is_file():
        raise LayoutError(f"statistics: {statistics}: no such file; expected a safetensors file of `observe`'s result")
    stats = statistics if isinstance(statistics, Mapping) else read_statistics(Path(statistics))
    missing = [key for key in planned.needs if key not in stats]
    if missing:
        raise LayoutError(
            f"statistics: {missing[0]} is missing ({len(missing)} of {len(planned.needs)} that are needed)"
        )
    return {key: stats[key] for key in planned.needs}


def _report(job: _Job, calibration, written: Written, target: Path, model, placed: Placement, seconds) -> Report:
    return Report(
        output_dir=str(target),
        model=str(model),
        model_type=job.checkpoint.config.model_type,
        recipe=job.recipe,
        placement=placed.kind,
        processes=world(),
        num_samples=len(job.ids),
        max_seq_length=job.max_seq_length,
        statistics_key=calibration.key,
        statistics_reused=calibration.reused,
        cells_resumed=written.resumed,
        bytes_before=_bytes(job.checkpoint.params),
        bytes_after=_bytes(job.planned.target),
        linears=written.rows,
        unquantized=_unquantized(job.checkpoint, job.planned),
        dead_channels=_dead_channels(job.planned, calibration.stats),
        seconds=seconds,
        peak_memory=_peak(),
    )


def _finish(job: _Job, calibration, written: Written, report: Report, hashes, folder: Path, plots: bool) -> Report:
    """What stands beside the tensors; the config comes last but for the reports, so that nothing loads half a model."""
    original = read_json(job.checkpoint.folder / "config.json")
    pictures = _plot(written, job.checkpoint, folder) if plots else ()
    write_json(folder / "config.json", quantized_config(original, job.checkpoint.graph, _integer_schemes(job.planned)))
    write_json(folder / "regauge.json", _provenance(job.recipe, job.planned, calibration, hashes))
    report = replace(report, plots=tuple(str(Path(report.output_dir) / name) for name in pictures))
    write_json(folder / "report.json", report.to_json())
    return report


def _bytes(params: Mapping[str, Tensor]) -> int:
    return sum(p.nbytes for p in params.values())


def _peak() -> int:
    """The largest peak of all processes."""
    return max(everyones(peak_memory(), "finishing"))


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
    """A bar with rate and ETA; silent when the output is not a terminal, and on all processes but the first."""
    quiet = True if rank() else None
    return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", disable=quiet, leave=False)


def _calibrate(job: _Job, placed: Placement, reuse: bool) -> _Calibration:
    with progress_bar(_bytes(job.checkpoint.params) // world(), "checking weights", "B") as bar:
        model_hash = fingerprint(job.checkpoint, bar.update)
    if job.given is not None or not job.planned.needs:
        return _Calibration(model_hash=model_hash, stats=job.given or {}, key=None, reused=False)
    key = statistics_key(model_hash, job.ids)
    with progress_bar(len(job.ids) // world(), "calibrating", "sequence") as bar:
        stats, reused = collect(
            key,
            job.planned.needs,
            job.checkpoint,
            job.ids,
            placed,
            batch_size=job.batch_size,
            reuse=reuse,
            progress=bar.update,
        )
    return _Calibration(model_hash=model_hash, stats=stats, key=key, reused=reused)


def _evaluate(source: Path, target: Path, ids: list) -> tuple[Evaluation, Evaluation]:
    reference, quantized = load_quietly(source), load_quietly(target, warm=True)
    with progress_bar(2 * len(ids), "measuring", "sequence") as bar:
        before = compare(reference, ids, progress=bar.update)
        after = compare(quantized, ids, reference=reference, progress=bar.update)
    return before, after


def _plot(written: Written, checkpoint: Checkpoint, folder: Path) -> tuple[str, ...]:
    if not can_plot():
        _log.info("no plots: they need matplotlib, pip install 'regauge[plot]'")
        return ()
    names = []
    if written.rows:
        plot_sqnr(written.rows, checkpoint.graph, folder / "sqnr.png")
        names.append("sqnr.png")
    if written.peaks:
        plot_peaks(written.peaks, folder / "ranges.png")
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


def _provenance(recipe: Mapping[str, Any], planned: Plan, calibration: _Calibration, hashes: Mapping) -> dict[str, Any]:
    """What determines the bytes of the output, and their hashes. No times: equal inputs give equal files."""
    packages = ("regauge", "torch", "transformers", "safetensors")
    return {
        "recipe": recipe,
        "steps": [step.name for step in planned.steps],
        "model": calibration.model_hash,
        "statistics_key": calibration.key,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "sha256": hashes,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _check_parent(target: Path) -> None:
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


@contextlib.contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 3)
