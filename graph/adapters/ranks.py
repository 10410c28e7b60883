"""What processes that work together say to each other. With one process, or without a group, nothing is said."""

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...transforms import Plan, signature
from .._errors import LayoutError


def rank() -> int:
    """The number of this process among those that work together; 0 when it is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def process_group(timeout: float, needed: bool, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """The process group of the launcher, for as long as the context lasts; one that is there already is used as it is.

    `timeout` is in seconds. Nothing is done for one process, unless a group is `needed` (FSDP wants one even then).
    """
    launched = int(env.get("WORLD_SIZE", "1")) > 1
    if dist.is_initialized() or not (launched or needed):
        yield
        return
    limit = datetime.timedelta(seconds=timeout)
    if launched:
        dist.init_process_group("gloo", timeout=limit)
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def everyones(value: Any, doing: str) -> list[Any]:
    """Collective: the value of each rank, on all ranks. A rank that is gone or late is an error that says `doing`."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    with named(doing):
        dist.all_gather_object(values, value)
    return values


@contextmanager
def named(doing: str) -> Iterator[None]:
    """Errors of collectives (a rank that died, a timeout) say what was being done."""
    try:
        yield
    except RuntimeError as error:  # which errors of backends are, too
        raise LayoutError(f"rank {rank()}: {doing}: {error}") from error


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Collective: an error on one rank is raised on all of them, so that none waits for it."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = everyones(None if failure is None else f"{type(failure).__name__}: {failure}", doing)
    if failure is not None:
        raise failure
    bad = [number for number, text in enumerate(said) if text is not None]
    if bad:
        raise LayoutError(f"rank {bad[0]} failed, and all stop: {said[bad[0]]}")


def agree(planned: Plan, stats: Mapping[str, Tensor]) -> None:
    """Collective: raise on every rank unless all hold the same plan and statistics."""
    same = everyones(signature(planned, stats)[0], "comparing plans")
    odd = [number for number, other in enumerate(same) if other != same[0]]
    if odd:
        raise LayoutError(
            f"ranks {', '.join(map(str, odd))} planned other steps or hold other statistics than rank 0; give every "
            "rank the same transform, and statistics from observe_sharded, which are equal on all"
        )
