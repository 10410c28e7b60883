"""FSDP in all its settings: whole tensors go in and out, statistics and edits are those of one process."""

import os
import time

import pytest
import regauge as rg
import torch
import torch.distributed as dist
from ranks import on_ranks
from regauge import LayoutError
from regauge.graph.adapters import Fsdp, Sharding, apply_sharded, load_sharded, load_whole, observe_sharded
from regauge.transforms import SmoothQuant
from sharded_models import CONFIGS, TOKENS, WRAPS, batches, equal, gathered, make, own, wrap
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

CPU = torch.device("cpu")
SLOW = pytest.mark.slow  # most of it; a part of each kind is in the default suite
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)
LOW2 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def layers(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def each(model, change):
    found = layers(model)
    for index in range(len(found)):
        found[index] = change(found[index])
    return model


def fsdp1(model, policy=None, **settings):
    policy = policy or ModuleWrapPolicy({type(layers(model)[0])})
    return FullyShardedDataParallel(model, device_id=CPU, auto_wrap_policy=policy, **settings)


def by_class(name):
    return lambda module, recurse, nonwrapped_numel: recurse or type(module).__name__ == name


def fsdp2(model, mesh=None, **settings):
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def grid():
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def columns(p):
    return Shard(1) if p.ndim == 2 and p.shape[1] % dist.get_world_size() == 0 else Shard(0)


def checkpointed(model):
    return each(model, checkpoint_wrapper)


def compiled(model):
    return each(model, lambda layer: torch.compile(layer, backend="eager"))


# FSDP1's CPU offload needs an accelerator to offload from, and cannot be tried here
SETTINGS = {
    "fsdp1 mixed precision": lambda m: fsdp1(m, mixed_precision=LOW),
    "fsdp1 mixed precision, original parameters": lambda m: fsdp1(m, use_orig_params=True, mixed_precision=LOW),
    "fsdp1 mixed precision, kept": lambda m: fsdp1(
        m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=LOW
    ),
    "fsdp1 kept": lambda m: fsdp1(m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1 kept, original parameters": lambda m: fsdp1(
        m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
    ),
    "fsdp1 ignored": lambda m: fsdp1(m, ignored_states=[layers(m)[0].mlp.up_proj.weight]),
    "fsdp1 checkpointed inside": lambda m: fsdp1(checkpointed(m), by_class("CheckpointWrapper")),
    "fsdp1 checkpointed outside": lambda m: checkpointed(fsdp1(m)),
    "fsdp1 compiled": lambda m: fsdp1(compiled(m), by_class("OptimizedModule"), use_orig_params=True),
    "fsdp2 mixed precision": lambda m: fsdp2(m, mp_policy=LOW2),
    "fsdp2 mixed precision, kept": lambda m: fsdp2(m, mp_policy=LOW2, reshard_after_forward=False),
    "fsdp2 offloaded": lambda m: fsdp2(m, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 columns": lambda m: fsdp2(m, shard_placement_fn=columns),
    "fsdp2 checkpointed inside": lambda m: fsdp2(checkpointed(m)),
    "fsdp2 checkpointed outside": lambda m: checkpointed(fsdp2(m)),
    "fsdp2 compiled": lambda m: fsdp2(compiled(m)),
}
FOUR = {
    "fsdp1 hybrid": lambda m: fsdp1(m, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=grid()),
    "fsdp1 hybrid, kept": lambda m: fsdp1(
        m, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_mesh=grid()
    ),
    "fsdp2 hybrid": lambda m: fsdp2(m, mesh=grid()),
    "fsdp2 resharded to two": lambda m: fsdp2(m, reshard_after_forward=2),
}


def check_settings(kind, table):
    for how, wrapping in table.items():
        exact = "mixed" not in how
        check_store(kind, how, wrapping, exact)
        check_edits(kind, how, wrapping, exact)


def check_store(kind, how, wrapping, exact):
    """The numbers in their own precision go in and out: at first, after a forward, after a backward."""
    whole = own(make(kind))
    wrapped = wrapping(make(kind))
    store = Fsdp(wrapped)
    assert list(store.specs()) == list(whole), how
    assert equal(gathered(store, whole), whole), how
    with torch.no_grad():
        wrapped(input_ids=TOKENS)
    assert equal(gathered(store, whole), whole), how
    wrapped(input_ids=TOKENS).logits.float().sum().backward()
    assert equal(gathered(store, whole), whole), how
    twice = {name: p * 2 for name, p in whole.items()}
    store.write(twice)
    assert equal(gathered(store, whole), twice), how
    alone = make(kind)
    with torch.no_grad():
        for name, p in alone.named_parameters():
            p.copy_(twice[name])
        expected, seen = alone(input_ids=TOKENS).logits, wrapped(input_ids=TOKENS).logits.float()
    if exact:
        assert torch.allclose(seen, expected, atol=1e-5), how
    else:
        assert (seen - expected).norm() < 0.03 * expected.norm(), how
    store.close()


def check_edits(kind, how, wrapping, exact):
    """Statistics over all ranks with one look at each activation, and edits in place."""
    graph, transform, alone = rg.build_graph(CONFIGS[kind]), SmoothQuant(), make(kind)
    planned = rg.plan(transform, own(alone), graph)
    stats = rg.observe(alone, batches(range(6)), planned.needs, graph)
    rank, world, calls = dist.get_rank(), dist.get_world_size(), []
    wrapped = wrapping(make(kind))
    hooks = [
        m.register_forward_pre_hook(lambda *_: calls.append(1))
        for name, m in wrapped.named_modules()
        if name.endswith("q_proj")
    ]
    seen = observe_sharded(wrapped, batches(range(rank, 6, world)), planned.needs, graph)
    assert len(calls) == 2 * -(-6 // world), how
    for hook in hooks:
        hook.remove()
    assert not exact or equal(seen, stats), how
    apply_sharded(transform, wrapped, stats, graph=graph)
    expected = rg.apply(planned, own(alone), stats)
    store = Fsdp(wrapped)
    assert equal(gathered(store, expected), expected), how
    store.close()


# the compiler looks at it while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=SLOW), "tied"])
def test_settings_on_two_ranks(kind):
    on_ranks(2, check_settings, kind, SETTINGS)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=SLOW), "tied"])
def test_meshes_on_four_ranks(kind):
    on_ranks(4, check_settings, kind, FOUR)


class Mixed(nn.Module):
    """Parameters of many dtypes and sizes, some with fewer rows than there are ranks."""

    def __init__(self, integers=True):
        super().__init__()
        self.config = None
        self.a = nn.Linear(5, 7, dtype=torch.bfloat16)
        self.b = nn.Linear(7, 1)
        self.scalar = nn.Parameter(torch.tensor(3.0))
        for name, dtype in (("u8", torch.uint8), ("i8", torch.int8), ("i32", torch.int32)) if integers else ():
            codes = torch.randint(0, 100, (5, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
        if integers:
            self.f8 = nn.Parameter(torch.linspace(-9, 9, 21).reshape(7, 3).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return self.b(self.a(x.bfloat16()).float())


def check_mixed():
    def same(a, b):
        return all(a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)

    torch.manual_seed(0)
    model = Mixed()
    whole = {n: p.reshape(p.shape or (1,)) for n, p in own(model).items() if n != "scalar"}
    wrapped = fully_shard(
        model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={model.scalar}
    )
    store = Fsdp(wrapped)
    assert same(gathered(store, whole), whole)
    store.write({n: p.flip(0) for n, p in whole.items()})
    assert same(gathered(store, whole), {n: p.flip(0) for n, p in whole.items()})
    store.close()
    torch.manual_seed(0)
    units = Mixed(integers=False)
    whole = own(units)
    units.a = FullyShardedDataParallel(units.a, device_id=CPU)  # a dtype of its own
    wrapped = FullyShardedDataParallel(units, device_id=CPU, ignored_states=[units.scalar])
    store = Fsdp(wrapped)
    assert equal(gathered(store, whole), whole)
    store.write({n: p * 3 for n, p in whole.items()})
    assert equal(gathered(store, whole), {n: p * 3 for n, p in whole.items()})
    store.close()


@pytest.mark.parametrize("world", [pytest.param(2, marks=SLOW), 4])
def test_dtypes_side_by_side_and_ranks_without_rows(world):
    on_ranks(world, check_mixed)


def check_swapped():
    """Real forwards and backwards pass; one with other parameters is refused, since FSDP would ignore them."""
    for how in WRAPS:
        doubled = {name: p * 2 for name, p in own(make("tied")).items()}
        wrapped = wrap(make("tied"), how)
        for _ in range(2):
            store = Fsdp(wrapped)
            wrapped(input_ids=TOKENS).logits.sum().backward()
            with torch.no_grad():
                wrapped(input_ids=TOKENS)
                with pytest.raises(LayoutError, match="functional_call"):
                    torch.func.functional_call(wrapped, doubled, (TOKENS,))
                wrapped(input_ids=TOKENS)
            store.close()
        with pytest.raises(LayoutError, match="use observe_sharded"):
            rg.observe(wrapped, batches([0]), ["absmax:lm_head"], rg.build_graph(CONFIGS["tied"]))
        with pytest.raises(LayoutError, match=r"use Fsdp\(model\)"):
            rg.Memory.of(wrapped)
        if how.startswith("fsdp2"):
            with pytest.raises(LayoutError, match="use apply_sharded"):
                rg.plan(SmoothQuant(), dict(wrapped.named_parameters()), rg.build_graph(CONFIGS["tied"]))


def test_functions_for_whole_models_refuse_wrapped_ones():
    on_ranks(2, check_swapped)


def check_loading(kind, folder):
    """Straight from files into units: the same numbers, and at most the shards and one unit in memory."""
    config, source = CONFIGS[kind], rg.Shards(folder)
    whole, graph = own(load_whole(config, source)), rg.build_graph(config)
    keys = [f"{k}:{n}" for n, s in graph.sites.items() if s.module for k in ("absmax", "meanabs", "gram")]
    alone = rg.observe(load_whole(config, source), batches(range(6)), keys, graph)
    rank, world = dist.get_rank(), dist.get_world_size()
    table = [Sharding(version=v, use_orig_params=o) for v, o in ((1, False), (1, True), (2, False))]
    table += [Sharding(version=v, min_num_params=3000) for v in (1, 2)] + [Sharding(version=v, wrap=()) for v in (1, 2)]
    table += [Sharding(version=v, replicate=2, reshard_after_forward=False) for v in (1, 2) if world % 2 == 0]
    for sharding in table:
        model = load_sharded(config, source, sharding)
        store = Fsdp(model)
        assert equal(gathered(store, whole), whole), sharding
        store.close()
        # sums as well, to the bit: batches are dealt in turn
        assert equal(observe_sharded(model, batches(range(rank, 6, world)), keys, graph, in_order=True), alone), (
            sharding
        )
        seen = rg.observe_streamed(config, source, batches(range(rank, 6, world)), keys, graph, in_order=True)
        assert equal(seen, alone)
    with pytest.raises(rg.PlanError, match="no module of class 'Nope'"):
        load_sharded(config, source, Sharding(wrap=("Nope",)))
    with pytest.raises(rg.PlanError, match="cannot be cut"):
        load_sharded(config, source, Sharding(replicate=3))


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("tied", 2),
        *(pytest.param(kind, 2, marks=SLOW) for kind in ("llama", "opt", "mixtral")),
        *(pytest.param(*case, marks=SLOW) for case in (("llama", 1), ("tied", 4))),
    ],
)
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_loading_into_units(tmp_path, kind, world):
    params = own(make(kind, torch.bfloat16))
    writer = rg.ShardWriter(tmp_path, params, 5000)
    writer.write(params)
    writer.close()
    on_ranks(world, check_loading, kind, tmp_path)


def fails(action, *words):
    start = time.monotonic()
    with pytest.raises(LayoutError) as caught:
        action()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert time.monotonic() - start < 30


def check_lost(how, fault):
    """One rank dies, hangs or fails; the other says at what, and does not wait for ever."""
    graph, keys = rg.build_graph(CONFIGS["llama"]), ["absmax:model.layers.1.mlp.down_proj"]
    rank, model = dist.get_rank(), wrap(make("llama"), how)

    def lost():
        yield from batches([1, 2])
        raise ValueError("no such row")

    if fault == "data":
        given = lost() if rank else batches([0])
        if rank:
            with pytest.raises(ValueError, match="no such row"):
                observe_sharded(model, given, keys, graph)
        else:
            fails(lambda: observe_sharded(model, given, keys, graph), "rank 1 failed", "no such row")
        return
    if fault == "keys":
        fails(lambda: observe_sharded(model, batches([0]), keys[rank:], graph), "different statistics")
        return
    calls = []

    def leave(*_):
        calls.append(1)
        if rank and len(calls) == 2:
            if fault == "dies":
                os._exit(0)
            time.sleep(8)
            os._exit(0)

    layers(model)[1].register_forward_pre_hook(leave)
    if rank:
        observe_sharded(model, batches([0, 1, 2]), keys, graph)
    fails(lambda: observe_sharded(model, batches([0, 1, 2]), keys, graph), "rank 0", "calibration, batch ", " of 3")


def check_lost_edit(how, fault):
    graph, rank = rg.build_graph(CONFIGS["llama"]), dist.get_rank()
    stats = {f"absmax:{s}": torch.linspace(0.5, 9, x.width) for s, x in graph.sites.items()}
    model, done = wrap(make("llama"), how), []

    def leave(_size):
        done.append(1)
        if rank and len(done) == 2:
            if fault == "hangs":
                time.sleep(8)
            os._exit(0)

    work = lambda: apply_sharded(SmoothQuant(), model, stats, graph=graph, progress=leave)  # noqa: E731
    if rank:
        work()
    fails(work, "rank 0", "smooth[model.layers.1.")


@pytest.mark.parametrize("how", [pytest.param("fsdp1", marks=SLOW), "fsdp2"])
@pytest.mark.parametrize("fault", ["dies", pytest.param("hangs", marks=SLOW), "data", "keys"])
def test_a_rank_that_is_lost_in_calibration(how, fault):
    on_ranks(2, check_lost, how, fault, timeout=3)


@pytest.mark.parametrize("how", ["fsdp1", pytest.param("fsdp2", marks=SLOW)])
@pytest.mark.parametrize("fault", ["hangs", pytest.param("dies", marks=SLOW)])
def test_a_rank_that_is_lost_in_an_edit(how, fault):
    on_ranks(2, check_lost_edit, how, fault, timeout=3)
