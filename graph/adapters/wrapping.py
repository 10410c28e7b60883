"""Load a checkpoint straight into FSDP units: no rank ever holds more than its shards and one unit."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._errors import PlanError
from ..skeleton import block_prefixes
from ._base import Source
from ._swapped import refuse_swapped
from .loading import Places, fill, hollow, inside, places_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is cut into FSDP units.

    Args:
      version: 1 (`FullyShardedDataParallel`) or 2 (`fully_shard`).
      wrap: names of the classes of modules that are units of their own; None: the model's repeated layers, and the
        embedding and the head where they are not tied.
      min_num_params: instead of `wrap`, every module of at least so many parameters that are in no unit below it.
      use_orig_params: FSDP1 only.
      reshard_after_forward: free a unit's whole parameters after its forward.
      replicate: number of groups of ranks, each of which holds the whole model between them (HSDP).
    """

    version: int = 2
    wrap: tuple[str, ...] | None = None
    min_num_params: int | None = None
    use_orig_params: bool = False
    reshard_after_forward: bool = True
    replicate: int = 1


def load_sharded(config: Any, source: Source, sharding: Sharding) -> nn.Module:
    """The model of `config` on all ranks, sharded, with the numbers of `source`, frozen and in eval mode. Collective.

    Each unit is read, sharded and let go before the next is read. Raises `PlanError` for a class that the model does
    not have, and `LayoutError` for tensors that do not fit.
    """
    model = hollow(config, source.specs())
    places = places_of(model)
    parents = {id(child): (parent, leaf) for parent in model.modules() for leaf, child in parent.named_children()}
    units = [unit for unit in units_of(model, sharding) if _is_closed(places, unit)]
    wrap, loaded = _wrapper(sharding), set[str]()
    for unit in units:
        names = [name for name in inside(places, [unit]) if name not in loaded]
        fill(model, places, source, names)
        loaded.update(names)
        parent, leaf = parents[id(unit)]
        setattr(parent, leaf, wrap(unit))
    fill(model, places, source, [name for name in places if name not in loaded])
    whole: nn.Module = wrap(model).eval()
    refuse_swapped(whole)
    return whole


def _is_closed(places: Places, unit: nn.Module) -> bool:
    """False for a module that shares a tied parameter with one outside: units of their own would untie them."""
    below = {id(module) for module in unit.modules()}
    return all(id(module) in below for name in inside(places, [unit]) for module, _ in places[name])


def units_of(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """The modules to shard by themselves, inner ones first, without the model itself."""
    if sharding.min_num_params is not None:
        return _by_size(model, sharding.min_num_params)
    if sharding.wrap is None:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
        return [*(model.get_submodule(prefix) for prefix in block_prefixes(model)), *(m for m in ends if m is not None)]
    classes = {type(module).__name__ for module in model.modules()}
    unknown = [name for name in sharding.wrap if name not in classes]
    if unknown:
        blocks = {type(model.get_submodule(prefix)).__name__ for prefix in block_prefixes(model)}
        raise PlanError(
            f"placement: no module of class {unknown[0]!r} to shard in {type(model).__name__}; its layers are "
            f"{', '.join(sorted(blocks)) or 'of no list'}"
        )
    found = [module for module in model.modules() if type(module).__name__ in sharding.wrap and module is not model]
    return found[::-1]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Parameters below the module that are in no unit yet."""
        own = sum(p.numel() for p in module.parameters(recurse=False))
        count = own + sum(visit(child) for child in module.children())
        if module is model or isinstance(module, nn.ModuleList | nn.ModuleDict) or count < max(least, 1):
            return count
        units.append(module)
        return 0

    visit(model)
    return units


def _wrapper(sharding: Sharding) -> Any:
    world = dist.get_world_size()
    if sharding.replicate < 1 or world % sharding.replicate:
        raise PlanError(f"placement: {world} processes cannot be cut into {sharding.replicate} equal groups")
    hybrid = sharding.replicate > 1
    shape = (sharding.replicate, world // sharding.replicate) if hybrid else (world,)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard") if hybrid else ("shard",))
    if sharding.version == 2:
        from torch.distributed.fsdp import fully_shard

        return lambda unit: fully_shard(unit, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    whole, kept = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") if hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")
    strategy = ShardingStrategy[whole if sharding.reshard_after_forward else kept]
    return lambda unit: FullyShardedDataParallel(
        unit,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        use_orig_params=sharding.use_orig_params,
    )
