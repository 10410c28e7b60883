"""What every transform must do, in one table over transforms and models."""

from functools import partial

import pytest
import regauge as rg
import torch
from every_transform import ASYM, ODD, TENSOR, TRANSFORMS
from regauge.transforms import (
    Decode,
    Dequantize,
    Encode,
    Quantize,
    chain,
    identity,
    run_step,
)
from safetensors.torch import load_file, save_file

CONV = ["identity", "smooth", "smooth_range", "smooth_all", "log", "log_all", "rescale", "cross_layer"]
CONV += [name for name in TRANSFORMS if name.startswith("fake")]
CASES = [(name, kind) for name in TRANSFORMS for kind in ("llama", "tied_llama", "opt", "gemma")]
CASES += [(name, "gpt2") for name in CONV]


@pytest.fixture
def case(request, tiny):
    """The tiny model, the transform and its plan."""
    name, kind = request.param
    model = tiny(kind)
    transform = TRANSFORMS[name](model)
    return model, transform, rg.plan(transform, model.params, model.graph)


table = pytest.mark.parametrize("case", CASES, indirect=True, ids=["-".join(case) for case in CASES])


def equal(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@table
def test_planned_shapes_are_the_real_ones(case):
    model, _, plan = case
    out = rg.apply(plan, model.params, model.stats)
    assert {n: (p.shape, p.dtype) for n, p in out.items()} == {n: (p.shape, p.dtype) for n, p in plan.target.items()}


@table
def test_inputs_stay_and_untouched_tensors_are_the_same_objects(case):
    model, _, plan = case
    tensors = {**model.params, **model.stats}
    before = {name: (p.clone(), p._version) for name, p in tensors.items()}
    out = rg.apply(plan, model.params, model.stats)
    assert all(torch.equal(p, before[n][0]) and p._version == before[n][1] for n, p in tensors.items())
    touched = {name for step in plan.steps for name in (*step.writes, *step.drops)}
    assert all(out[name] is p for name, p in model.params.items() if name not in touched)


@table
def test_steps_are_honest_about_what_they_touch(case):
    model, _, plan = case
    params, stats = dict(model.params), dict(model.stats)
    for step in plan.steps:
        changed, restated = step.fn({n: params[n] for n in step.reads}, {k: stats[k] for k in step.needs})
        assert set(changed) == set(step.writes)
        assert set(restated) <= set(step.needs)
        assert {k.partition(":")[2] for k in restated} <= set(step.edits)
        run_step(step, params, stats)


@table
def test_cells_are_disjoint_and_cover_everything(case):
    _, _, plan = case
    cells = plan.cells
    assert sorted(n for cell in cells for n in cell.reads) == sorted(plan.source)
    assert sorted(n for cell in cells for n in cell.writes) == sorted(plan.target)
    assert sum(len(cell.steps) for cell in cells) == len(plan.steps)
    for cell in cells:
        names = {*cell.reads, *cell.writes}
        assert all({*step.reads, *step.writes, *step.drops} <= names | _made(plan) for step in cell.steps)


def _made(plan):
    """Names that exist only between steps."""
    return {n for s in plan.steps for n in (*s.writes, *s.drops)} - set(plan.source) - set(plan.target)


@table
def test_streamed_equals_whole_to_the_byte(case, tmp_path):
    model, _, plan = case
    whole = rg.apply(plan, model.params, model.stats)
    (tmp_path / "in").mkdir()
    save_file(model.params, tmp_path / "in" / "model.safetensors")
    for name, limit in (("one", 10**9), ("many", 10_000)):
        (tmp_path / name).mkdir()
        writer = rg.ShardWriter(tmp_path / name, plan.target, limit)
        rg.execute(plan, rg.Shards(tmp_path / "in"), writer, model.stats)
        writer.close()
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert (len(files) == 1) == (name == "one")
        assert equal({n: p for file in files for n, p in load_file(file).items()}, whole)
        with rg.Shards(tmp_path / name).read(plan.target) as back:
            assert equal(back, whole)


@table
def test_memory_to_memory_equals_apply(case):
    model, _, plan = case
    sink = rg.Memory()
    final = rg.execute(plan, rg.Memory(model.params), sink, model.stats)
    assert equal(sink.params, rg.apply(plan, model.params, model.stats))
    assert final.keys() == model.stats.keys()


@table
def test_identity_is_neutral_and_planning_repeats(case):
    model, transform, plan = case
    expected = rg.apply(plan, model.params, model.stats)
    for other in (chain(transform, identity()), chain(identity(), transform), chain(chain(transform))):
        again = rg.plan(other, model.params, model.graph)
        assert [s.name for s in again.steps] == [s.name for s in plan.steps]
        assert equal(rg.apply(again, model.params, model.stats), expected)


@table
def test_plans_repeat(case):
    model, transform, plan = case
    again = rg.plan(transform, model.params, model.graph)
    for attribute in ("name", "reads", "drops", "needs", "edits", "schemes", "fake"):
        assert [getattr(s, attribute) for s in again.steps] == [getattr(s, attribute) for s in plan.steps]
    assert list(again.target) == list(plan.target)
    assert again.needs == plan.needs
    assert [(c.reads, c.writes) for c in again.cells] == [(c.reads, c.writes) for c in plan.cells]


CHAINS = [
    ("smooth", "log_all", "w8a8"),
    ("rescale", "smooth_range", "fake"),
    ("identity", "smooth_all", "encode_odd"),
    ("smooth", "identity", "decode"),
]


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_chains_are_associative(tiny, names, kind):
    model = tiny(kind)
    a, b, c = (TRANSFORMS[name](model) for name in names)
    flat, left, right = (
        rg.plan(t, model.params, model.graph) for t in (chain(a, b, c), chain(chain(a, b), c), chain(a, chain(b, c)))
    )
    expected = rg.apply(flat, model.params, model.stats)
    for plan in (left, right):
        assert [s.name for s in plan.steps] == [s.name for s in flat.steps]
        assert equal(rg.apply(plan, model.params, model.stats), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["smooth_all", "w8a8", "encode_pack", "fake_channel", "chain"])
def test_half_precision_streams_from_many_files_to_the_same_bytes(tiny, tmp_path, name, dtype):
    model = tiny("llama", dtype)
    plan = rg.plan(TRANSFORMS[name](model), model.params, model.graph)
    whole = rg.apply(plan, model.params, model.stats)
    assert {n: p.dtype for n, p in whole.items()} == {n: p.dtype for n, p in plan.target.items()}
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    source = rg.ShardWriter(tmp_path / "in", plan.source, 5000)
    source.write(model.params)
    source.close()
    sink = rg.ShardWriter(tmp_path / "out", plan.target, 7000)
    rg.execute(plan, rg.Shards(tmp_path / "in"), sink, model.stats)
    sink.close()
    assert len(rg.Shards(tmp_path / "in").files) > 3
    assert equal({n: p for f in rg.Shards(tmp_path / "out").files for n, p in load_file(f).items()}, whole)


@pytest.mark.parametrize("kind", ["llama", "tied_llama"])
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "W4A16_ASYM", ODD, ASYM, TENSOR], ids=str)
def test_the_two_forms_are_the_same_numbers(tiny, kind, scheme):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny(kind, dtype)
        size = 16 if isinstance(scheme, str) and scheme.startswith("W4") else None
        quantize = partial(Quantize, scheme=scheme, group_size=size, targets=("Linear", "Embedding"))
        schemes = rg.plan(quantize(), model.params, model.graph).schemes
        back = Dequantize(schemes=schemes, dtype=str(dtype).removeprefix("torch."))
        pair = [quantize(form="fake"), chain(quantize(), Encode(schemes=schemes), Decode(schemes=schemes), back)]
        fake, real = (rg.apply(rg.plan(t, model.params, model.graph), model.params) for t in pair)
        assert equal(fake, real)
        assert not equal(fake, model.params)
