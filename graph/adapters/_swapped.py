"""Refuse `functional_call` on a sharded model, which FSDP runs on its own numbers without a word."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._errors import LayoutError


def refuse_swapped(model: nn.Module) -> RemovableHandle:
    """From now on a forward of the sharded model raises `LayoutError` while its parameters are replaced."""
    checks = [*_flat_checks(model), *_dtensor_checks(model)]

    def check(_module: nn.Module, _args: object) -> None:
        for name, is_own in checks:
            if not is_own():
                raise LayoutError(
                    f"{name} was replaced for this forward (functional_call), which a model wrapped by FSDP ignores; "
                    "edit it by apply_sharded, or call the model before it is wrapped"
                )

    return model.register_forward_pre_hook(check, prepend=True)


def _dtensor_checks(model: nn.Module) -> Iterator[tuple[str, Callable[[], bool]]]:
    """FSDP2: what a module holds is the sharded parameter or the whole one."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for param in group.fsdp_params if group is not None else ():
            info = param._module_info

            def is_own(param: Any = param, info: Any = info) -> bool:
                held = info.module._parameters.get(info.param_name)
                return held is param.sharded_param or held is getattr(param, "_unsharded_param", None)

            yield param._param_fqn or info.param_name, is_own


def _flat_checks(model: nn.Module) -> Iterator[tuple[str, Callable[[], bool]]]:
    """FSDP1: what a module holds lies in the flat parameter, or is what it held when the check was made."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        for info in handle.flat_param._param_infos if handle is not None else ():
            first = _storage(getattr(info.module, info.param_name, None))

            def is_own(flat: Any = handle.flat_param, info: Any = info, first: int | None = first) -> bool:
                held = getattr(info.module, info.param_name, None)
                own = (flat, getattr(flat, "_full_param_padded", None), getattr(flat, "_mp_shard", None))
                same = any(held is p for p in getattr(flat, "_params", None) or ())  # use_orig_params=True
                return same or _storage(held) in (first, None, *(_storage(p) for p in own))

            yield f"{info.module_name}.{info.param_name}", is_own


def _storage(p: object) -> int | None:
    return p.untyped_storage()._cdata if isinstance(p, Tensor) else None
