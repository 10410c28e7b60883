"""Models sharded by FSDP1 and FSDP2, on two and three processes on the CPU: the same numbers as on one."""

import pytest
import regauge as rg
import torch
import torch.distributed as dist
from ranks import on_ranks
from regauge import LayoutError
from regauge.graph.adapters import Fsdp, apply_sharded, execute_sharded, observe_sharded
from regauge.transforms import CrossLayerEqualize, LogEqualize, Quantize, SmoothQuant, chain
from sharded_models import CONFIGS, TOKENS, WRAPS, batches, equal, gathered, make, own, tied, wrap

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # with one process


def check_store(kind):
    for how in WRAPS:
        model = make(kind)
        whole, names = own(model), list(own(model))
        wrapped = wrap(model, how)
        store = Fsdp(wrapped)
        assert {n: (p.shape, p.dtype) for n, p in store.specs().items()} == {
            n: (p.shape, p.dtype) for n, p in whole.items()
        }, how
        assert list(store.specs()) == names, how  # files are laid out in this order
        assert (store.aliases != {}) == tied(model), how
        assert equal(gathered(store, names), whole), how
        with torch.no_grad():
            wrapped(input_ids=TOKENS)  # which leaves the outermost unit whole
        store.write({name: p * 2 for name, p in whole.items()})
        assert equal(gathered(store, names), {name: p * 2 for name, p in whole.items()}), how
        twice = make(kind)
        with torch.no_grad():
            for p in twice.parameters():
                p.mul_(2)
            assert torch.allclose(wrapped(input_ids=TOKENS).logits, twice(input_ids=TOKENS).logits, atol=1e-5), how
        store.close()


def check_transforms(kind):
    graph = rg.build_graph(CONFIGS[kind])
    fake = Quantize(scheme={"weights": {"num_bits": 4, "strategy": "channel"}}, ignore=("lm_head",), form="fake")
    kinds = tuple(
        {s.kind: 0 for s in graph.symmetries if s.site not in (None, "lm_head")}
        if kind != "mixtral"
        else ["norm", "v_o"]
    )
    for transform in (chain(SmoothQuant(kinds=kinds), fake), LogEqualize(), CrossLayerEqualize()):
        model = make(kind, torch.bfloat16)
        planned = rg.plan(transform, own(model), graph)
        stats = rg.observe(model, batches(range(6)), planned.needs, graph)
        whole = rg.apply(planned, own(model), stats)
        rank, world = dist.get_rank(), dist.get_world_size()
        for how in WRAPS:
            wrapped = wrap(make(kind, torch.bfloat16), how)
            seen = observe_sharded(wrapped, batches(range(rank, 6, world)), planned.needs, graph)
            assert equal(seen, stats), how
            apply_sharded(transform, wrapped, seen, graph=graph)
            store = Fsdp(wrapped)
            assert equal(gathered(store, list(whole)), whole), how
            store.close()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_whole_tensors_go_in_and_out(kind, world):
    on_ranks(world, check_store, kind)


@pytest.mark.parametrize("kind", CONFIGS)
def test_transforms_give_the_same_bytes_as_on_one_process(kind):
    on_ranks(2, check_transforms, kind)


def check_uneven(split):
    graph = rg.build_graph(CONFIGS["llama"])
    keys = [f"{kind}:{site}" for site in graph.sites for kind in ("absmax", "range", "sample", "meanabs", "gram")]
    model = make("llama")
    alone = rg.observe(model, batches(range(6)), keys, graph)
    rank = dist.get_rank()
    for how in ("fsdp1", "fsdp2"):
        first = observe_sharded(wrap(make("llama"), how), batches(split[rank]), keys, graph)
        again = observe_sharded(wrap(make("llama"), how), batches(split[rank]), keys, graph)
        assert equal(first, again), how
        for key, state in first.items():
            exact = key.split(":")[0] in ("absmax", "range", "sample")
            assert torch.equal(state, alone[key]) if exact else torch.allclose(state, alone[key], rtol=1e-5), (how, key)
        others = [None] * dist.get_world_size()
        dist.all_gather_object(others, {key: state.sum().item() for key, state in first.items()})
        assert all(other == others[0] for other in others)


@pytest.mark.parametrize("split", [([0, 1, 2], [3, 4, 5]), ([0, 1, 2, 3, 4], [5]), ([0, 1, 2, 3, 4, 5], [])])
def test_ranks_may_have_unlike_numbers_of_samples(split):
    on_ranks(2, check_uneven, split)


def refused(action, words):
    with pytest.raises((LayoutError, rg.PlanError)) as caught:
        action()
    assert words in str(caught.value), str(caught.value)


def check_misuse():
    graph = rg.build_graph(CONFIGS["llama"])
    stats = {f"absmax:{s}": torch.rand(x.width) + 0.5 for s, x in graph.sites.items()}
    torch.manual_seed(1)
    same = {key: torch.rand_like(state) + 0.5 for key, state in stats.items()}
    for how in ("fsdp1", "fsdp1_orig", "fsdp2", "fsdp2_kept"):
        model = wrap(make("llama"), how)
        store = Fsdp(model, limit=10_000)
        before = gathered(store, ["model.norm.weight"])
        refused(lambda store=store: gathered(store, list(store.specs())), "more than the limit of 10,000")
        refused(lambda store=store: gathered(store, ["nothing"]), "no tensor nothing")
        refused(lambda store=store: store.write({"model.norm.weight": torch.ones(3)}), "the sharded model holds")
        with store.read(["model.norm.weight"]) as params:
            kept = params
        assert kept == {}  # a gathered tensor does not outlive its context
        loss = model(input_ids=TOKENS).logits.float().sum()
        refused(lambda store=store, old=before: store.write(old), "whose backward is still to come")
        loss.backward()
        store.write(before)
        store.close()
        quantize = Quantize(ignore=("lm_head",))
        refused(lambda model=model, t=quantize: apply_sharded(t, model, graph=graph), "cannot be done in place")
        mine = {k: v + dist.get_rank() for k, v in same.items()}
        refused(
            lambda model=model, s=mine: apply_sharded(SmoothQuant(), model, s, graph=graph), "hold other statistics"
        )
        other = [SmoothQuant(), LogEqualize()][dist.get_rank()]
        refused(lambda model=model, t=other: apply_sharded(t, model, same, graph=graph), "planned other steps")
        store = Fsdp(model)
        assert equal(gathered(store, list(before)), before)
        store.close()
    refused(lambda: Fsdp(make("llama")), "is not sharded by FSDP")
    refused(lambda: apply_sharded(CrossLayerEqualize(), untied()), "which unties them; wrap them in one")


def untied():
    """A tied pair in units of their own, which FSDP1 allows."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    units = ModuleWrapPolicy({torch.nn.Linear, torch.nn.Embedding})
    return FullyShardedDataParallel(make("tied"), device_id=torch.device("cpu"), auto_wrap_policy=units)


def test_misuse_is_refused_on_every_rank_and_leaves_the_model_as_it_was():
    on_ranks(2, check_misuse)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def recipes(graph):
    yield chain(SmoothQuant(), Quantize(ignore=("lm_head",)))
    yield chain(
        LogEqualize(), Quantize(scheme={"weights": {"num_bits": 8, "strategy": "channel"}}, ignore=("lm_head",))
    )
    yield CrossLayerEqualize()


def check_folders(kind, folder, world_files):
    graph, rank = rg.build_graph(CONFIGS[kind]), dist.get_rank()
    model = make(kind, torch.bfloat16)
    stats = {f"absmax:{s}": torch.linspace(0.5, 9, x.width) for s, x in graph.sites.items()}
    for number, transform in enumerate(recipes(graph)):
        planned = rg.plan(transform, own(model), graph)
        for how in ("shards", "fsdp1", "fsdp1_orig", "fsdp2"):
            target = folder / f"{number}-{how}"
            if rank == 0:
                target.mkdir()
            source = rg.Shards(world_files) if how == "shards" else Fsdp(wrap(make(kind, torch.bfloat16), how))
            execute_sharded(planned, source, target, stats, max_shard_size=9000)
        if rank == 0:
            alone = folder / f"{number}-alone"
            alone.mkdir()
            writer = rg.ShardWriter(alone, planned.target, 9000)
            rg.execute(planned, rg.Memory(own(model)), writer, stats)
            writer.close()
            expected = bytes_of(alone)
            assert len(expected) > 3
            for how in ("shards", "fsdp1", "fsdp1_orig", "fsdp2"):
                assert bytes_of(folder / f"{number}-{how}") == expected, (number, how)
        dist.barrier()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_folders_have_the_same_bytes_whatever_held_the_model(tmp_path, kind, world):
    (tmp_path / "in").mkdir()
    model = make(kind, torch.bfloat16)
    writer = rg.ShardWriter(tmp_path / "in", own(model), 5000)
    writer.write(own(model))
    writer.close()
    on_ranks(world, check_folders, kind, tmp_path, tmp_path / "in")


def check_failure(folder):
    graph = rg.build_graph(CONFIGS["llama"])
    for how in ("fsdp1", "fsdp2"):
        model = make("llama", torch.bfloat16)
        planned = rg.plan(Quantize(ignore=("lm_head",)), own(model), graph)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
        if dist.get_rank() == 0:
            (folder / how).mkdir()
        refused(
            lambda m=model, h=how, p=planned: execute_sharded(p, Fsdp(wrap(m, h)), folder / h), "up_proj.weight: 1 of"
        )
    refused(
        lambda: execute_sharded(planned, rg.Memory(own(make("llama", torch.bfloat16))), folder / "none"), "No such file"
    )


def test_a_fault_on_one_rank_stops_all_of_them(tmp_path):
    on_ranks(2, check_failure, tmp_path)
