"""Collect statistics of activations in one forward over calibration batches."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..transforms import Kind, split_key
from ._errors import LayoutError, PlanError
from .types import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token ids (B, T), their mask (B, T) with True for real tokens, and the number of each sequence (B,)."""

    input_ids: Tensor
    attention_mask: Tensor
    index: Tensor


_POSITIONS = 1 << 24  # more than any sequence has


class _Done(Exception):
    """Every site of this batch was seen; nothing after it matters."""


def observe(
    model: nn.Module,
    batches: Iterable[Batch],
    keys: Iterable[str],
    graph: Graph,
    *,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """Statistics `keys` ("<kind>:<site>", as `Plan.needs` lists them) of the activations of `model` on `batches`.

    Each site is observed once, at the first linear that reads it; padding is left out. The forward runs in the dtype of
    the model, statistics accumulate in float32, and it ends at the last site: no last projection, no head, no loss.
    `progress` is called with the number of sequences of each finished batch.

    Raises `PlanError` for a key without a site and `LayoutError` when an activation is not finite, when a site sees no
    token, when there is no batch, or for a model that FSDP wraps.
    """
    by_site = kinds_by_site(keys, graph)
    _refuse_wrapped(model)
    if not by_site:
        return {}
    taps = Taps(by_site, graph)
    body = body_of(model, by_site)
    with tapped(model, dict(model.named_modules()), taps, graph), torch.inference_mode():
        for batch in batches:
            taps.start(batch)
            with contextlib.suppress(_Done):
                body(input_ids=batch.input_ids, attention_mask=taps.padding(batch), use_cache=False)
            taps.finish()
            if progress is not None:
                progress(len(batch.index))
    return taps.result()


@contextlib.contextmanager
def tapped(model: nn.Module, modules: Mapping[str, nn.Module], taps: "Taps", graph: Graph) -> Iterator[None]:
    """Within the context the model is in eval mode and tells the taps what their sites see; `modules` by name."""
    handles = [
        modules[graph.sites[site].module or site].register_forward_pre_hook(taps.hook(site)) for site in taps.by_site
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _refuse_wrapped(model: nn.Module) -> None:
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if classes & {"FullyShardedDataParallel", "FSDPModule"}:
        raise LayoutError(
            f"{type(model).__name__} is sharded by FSDP, and `observe` would leave out its hooks and the other ranks; "
            "use observe_sharded(model, ...)"
        )


def kinds_by_site(keys: Iterable[str], graph: Graph) -> dict[str, dict[str, Kind]]:
    """Site -> key -> kind. Raises `PlanError` for a site that the graph does not have or that cannot be observed."""
    by_site: dict[str, dict[str, Kind]] = {}
    for key in keys:
        kind, site = split_key(key)
        if site not in graph.sites:
            raise PlanError(f"statistic {key!r}: the graph has no site {site!r}")
        if graph.sites[site].module is None:
            raise PlanError(f"statistic {key!r}: this activation lies inside a module's forward and cannot be observed")
        by_site.setdefault(site, {})[key] = kind
    return by_site


def body_of(model: nn.Module, sites: Iterable[str]) -> nn.Module:
    """The model without its head, unless a site lies in the head."""
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, model) if prefix else model
    return body if all(site.startswith(f"{prefix}.") for site in sites) else model


class Taps:
    """The states of all statistics, and where in the current forward we are.

    `whole`: let every forward run to its end, as sharded models must. `paused`: count nothing. `apart`: keep what each
    batch adds to a sum, instead of the sum, so that ranks can add it in the order of one process.
    """

    def __init__(
        self, by_site: Mapping[str, Mapping[str, Kind]], graph: Graph, whole: bool = False, apart: bool = False
    ):
        self.by_site = by_site
        self.whole = whole
        self.paused = False
        self.number = 0
        self.apart: dict[str, dict[int, list[Tensor]]] = {}
        if apart:
            self.apart = {key: {} for kinds in by_site.values() for key, kind in kinds.items() if not kind.exact}
        self.states = {
            key: kind.init(graph.sites[site].width) for site, kinds in by_site.items() for key, kind in kinds.items()
        }
        self.seen: list[str] = []
        self.last: str | None = None
        self.tokens = dict.fromkeys(by_site, 0)
        self.batches = 0

    def start(self, batch: Batch, number: int = 0) -> None:
        """The next activations are of this batch, the `number`-th of this process."""
        self.seen.clear()
        self.number = number
        # row numbers depend on the sequence and the position alone, so that samples do not depend on the batching
        rows = batch.index[:, None] * _POSITIONS + torch.arange(batch.input_ids.shape[1])
        keep = batch.attention_mask.reshape(-1).bool()
        self.keep = None if bool(keep.all()) else keep.nonzero().squeeze(1)
        self.rows = rows.reshape(-1) if self.keep is None else rows.reshape(-1)[self.keep]
        self.count = keep.numel()

    def padding(self, batch: Batch) -> Tensor | None:
        """The mask to give the model: None when nothing is padded, which allows the fast attention path."""
        return None if self.keep is None else batch.attention_mask

    def finish(self) -> None:
        self.batches += 1
        # stop early from the second batch on, if the first saw every site exactly once; with routed experts it may not
        if not self.whole and self.batches == 1 and sorted(self.seen) == sorted(self.by_site):
            self.last = self.seen[-1]

    def hook(self, site: str) -> Callable:
        def tap(_module: nn.Module, args: tuple) -> None:
            if not self.paused:
                self._update(site, args[0])
            if site == self.last:
                raise _Done

        return tap

    def _update(self, site: str, x: Tensor) -> None:
        self.seen.append(site)
        x_TC = x.detach().reshape(-1, x.shape[-1])
        rows = self.rows
        if x_TC.shape[0] != self.count:  # routed tokens: their positions are not known here
            if self.keep is not None:
                raise LayoutError(
                    f"calibration: {site} sees some of the tokens only, and which of them are padding cannot be told; "
                    "use a batch size of 1, or sequences of one length"
                )
            rows = self.tokens[site] + torch.arange(x_TC.shape[0])
        elif self.keep is not None:
            x_TC = x_TC[self.keep]
        self.tokens[site] += x_TC.shape[0]
        for key, kind in self.by_site[site].items():
            if key in self.apart:
                fresh = kind.update(kind.init(x_TC.shape[1]), x_TC, rows)
                self.apart[key].setdefault(self.number, []).append(fresh)
            else:
                self.states[key] = kind.update(self.states[key], x_TC, rows)

    def result(self) -> dict[str, Tensor]:
        if not self.batches:
            raise LayoutError("calibration: there is no batch; the dataset is empty")
        unseen = [site for site, tokens in self.tokens.items() if not tokens]
        if unseen:
            raise LayoutError(f"calibration: no token reached {unseen[0]} ({len(unseen)} sites); use more samples")
        for key, state in self.states.items():
            # an empty slot of a sample has priority +inf, which is no fault of the model
            values = state[..., :-1] if key.startswith("sample:") else state
            if not bool(torch.isfinite(values).all()):
                raise LayoutError(f"calibration: {key} is not finite; the model overflows on this data")
        # copies made outside inference mode, so that the result can take part in autograd
        return {key: state.clone() for key, state in self.states.items()}
