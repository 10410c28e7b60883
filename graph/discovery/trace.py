"""One forward of a model as a list of operators, with parameters as inputs.

The model is a copy that holds fake tensors, so nothing is computed and no memory is used. What is recorded is what
reaches the dispatcher: views, elementwise operators, contractions. `symmetries.py` reads this list.
"""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .._errors import LayoutError, first_line
from ..skeleton import tied_names

# Experts are run as one grouped matmul on the tokens sorted by expert: the only way without a data-dependent loop that
# keeps each stack of experts one operand.
EXPERTS = "grouped_mm"
_MAX_CONSTANT = 1 << 20
# The name of a node that no operator makes: other views of memory that was written in place, as they are afterwards.
# Its arguments are the values written and the views before.
WRITTEN = "a view of memory written in place"


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in the arguments of an operator, by its number."""

    id: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the trace: its layout, and the parameter that it is a view or a copy of, if it is one.

    `added`: the value is `added + parameter`. `picked`: the number of the index that picked slices of a stack by data.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    param: str | None = None
    added: float = 0.0
    picked: int | None = None
    floating: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, its arguments with `Ref` for tensors, the values it makes, and the module that it ran in."""

    op: Any
    args: tuple
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    module: str
    name: str  # without overload and namespace; an in-place operator has the name of its functional form
    inputs: frozenset[int]  # every `Ref` in args and kwargs


@dataclass(slots=True)
class Trace:
    """Nodes in order, values by number, and what is asked of them.

    `users`: nodes that read a value. `makers`: the node that makes it. `given`: the value that each module got as its
    first argument. `made`: the module that returned a value. `returned`: values that the model returns. `constants`:
    values that are written in the code, not computed.
    """

    nodes: list[Node] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=dict)
    makers: dict[int, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)


def trace_forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Trace:
    """Record one forward of a copy of the meta model. The model itself is left as it is.

    Raises `LayoutError` naming the module and the operator where the forward depends on the values of tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    ties = tied_names(model)
    # bfloat16: the grouped matmul of mixture-of-experts models accepts nothing else on fake tensors
    model = copy.deepcopy(model).bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for alias, stored in ties.items():  # which makes a tensor for each name
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(stored))
        use_plain_operators(model, EXPERTS)
        recorder = _Recorder(model)
        given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
        try:
            with torch.no_grad(), recorder:
                out = model(**given)
        except Exception as error:  # whatever the model's own code raises: the cause is named, and chained
            raise LayoutError(_untraceable(recorder, error)) from error
    main = main_output(out)
    recorder.trace.returned = {recorder.ids[id(t)] for t in tree_leaves(main) if id(t) in recorder.ids}
    return recorder.trace


def main_output(out: Any) -> Any:
    """What a model computes: its logits, else its last hidden state, else its first output."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(out, name, None)
        if isinstance(value, Tensor):
            return value
    while not isinstance(out, Tensor):
        items = list(out.values()) if isinstance(out, Mapping) else out
        if not isinstance(items, list | tuple) or not items:
            raise LayoutError(f"the model returns {type(out).__name__} where a tensor, or a tuple of them, is expected")
        out = items[0]
    return out


def use_plain_operators(model: nn.Module, experts: str) -> None:
    """Attention as plain matmuls, since nothing can be said of a fused kernel; experts as named; no caches, and no
    warnings about padding, which look at values.
    """
    choose = getattr(model, "set_attn_implementation", None)
    if callable(choose):
        choose("eager")
    config = getattr(model, "config", None)
    for name, value in (("use_cache", False), ("pad_token_id", None)):
        with contextlib.suppress(Exception):  # a config that does not have it, or that validates
            if getattr(config, name) != value:
                setattr(config, name, value)
    choose = getattr(model, "set_experts_implementation", None)
    if callable(choose):
        with contextlib.suppress(ValueError):  # a model without such experts
            choose(experts)


def _untraceable(recorder: "_Recorder", error: Exception) -> str:
    first = first_line(error)[:200]
    name = recorder.modules[-1]
    where = f"module {name!r}" if name else "the model's own forward"
    return (
        f"the forward cannot be traced: operator {recorder.current} in {where} ({recorder.classes[name]}) "
        f"raised {type(error).__name__}: {first}"
    )


class _Recorder(TorchDispatchMode):
    """Writes down every operator that is dispatched."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.trace = Trace()
        self.ids: dict[int, int] = {}
        self.alive: list[Tensor] = []  # ids of freed tensors would be given to new ones
        self.seen: dict[int, list[Tensor]] = {}  # tensors by storage
        self.storages: dict[int, Value] = {}  # storage of a parameter, or of its copy -> what its values have in common
        self.modules: list[str] = [""]
        self.current = "none"
        self.classes = {name: type(module).__name__ for name, module in model.named_modules()}
        for name, p in model.named_parameters():
            self.storages[p.untyped_storage()._cdata] = Value((), (), 0, param=name)
            self.trace.params[name] = tuple(p.shape)
            self.number(p)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name))
            module.register_forward_hook(self._leave(name))

    def _enter(self, name: str):
        def hook(_module: nn.Module, args: tuple) -> None:
            self.modules.append(name)
            if args and isinstance(args[0], Tensor):
                self.trace.given.setdefault(name, self.number(args[0]))

        return hook

    def _leave(self, name: str):
        def hook(_module: nn.Module, _args: tuple, out: Any) -> None:
            self.modules.pop()
            if isinstance(out, Tensor):
                self.trace.made.setdefault(self.number(out), name)

        return hook

    def number(self, t: Tensor) -> int:
        if id(t) not in self.ids:
            self._renumber(t)
            self.alive.append(t)
            self.seen.setdefault(t.untyped_storage()._cdata, []).append(t)
        return self.ids[id(t)]

    def _renumber(self, t: Tensor) -> int:
        number = len(self.trace.values)
        known = self.storages.get(t.untyped_storage()._cdata, Value((), (), 0))
        offset = known.offset + int(t.storage_offset())  # a copy of a part starts where that part does
        self.trace.values[number] = replace(
            known, shape=tuple(t.shape), stride=tuple(t.stride()), offset=offset, floating=t.is_floating_point()
        )
        self.ids[id(t)] = number
        return number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if not func._schema.name.startswith("prim::"):  # questions about devices
            self.current = name
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not made:  # questions about devices and sizes
            return out
        refs, krefs = tree_map_only(Tensor, lambda t: Ref(self.number(t)), (args, kwargs))
        if func._schema.is_mutable:
            self._mutate(func, refs, krefs, args, kwargs, name)
        else:
            if not kwargs.get("alpha"):
                self._follow_parameter(name, args, refs, made)
            self._follow_constant(func, name, args, made)
            self._add(func, refs, krefs, tuple(self.number(t) for t in made), name)
        return out

    def _add(self, func, args: tuple, kwargs: Mapping[str, Any], outputs: tuple[int, ...], name: str) -> None:
        index = len(self.trace.nodes)
        inputs = frozenset(x.id for x in tree_leaves((args, kwargs)) if isinstance(x, Ref))
        for number in inputs:
            self.trace.users.setdefault(number, []).append(index)
        for number in outputs:
            self.trace.makers.setdefault(number, index)
        self.trace.nodes.append(Node(func, args, kwargs, outputs, self.modules[-1], name, inputs))

    def _mutate(self, func, refs, krefs, args, kwargs, name: str) -> None:
        """An in-place operator makes a new value. Other views of its memory become values of which nothing is known."""
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        targets = [t for t in tree_leaves(written) if isinstance(t, Tensor)]
        views = [t for target in targets for t in self.seen[target.untyped_storage()._cdata]]
        views = [t for t in views if all(t is not target for target in targets)]
        stale = [Ref(self.ids[id(t)]) for t in views]
        for target in targets:  # what is written is no copy of a parameter any more
            self.storages.pop(target.untyped_storage()._cdata, None)
        new = tuple(self._renumber(t) for t in targets)
        plain = len(targets) == 1 and targets[0] is args[0]
        label = name.removesuffix("_") if plain else f"{name} (writes its arguments)"
        self._add(func, refs, krefs, new, label)
        if stale:
            fresh = tuple(self._renumber(t) for t in views)
            origin = (tuple(Ref(n) for n in new), tuple(stale))
            self._add(func, origin, {}, fresh, WRITTEN)

    def _follow_parameter(self, name: str, args: tuple, refs: tuple, made: list[Tensor]) -> None:
        """A cast or copy of a parameter is that parameter, so is a constant plus it, and so are slices of a stack."""
        if not (args and isinstance(args[0], Tensor) and len(made) == 1):
            return
        source, target = args[0].untyped_storage()._cdata, made[0].untyped_storage()._cdata
        known = self.storages.get(source)
        if known is None or source == target or not made[0].is_floating_point():
            return
        known = replace(known, offset=known.offset + int(args[0].storage_offset()))
        if name in ("_to_copy", "clone", "detach", "alias") and made[0].stride() == args[0].stride():
            self.storages[target] = known
        elif (
            name == "add"
            and len(args) == 2
            and isinstance(args[1], int | float)
            and made[0].stride() == args[0].stride()
        ):
            self.storages[target] = replace(known, added=known.added + float(args[1]))
        elif name == "index" and len(args[1]) == 1 and args[0].ndim > 1 and self._is_whole(known, args[0]):
            self.storages[target] = replace(known, picked=refs[1][0].id)

    def _is_whole(self, known: Value, t: Tensor) -> bool:
        return known.picked is None and t.is_contiguous() and tuple(t.shape) == self.trace.params[known.param or ""]

    def _follow_constant(self, func, name: str, args: tuple, made: list[Tensor]) -> None:
        """A tensor that is made of a list in the code is known, and so are its copies."""
        if len(made) != 1 or not args or not isinstance(args[0], Tensor) or made[0].numel() > _MAX_CONSTANT:
            return
        if name == "lift_fresh" and type(args[0]) is Tensor:  # the only real tensors under this mode
            with _disable_current_modes():
                self.trace.constants[self.number(made[0])] = args[0].clone()
        elif name in ("_to_copy", "clone", "detach", "alias", "view") and self.number(args[0]) in self.trace.constants:
            with _disable_current_modes():
                value = self.trace.constants[self.number(args[0])].to(made[0].dtype).reshape(made[0].shape)
            self.trace.constants[self.number(made[0])] = value
