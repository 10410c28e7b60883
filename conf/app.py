"""`regauge`: run a job from the command line.

regauge                                             the demo: smooth and quantize SmolLM2-135M to W8A8, and measure it
regauge model.path=DIR recipe=smooth_w4a16          another model, another recipe
regauge -m recipe.stages.smooth.alpha=0.5,0.7,0.9   a sweep; statistics are collected once
torchrun --nproc-per-node 2 -m regauge placement=fsdp2   the same on two processes that share the model
regauge job=inspect model.path=DIR                  what can be rescaled, proved: a table, JSON and a picture
"""

import logging
import math
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ..graph import LayoutError, PlanError
from .build import data, plain

_log = logging.getLogger("regauge")


@hydra.main(version_base="1.3", config_path="pkg://regauge.conf", config_name="config")
def run(config: DictConfig) -> float:
    """Run the configured job; return the perplexity measured, so that sweepers can minimise it (0 if none was)."""
    try:
        return _JOBS[config.job.name](config)
    except (PlanError, LayoutError) as error:
        if _is_sweep():
            raise  # the sweep reports which of its jobs failed
        if not _number():  # all processes stop with the same error, or with one that names the first that failed
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _oneshot(config: DictConfig) -> float:
    from ..jobs import oneshot

    values = plain(config)
    report = oneshot(
        values["model"]["path"],
        data(values["data"], "data"),
        _output_dir(values["output_dir"]),
        values["recipe"],
        evaluation=None if values["evaluation"] is None else data(values["evaluation"], "evaluation"),
        placement=values["placement"],
        **values["job"]["settings"],
    )
    if not _number():
        print(report.table())
    return _finite(report.after.perplexity) if report.after else 0.0


def _evaluate(config: DictConfig) -> float:
    from ..jobs import evaluate
    from ..jobs.smollm2 import model_folder

    values = plain(config)
    if values["evaluation"] is None:
        raise PlanError("job=evaluate measures on `evaluation`, which is null")
    model = model_folder(values["model"]["path"])
    reference = model_folder(values["model"]["reference"]) if values["model"]["reference"] else None
    result = evaluate(model, data(values["evaluation"], "evaluation"), reference=reference, **values["job"]["settings"])
    print(f"perplexity  {result.perplexity:.4f}  ({result.tokens:,} tokens)")
    if result.kl is not None and result.top1 is not None:
        print(f"against {reference}: KL {result.kl:.4f} nats, same top token {result.top1:.1%}")
    return _finite(result.perplexity)


def _inspect(config: DictConfig) -> float:
    from ..jobs import inspect

    values = plain(config)
    result = inspect(values["model"]["path"], _output_dir(values["output_dir"], ""), **values["job"]["settings"])
    print(result.table())
    print("\n" + "\n".join(f"written     {path}" for path in result.files))
    return 0.0


_JOBS = {"oneshot": _oneshot, "evaluate": _evaluate, "inspect": _inspect}


def _output_dir(path: str | None, name: str = "model") -> Path:
    """The folder named by the user, else `name` in Hydra's run folder; in a sweep, one subfolder a job."""
    settings = HydraConfig.get()
    if path is None:
        return Path(settings.runtime.output_dir) / name
    return Path(path) / str(settings.job.num) if _is_sweep() else Path(path)


def _is_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _finite(value: float) -> float:
    """Sweepers break on NaN and infinity; a huge perplexity is the worst finite answer."""
    return value if math.isfinite(value) else 1e30


def _number() -> int:
    """The number of this process among those that a launcher started."""
    return int(os.environ.get("RANK", "0") or 0)


def main() -> None:
    """The console script; under `torchrun` and `accelerate launch` only the first process logs and prints."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # quiet: tokenizers warn when a process forks
    if _number():
        sys.argv += [
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ]
    run()
