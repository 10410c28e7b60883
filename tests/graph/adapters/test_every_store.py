"""Every store, every transform, 1, 2 and 4 processes: the same bytes."""

import pytest
import regauge as rg
import torch
import torch.distributed as dist
from every_transform import TRANSFORMS, Tiny
from ranks import contents, on_ranks
from regauge import PlanError
from regauge.graph.adapters import Fsdp, execute_sharded
from shapes import SHAPE
from sharded_models import CONFIGS, make, own, wrap
from transformers import LlamaConfig

# groups of 16 do not divide the odd sizes, which are there for shards that cut rows
EVEN = LlamaConfig(**SHAPE)
GROUPED = {
    name for name in TRANSFORMS if "w4a16" in name or name in ("encode_pack", "encode_odd", "decode", "decode_untied")
}
GROUPED |= {"fake", "partition"}
STORES = ("shards", "fsdp1", "fsdp1_orig", "fsdp2", "fsdp2_kept")
SHARD = 9000


def model_of(kind):
    if kind == "even":
        CONFIGS.setdefault("even", EVEN)
    return make(kind, torch.bfloat16)


def tiny_of(kind):
    model = model_of(kind)
    graph = rg.build_graph(CONFIGS[kind])
    generator = torch.Generator().manual_seed(3)
    peaks = {name: torch.rand(site.width, generator=generator) * 9 + 0.5 for name, site in graph.sites.items()}
    stats = {f"absmax:{name}": peak for name, peak in peaks.items()}
    stats |= {f"range:{name}": torch.stack((-peak / 3, peak)) for name, peak in peaks.items()}
    return Tiny(model, graph, own(model), stats)


def plans_of(tiny, kind):
    """Every transform that fits the sizes, planned."""
    planned = {}
    for name, make_transform in TRANSFORMS.items():
        if kind == "mixtral" and name in ("smooth_all", "log_all", "cross_layer", "partition"):
            continue  # experts have no statistics of their own, and are not quantized
        if kind != "even" and name in GROUPED:
            with pytest.raises(PlanError, match="group_size 16 does not divide"):
                rg.plan(make_transform(tiny), tiny.params, tiny.graph)
        else:
            planned[name] = rg.plan(make_transform(tiny), tiny.params, tiny.graph)
    return planned


def check_stores(kind, plans, stats, source, folder):
    for how in STORES:
        store = rg.Shards(source) if how == "shards" else Fsdp(wrap(model_of(kind), how))
        for name, planned in plans.items():
            target = folder / f"{how}-{name}"
            if dist.get_rank() == 0:
                target.mkdir()
            execute_sharded(planned, store, target, stats, max_shard_size=SHARD)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("tied", (2,)),
        *(
            pytest.param(kind, (1, 2, 4), marks=pytest.mark.slow)
            for kind in ("llama", "tied", "opt", "mixtral", "even")
        ),
    ],
)
def test_the_folder_is_that_of_one_process(kind, worlds, tmp_path):
    tiny = tiny_of(kind)
    plans = plans_of(tiny, kind)
    assert len(plans) >= (len(TRANSFORMS) if kind == "even" else 15)
    source = tmp_path / "source"
    source.mkdir()
    writer = rg.ShardWriter(source, tiny.params, 5000)
    writer.write(tiny.params)
    writer.close()
    expected = {}
    for name, planned in plans.items():
        alone = tmp_path / f"alone-{name}"
        alone.mkdir()
        writer = rg.ShardWriter(alone, planned.target, SHARD)
        rg.execute(planned, rg.Memory(tiny.params), writer, tiny.stats)
        writer.close()
        expected[name] = contents(alone)
    assert len({str(sorted(files.items())) for files in expected.values()}) > len(plans) // 2  # they do differ
    for world in worlds:
        folder = tmp_path / str(world)
        folder.mkdir()
        on_ranks(world, check_stores, kind, plans, tiny.stats, source, folder)
        for how in STORES:
            for name in plans:
                assert contents(folder / f"{how}-{name}") == expected[name], (world, how, name)
