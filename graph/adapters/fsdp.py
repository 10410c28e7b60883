"""Models that are sharded by FSDP, as stores: FSDP1 with flat parameters, FSDP2 with DTensors.

This is the only file that knows either. A tensor is gathered when it is read, and gathers are collective: every rank
reads and writes the same names in the same order. Names are those of the checkpoint, without the prefixes of wrappers.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._errors import LayoutError
from ._swapped import refuse_swapped

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter: its whole shape, and how it is put together from the ranks and dealt out to them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    scatter: Callable[[Tensor], None]


class Fsdp:
    """The parameters of an FSDP1 or FSDP2 model as a source and a sink of whole tensors.

    `read` gathers the named tensors on every rank for as long as its context lasts; `write` puts whole tensors of the
    same shape and dtype back into this rank's shards. Tied parameters appear once; `aliases` maps the other names to
    the stored one. Raises `LayoutError` for a model that is not sharded, between a forward and its backward, for a name
    that is not there, and for a tensor of another shape or dtype.

    Args:
      model: the wrapped module, the same on every rank.
      limit: bytes that one `read` may gather; a larger one is refused with its size.
    """

    def __init__(self, model: nn.Module, limit: int | None = None):
        self.model = model
        self.limit = limit
        self.aliases: dict[str, str] = {}
        self._entries = _entries_of(model, self.aliases)
        self._pending = _Pending()
        self._handles = [model.register_forward_hook(self._pending.note), refuse_swapped(model)]

    def specs(self) -> dict[str, Tensor]:
        return {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in self._entries.items()}

    @contextmanager
    def read(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        wanted = list(names)
        self._check(wanted)
        size = sum(torch.Size(e.shape).numel() * e.dtype.itemsize for e in (self._entries[n] for n in wanted))
        if self.limit is not None and size > self.limit:
            raise LayoutError(
                f"{len(wanted)} tensors of {size:,} bytes would be gathered at once, more than the limit of "
                f"{self.limit:,}; read one cell at a time"
            )
        self._settle()
        gathered: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                for name in wanted:
                    gathered[name] = self._entries[name].gather()
            yield gathered
        finally:
            gathered.clear()  # whole tensors live as long as the context, whoever kept the dict

    def write(self, params: Mapping[str, Tensor]) -> None:
        self._check(params)
        for name, p in params.items():
            entry = self._entries[name]
            if tuple(p.shape) != entry.shape or p.dtype != entry.dtype:
                raise LayoutError(
                    f"{name}: the sharded model holds {entry.dtype} {entry.shape}, got {p.dtype} {tuple(p.shape)}; "
                    "only edits that keep both can be made in place, quantize into a folder instead"
                )
        self._settle()
        with torch.no_grad():
            for name, p in params.items():
                self._entries[name].scatter(p.detach())

    def close(self) -> None:
        """Take the store's hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _settle(self) -> None:
        if self._pending.alive():
            raise LayoutError(_in_use(""))
        _settle(self.model)

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._entries:
                hint = f"; it is stored as {self.aliases[name]}" if name in self.aliases else ""
                raise LayoutError(f"the sharded model has no tensor {name}{hint}")


class _Pending:
    """Forwards whose graph is still alive and has not been run backward. FSDP2 keeps no record of them itself."""

    def __init__(self) -> None:
        self.graphs: list[weakref.ref] = []

    def note(self, _module: nn.Module, _inputs: object, out: object) -> None:
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.grad_fn is not None:
                mark = _Mark()
                metadata: Any = t.grad_fn.metadata
                metadata["regauge"] = mark  # lives as long as the graph does
                t.grad_fn.register_prehook(mark.finish)
                self.graphs.append(weakref.ref(mark))

    def alive(self) -> bool:
        self.graphs = [ref for ref in self.graphs if (mark := ref()) is not None and not mark.done]
        return bool(self.graphs)


class _Mark:
    def __init__(self) -> None:
        self.done = False

    def finish(self, _grads: object) -> None:
        self.done = True


def canonical(name: str) -> str:
    """A parameter's or module's name without the prefixes that wrappers put in front of each part."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_sharded(model: nn.Module) -> bool:
    """True for a model that FSDP1 or FSDP2 wraps, wholly or in part."""
    return any(_is_fsdp1(m) or _is_fsdp2(m) for m in model.modules())


def _is_fsdp1(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def _is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _entries_of(model: nn.Module, aliases: dict[str, str]) -> dict[str, _Entry]:
    if not is_sharded(model):
        raise LayoutError(
            f"{type(model).__name__} is not sharded by FSDP; wrap it by fully_shard or FullyShardedDataParallel, or "
            "use Memory.of(model)"
        )
    _settle(model)
    flat = _flat_entries(model, aliases)
    first: dict[int, str] = {}
    entries: dict[str, _Entry] = {}
    for raw, p in model.named_parameters(remove_duplicate=False):
        name = canonical(raw)
        if name in flat or name in aliases or raw.endswith("_flat_param"):
            continue
        if id(p) in first:
            aliases[name] = first[id(p)]
            continue
        first[id(p)] = name
        entries[name] = _sharded_entry(model, raw, p)
    found = {**flat, **entries}
    # in the order of the model's modules, whatever the units are: files are laid out in this order
    place = {canonical(f"{name}."): index for index, (name, _) in enumerate(model.named_modules())}
    order = sorted(found, key=lambda name: place[name.rpartition(".")[0] + "."])
    return {name: found[name] for name in order}


def _settle(model: nn.Module) -> None:
    """Bring every unit to its sharded state; refuse between a forward and its backward, where shards are in use."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    for name, module in model.named_modules():
        if _is_fsdp2(module):
            module.reshard()
        elif _is_fsdp1(module):
            handle: Any = module._handle
            if handle is None:
                continue
            if handle._needs_pre_backward_unshard:
                raise LayoutError(_in_use(name))
            whole = getattr(handle.flat_param, "_full_param_padded", None)
            if handle.uses_sharded_strategy and whole is not None and whole.untyped_storage().size():
                # the outermost unit keeps its whole numbers, and would compute with them
                _reshard(module, handle, True)


def _in_use(name: str) -> str:
    return (
        f"{canonical(name) or 'the model'} has run a forward whose backward is still to come: editing it now would "
        "give wrong gradients; run the backward first, or run the forward under torch.no_grad()"
    )


def _sharded_entry(model: nn.Module, raw: str, p: nn.Parameter) -> _Entry:
    """A DTensor of FSDP2, or a parameter that FSDP leaves alone and every rank holds whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    owner, _, leaf = raw.rpartition(".")

    def current() -> Any:  # FSDP swaps the registered parameter between its states
        return getattr(model.get_submodule(owner), leaf)

    def gather() -> Tensor:
        value = current()
        return _whole(value) if isinstance(value, DTensor) else value.detach().clone()

    def scatter(whole: Tensor) -> None:
        value = current()
        if isinstance(value, DTensor):
            local = value.to_local()
            # no communication: every rank has the whole tensor and keeps its own part
            part = distribute_tensor(
                whole.to(local.device), value.device_mesh, value.placements, src_data_rank=None
            ).to_local()
            local.copy_(part)
        else:
            value.copy_(whole)

    return _Entry(tuple(p.shape), p.dtype, gather, scatter)


def _whole(value: Any) -> Tensor:
    """A DTensor's numbers from all ranks. Floats of one byte travel as integers, which every backend can send."""
    from torch.distributed.tensor import DTensor

    value = value.detach()
    if value.dtype.itemsize > 1 or not value.dtype.is_floating_point:
        whole: Tensor = value.full_tensor()
        return whole
    codes = DTensor.from_local(
        value.to_local().view(torch.uint8),
        value.device_mesh,
        value.placements,
        shape=value.shape,
        stride=value.stride(),
    )
    return codes.full_tensor().view(value.dtype)


def _flat_entries(model: nn.Module, aliases: dict[str, str]) -> dict[str, _Entry]:
    """Every parameter inside a flat parameter of FSDP1, by its canonical name."""
    entries: dict[str, _Entry] = {}
    prefixes = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None) if _is_fsdp1(module) else None
        if handle is None:
            continue
        flat = handle.flat_param
        ends = list(accumulate(flat._numels_with_padding))
        real = (
            [i for i, padding in enumerate(flat._is_padding_mask) if not padding]
            if _has_padding(flat)
            else range(len(ends))
        )
        for info, shape, number in zip(flat._param_infos, flat._shapes, real, strict=True):
            name = _join(prefixes[id(info.module)], info.param_name)
            entries[name] = _flat_entry(handle, tuple(shape), ends[number] - flat._numels_with_padding[number])
        for shared in flat._shared_param_infos:
            alias = _join(prefixes[id(shared.module)], shared.param_name)
            aliases[alias] = _join(prefixes[id(shared.prim_module)], shared.prim_param_name)
    return entries


def _has_padding(flat: Any) -> bool:
    return len(getattr(flat, "_is_padding_mask", ())) == len(flat._numels_with_padding)


def _join(module: str, leaf: str) -> str:
    return canonical(f"{module}.{leaf}" if module else leaf)


def _flat_entry(handle: Any, shape: tuple[int, ...], start: int) -> _Entry:
    """Numbers `start` to `start + numel` of a flat parameter, of which this rank holds one run."""
    stop = start + torch.Size(shape).numel()

    def run(rank: int) -> tuple[int, int]:
        """The part of the parameter in a rank's shard, in numbers of the flat parameter."""
        if not handle.uses_sharded_strategy:
            return start, stop
        size = handle.flat_param._sharded_size.numel()
        low, high = max(start, rank * size), min(stop, (rank + 1) * size)
        return low, max(low, high)

    def local() -> Tensor:
        """This rank's part, as a view of its shard."""
        low, high = run(handle.rank)
        offset = handle.rank * handle.flat_param._sharded_size.numel() if handle.uses_sharded_strategy else 0
        view: Tensor = handle.flat_param.detach()[low - offset : high - offset]
        return view

    def gather() -> Tensor:
        if not handle.uses_sharded_strategy:
            return local().clone().reshape(shape)
        runs = [run(rank) for rank in range(handle.world_size)]
        longest = max(high - low for low, high in runs)
        mine = local()
        padded = mine.new_zeros(longest)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in runs]
        dist.all_gather(parts, padded, group=handle.process_group)
        return torch.cat([part[: high - low] for part, (low, high) in zip(parts, runs, strict=True)]).reshape(shape)

    def scatter(whole: Tensor) -> None:
        low, high = run(handle.rank)
        local().copy_(whole.reshape(-1)[low - start : high - start])

    return _Entry(shape, handle.flat_param.dtype, gather, scatter)
