"""Where the model lives while it is calibrated, and on how many processes."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..graph import PlanError
from ..graph.adapters import Sharding, world

_KINDS = ("auto", "whole", "stream", "fsdp1", "fsdp2")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How calibration holds the model. The bytes of the output do not depend on it (but see `threads`).

    Args:
      kind: "whole", each process holds all of it; "stream", one layer at a time is read from disk; "fsdp1" and "fsdp2",
        the processes hold it between them; "auto", what accelerate's environment says, else "stream" where several
        processes were launched, else "whole".
      wrap: with FSDP, the classes of modules that are units of their own; None: the repeated layers.
      min_num_params: with FSDP, units by size instead.
      use_orig_params: FSDP1 only.
      reshard_after_forward: with FSDP, free a unit after its forward.
      replicate: with FSDP, groups of processes that each hold the whole model (HSDP).
      threads: of each process, during calibration; None leaves them as they are. The matrix product of bfloat16 rounds
        differently with another number of threads, so give one to get the same bytes on any number of processes.
      timeout: seconds after which a process that waits for others gives up.
    """

    kind: str = "auto"
    wrap: tuple[str, ...] | None = None
    min_num_params: int | None = None
    use_orig_params: bool = False
    reshard_after_forward: bool = True
    replicate: int = 1
    threads: int | None = None
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise PlanError(f"placement: expected one of {', '.join(_KINDS)}, got {self.kind!r}")
        if self.wrap is not None:
            object.__setattr__(self, "wrap", (self.wrap,) if isinstance(self.wrap, str) else tuple(self.wrap))
        if self.threads is not None and self.threads < 1:
            raise PlanError(f"placement: threads must be at least 1, got {self.threads}")
        if self.timeout <= 0:
            raise PlanError(f"placement: timeout is in seconds, got {self.timeout}")

    @property
    def is_sharded(self) -> bool:
        return self.kind in ("fsdp1", "fsdp2")

    @property
    def sharding(self) -> Sharding:
        return Sharding(
            version=int(self.kind[-1]),
            wrap=self.wrap,
            min_num_params=self.min_num_params,
            use_orig_params=self.use_orig_params,
            reshard_after_forward=self.reshard_after_forward,
            replicate=self.replicate,
        )


def make_placement(value: "Placement | str | Mapping") -> Placement:
    """A placement from its kind or its settings. Raises `PlanError` for a setting that there is not."""
    if isinstance(value, Placement):
        return value
    if isinstance(value, str):
        return Placement(kind=value)
    try:
        return Placement(**value)
    except TypeError as error:
        raise PlanError(f"placement: {error}") from error


def resolve(placement: Placement, env: Mapping[str, str] = os.environ) -> Placement:
    """The placement with "auto" replaced by what the environment asks for."""
    if placement.kind != "auto":
        return placement
    if _is_true(env.get("ACCELERATE_USE_FSDP")):
        return _from_accelerate(placement, env)
    return replace(placement, kind="stream" if world() > 1 else "whole")


def _from_accelerate(placement: Placement, env: Mapping[str, str]) -> Placement:
    """What `accelerate launch` says of FSDP: version, strategy, and how to wrap."""
    version = env.get("FSDP_VERSION", "1")
    if version not in ("1", "2"):
        raise PlanError(f"accelerate: FSDP_VERSION is {version!r}, expected 1 or 2")
    strategy = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    strategy = names[int(strategy) - 1] if strategy.isdigit() and 0 < int(strategy) <= len(names) else strategy
    if version == "1" and strategy not in names:
        raise PlanError(f"accelerate: FSDP_SHARDING_STRATEGY is {strategy!r}, expected one of {', '.join(names)}")
    if version == "1" and strategy == "NO_SHARD":
        return replace(placement, kind="whole")
    kept = strategy.endswith(("GRAD_OP", "ZERO2")) if version == "1" else not _is_true(
        env.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    )  # fmt: skip
    local = int(env.get("LOCAL_WORLD_SIZE", "0") or 0)
    groups = world() // local if version == "1" and strategy.startswith("HYBRID") and local else 1
    for name, unused in _UNUSED.items():
        if env.get(name, unused).lower() not in (unused, ""):
            _log.info("accelerate: %s=%s is for training and has no effect on a calibration", name, env[name])
    return replace(
        placement,
        kind=f"fsdp{version}",
        use_orig_params=_is_true(env.get("FSDP_USE_ORIG_PARAMS")),
        reshard_after_forward=not kept,
        replicate=max(groups, 1),
        **_wrapping(placement, env),
    )


# settings of accelerate that this library has no use for, and their neutral values
_UNUSED = {
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_IGNORED_MODULES": "",
    "ACCELERATE_MIXED_PRECISION": "no",
}


def _wrapping(placement: Placement, env: Mapping[str, str]) -> dict:
    policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if placement.wrap is not None or placement.min_num_params is not None:
        return {}
    if policy == "TRANSFORMER_BASED_WRAP":
        named = [name.strip() for name in env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")]
        return {"wrap": tuple(name for name in named if name) or None}
    if policy == "SIZE_BASED_WRAP":
        return {"min_num_params": int(env.get("FSDP_MIN_NUM_PARAMS", "0"))}
    if policy == "NO_WRAP":
        return {"wrap": ()}
    raise PlanError(f"accelerate: FSDP_AUTO_WRAP_POLICY is {policy!r}; known are TRANSFORMER_BASED_WRAP, "
                    "SIZE_BASED_WRAP and NO_WRAP")  # fmt: skip


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Within the context, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
