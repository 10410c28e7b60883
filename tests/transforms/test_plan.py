"""What planning refuses, and how it says so."""

import re
from dataclasses import dataclass, replace
from functools import partial

import pytest
import regauge as rg
import torch
from regauge import LayoutError, PlanError
from regauge.transforms import (
    KINDS,
    CrossLayerEqualize,
    Dequantize,
    Encode,
    LogEqualize,
    Quantize,
    Rescale,
    SmoothQuant,
    Step,
    chain,
    partition,
    select,
)

HEAD = ("lm_head",)


def problems(tiny, transform, kind="llama"):
    model = tiny(kind)
    with pytest.raises(PlanError) as caught:
        rg.plan(transform, model.params, model.graph)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Quantize(ignore=("lm_haed",)), "ignore: pattern 'lm_haed' matches none of"),
        (Quantize(ignore=("lm_haed",)), "nearest names: lm_head"),
        (Quantize(targets=("re:(",)), "not a regular expression"),
        (Quantize(targets=("Conv2d",)), "targets: pattern 'Conv2d'"),
        (Quantize(targets=("lm_head",), ignore=HEAD), "no module is left"),
        (Quantize(scheme="W4A16", ignore=HEAD), "group_size 128 does not divide the 32 or 48 input channels of 14 linears"),
        (Quantize(scheme="W4A16", ignore=HEAD), "sizes that fit all: 16, 8, 4, 2"),
        (chain(Quantize(ignore=HEAD), Quantize(ignore=HEAD)), "expected a 2-D float weight, found torch.int8"),
        (chain(Quantize(ignore=HEAD), SmoothQuant()), "holds integer codes; equalize before quantizing"),
        (Rescale(scales={"model.nothing": torch.ones(32)}), "no symmetry 'model.nothing'"),
        (Rescale(scales={"model.layers.0.input_layernorm": torch.ones(3)}), r"shape (32,), got (3,)"),
        (select(Quantize(), include="re:nothing"), "select(Quantize): pattern 're:nothing' matches none"),
        (select(SmoothQuant(), exclude=["re:.*q_proj"]), "q_proj is not selected but shares the scale"),
        (SmoothQuant(mappings=[["q_proj", "norm"]]), "a mapping is [[linear patterns], producer pattern]"),
        (SmoothQuant(mappings=[[["re:.*q_proj"], "re:.*input_layernorm"]]), "k_proj, model.layers.0.self_attn.v_proj read the same"),
        (SmoothQuant(mappings=[[["re:.*mlp.gate_proj", "re:.*mlp.up_proj"], "re:.*input_layernorm"]]), "the function changes"),
        (SmoothQuant(mappings=[[["re:.*q_proj"], "re:.*layernorm"]]), "2 producers match"),
        (SmoothQuant(mappings=[[["re:.*qkv"], "re:.*input_layernorm"]]), "pattern 're:.*qkv' matches none of"),
        (SmoothQuant(mappings=[[["re:.*q_proj"], "re:.*ln_1"]]), "pattern 're:.*ln_1' matches none of"),
        (SmoothQuant(mappings=[[["re:.*[qkv_proj"], "re:.*input_layernorm"]]), "not a regular expression"),
        (SmoothQuant(mappings=[[["re:.*q_proj", 3], "re:.*input_layernorm"]]), "expected a pattern as a string, got 3"),
        (SmoothQuant(mappings=[[["re:.*q_proj", "re:.*o_proj"], "re:.*input_layernorm"]]), "k_proj, model.layers.0.self_attn.v_proj read the same"),
        (SmoothQuant(mappings=[[["lm_head"], "re:.*input_layernorm"]]), "input_layernorm is matched, but no linear is (lm_head)"),
        (SmoothQuant(mappings=[[["re:.*down_proj"], "re:.*input_layernorm"]]), "expected 48 channels to scale, found shape (32,)"),
        (SmoothQuant(mappings=[[["re:.*down_proj"], "re:.*gate_proj"]]), "gate_proj is bound by silu in model.layers.0.mlp.act_fn"),
        (select(SmoothQuant(), exclude=["re:["]), "not a regular expression"),
        (select(Quantize(ignore=HEAD), exclude=["re:.*qkv"]), "pattern 're:.*qkv' matches none of"),
        (select(Quantize(), include=["model.norm"]), "no module is left"),
        (Quantize(scheme="W4A16", group_size=5, ignore=HEAD), "sizes that fit all: 4, 2"),
        (SmoothQuant(mappings=[[["re:.*k_proj"], "re:.*q_proj"]]), "the function changes"),
        (partition({"a": Quantize()}, {"re:.*mlp": "a"}), "each label needs a transform"),
        (partition({"a": Quantize(), "b": Quantize()}, {"re:": "a"}), "each transform a linear"),
        (Encode(schemes={"model.nothing": None}), "no linear model.nothing"),
    ],
)  # fmt: skip
def test_faults_are_named(tiny, transform, message):
    assert message in problems(tiny, transform)


@pytest.mark.parametrize(
    "transform",
    [
        SmoothQuant(),
        SmoothQuant(mappings=[[["re:.*[qkv]_proj"], "re:.*input_layernorm"]]),
        LogEqualize(),
        Rescale(scales={"model.layers.0.input_layernorm": torch.full((32,), 2.0)}),
    ],
    ids=["smooth", "mapped", "log", "rescale"],
)
def test_a_choice_that_leaves_out_a_reader_is_refused(tiny, transform):
    found = problems(tiny, select(transform, exclude=["re:.*q_proj"]))
    assert "model.layers.0.self_attn.q_proj" in found


@pytest.mark.parametrize("kind", ["v_o", "up_down"])
def test_a_choice_that_leaves_out_a_producer_is_refused(tiny, kind):
    """Else a linear that was not chosen would be scaled."""
    producer = {"v_o": "v_proj", "up_down": "up_proj"}[kind]
    transform = select(SmoothQuant(kinds=(kind,)), exclude=[f"re:.*{producer}"])
    assert producer in problems(tiny, transform)


def test_a_choice_of_whole_symmetries_is_planned(tiny):
    model = tiny()
    plan = rg.plan(select(SmoothQuant(), include=["re:.*layers.1.*(q|k|v)_proj"]), model.params, model.graph)
    assert [step.name for step in plan.steps] == ["smooth[model.layers.1.input_layernorm]"]
    parts = rg.partition({"a": SmoothQuant(), "b": LogEqualize()}, lambda x: "a" if "attn" in x.name else "b")
    steps = [step.name for step in rg.plan(parts, model.params, model.graph).steps]
    assert steps == [f"smooth[model.layers.{i}.input_layernorm]" for i in range(2)] + [
        f"log_equalize[model.layers.{i}.post_attention_layernorm]" for i in range(2)
    ]


def test_of_the_labels_of_a_mapping_the_first_that_matches_counts(tiny):
    model = tiny()
    eight, four = Quantize(), Quantize(scheme="W4A16", group_size=16)
    labels = {"re:.*q_proj": "eight", "re:.*attn": "four", "re:": "none"}
    parts = partition({"eight": eight, "four": four, "none": rg.transforms.identity()}, labels)
    schemes = rg.plan(parts, model.params, model.graph).schemes
    bits = {
        name.removeprefix("model.layers.0.self_attn."): s.weights.num_bits
        for name, s in schemes.items()
        if ".0." in name
    }
    assert bits == {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 4}


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "half_float", "ones"])
def test_scales_are_of_a_float_dtype(dtype):
    with pytest.raises(ValueError, match="scale_dtype"):
        Quantize(scale_dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", "half_float", "ones"])
def test_weights_are_decoded_to_a_float_dtype(dtype):
    with pytest.raises(ValueError, match="dtype"):
        Dequantize(schemes={}, dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "W2A2"}, "expected one of W8A8"),
        ({"form": "packed"}, "form: expected one of integer, fake"),
        ({"targets": "Linear"}, "targets: expected a list"),
        ({"ignore": "lm_head"}, "ignore: expected a list"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_settings_of_the_quantizer_are_checked_when_written_down(settings, message):
    with pytest.raises(ValueError, match=message):
        Quantize(**settings)


def test_faults_of_all_stages_are_reported_together(tiny):
    bad = chain(Rescale(scales={"x": torch.ones(1)}), Quantize(ignore=("y",)), Quantize(ignore=HEAD), SmoothQuant())
    found = problems(tiny, bad).splitlines()
    assert [line.split(":")[0].split("[")[0] for line in found] == ["rescale", "quantize", "smooth"]


def test_long_lists_are_cut_in_the_message_and_kept_in_the_error():
    error = PlanError([f"problem {n}" for n in range(100)])
    assert str(error).splitlines()[-1] == "... and 88 more"
    assert len(error.problems) == 100


@pytest.mark.parametrize(
    ("untraced", "message"),
    [
        (None, "no symmetry of kind 'norm' is known for this model; `regauge job=inspect` shows"),
        ("operator item in module 'x'", "since operator item in module 'x'; give mappings"),
    ],
)
@pytest.mark.parametrize("transform", [SmoothQuant(), LogEqualize(), CrossLayerEqualize(kinds=("v_o",))])
def test_a_model_without_symmetries_is_told_so(tiny, transform, untraced, message):
    graph = tiny("llama").graph
    bare = rg.Graph(linears=graph.linears, sites=graph.sites, modules=graph.modules, untraced=untraced)
    with pytest.raises(PlanError, match=re.escape(message.replace("norm", transform.kinds[0]))):
        rg.plan(transform, tiny("llama").params, bare)


def test_an_activation_that_cannot_be_observed_asks_for_another_way(tiny):
    graph = tiny("llama").graph
    hidden = replace(graph, symmetries=tuple(replace(s, site=None) for s in graph.symmetries))
    with pytest.raises(PlanError, match="cannot be observed; leave out kind 'norm'"):
        rg.plan(SmoothQuant(), tiny("llama").params, hidden)


@pytest.mark.parametrize("kind", ["llama", "tied_llama", "qwen3", "opt"])
def test_mappings_of_the_user_find_what_is_built_in(tiny, kind):
    model = tiny(kind)
    norms = (
        ("self_attn_layer_norm", "final_layer_norm")
        if kind == "opt"
        else ("input_layernorm", "post_attention_layernorm")
    )
    up = ["re:.*fc1"] if kind == "opt" else ["re:.*gate_proj", "re:.*up_proj"]
    pattern = "re:.*layers.*" if kind == "opt" else "re:.*"
    mappings = [
        [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], f"{pattern}{norms[0]}"],
        [up, f"{pattern}{norms[1]}"],
    ]
    own = rg.plan(SmoothQuant(mappings=mappings), model.params, model.graph)
    built_in = rg.plan(SmoothQuant(), model.params, model.graph)
    assert sorted(s.name for s in own.steps) == sorted(s.name for s in built_in.steps)
    ours, theirs = (rg.apply(plan, model.params, model.stats) for plan in (own, built_in))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tied_pairs_are_quantized_together_or_not_at_all(tiny):
    assert "add 'Embedding' to targets, or 'lm_head' to ignore" in problems(tiny, Quantize(), "tied_llama")
    both = Quantize(targets=("Linear", "Embedding"), ignore=HEAD)
    assert "ignore both or neither" in problems(tiny, both, "tied_llama")
    model = tiny("tied_llama")
    plan = rg.plan(Quantize(targets=("Embedding",)), model.params, model.graph)
    assert set(plan.schemes) == {"lm_head", "model.embed_tokens"}
    assert len(plan.steps) == 1


@pytest.mark.parametrize("transform", [Dequantize, partial(Encode)])
def test_layouts_need_codes(tiny, transform):
    schemes = rg.plan(Quantize(ignore=HEAD), tiny().params, tiny().graph).schemes
    assert "quantize with form='integer' first" in problems(tiny, transform(schemes=schemes))


def test_conv1d_has_no_layout(tiny):
    schemes = rg.plan(Quantize(ignore=HEAD), tiny("gpt2").params, tiny("gpt2").graph).schemes
    found = problems(tiny, chain(Quantize(ignore=HEAD), Encode(schemes=schemes)), "gpt2")
    assert "no layout for Conv1D; use form='fake'" in found


def test_apply_wants_what_was_planned(tiny):
    model = tiny()
    plan = rg.plan(SmoothQuant(), model.params, model.graph)
    with pytest.raises(LayoutError, match="statistic 'absmax:model.layers.0.self_attn.q_proj' and 3 more is missing"):
        rg.apply(plan, model.params)
    with pytest.raises(LayoutError, match="planned for float32 .* got bfloat16"):
        rg.apply(plan, {n: p.bfloat16() for n, p in model.params.items()}, model.stats)
    with pytest.raises(LayoutError, match=r"tensor model\.norm\.weight is missing"):
        rg.apply(plan, {n: p for n, p in model.params.items() if n != "model.norm.weight"}, model.stats)
    wide = {**model.params, "lm_head.weight": torch.ones(96, 33)}
    with pytest.raises(LayoutError, match=r"lm_head.weight: planned for float32 \(96, 32\), got float32 \(96, 33\)"):
        rg.apply(plan, wide, model.stats)
    with pytest.raises(LayoutError, match="is missing"):
        rg.execute(plan, rg.Memory(model.params), rg.Memory())
    del wide["model.norm.weight"]
    with pytest.raises(LayoutError) as caught:
        rg.apply(plan, wide)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("shape", [(), (1,), (31,), (2, 32)], ids=str)
def test_a_statistic_of_another_shape_is_refused(tiny, shape):
    """One of shape (1,) would be broadcast over all channels."""
    model, key = tiny(), "absmax:model.layers.0.self_attn.q_proj"
    plan = rg.plan(SmoothQuant(), model.params, model.graph)
    with pytest.raises(LayoutError, match=key):
        rg.apply(plan, model.params, {**model.stats, key: torch.ones(shape)})


def test_more_tensors_and_statistics_than_planned_are_passed_on(tiny):
    model = tiny()
    plan = rg.plan(SmoothQuant(), model.params, model.graph)
    extra = torch.ones(3)
    out = rg.apply(plan, {**model.params, "extra": extra}, {**model.stats, "absmax:lm_head": torch.ones(32)})
    assert out["extra"] is extra


@dataclass(frozen=True)
class Fixed:
    """A transform of one given step."""

    step: Step

    def plan(self, specs, graph):
        return (self.step,)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fn": lambda p, s: ({}, {})}, "declares ['model.norm.weight'], returns []"),
        ({"fn": lambda p, s: ({NORM: p[NORM][:3]}, {})}, "declares float32 (32,), returns float32 (3,)"),
        ({"fn": lambda p, s: ({NORM: p[NORM].half()}, {})}, "returns float16 (32,)"),
        ({"fn": lambda p, s: ({NORM: p[NORM] @ torch.ones(5)}, {})}, "fails on these shapes"),
        ({"reads": ("absent",)}, "tensor absent does not exist at this point"),
        ({"needs": ("absmax:absent",)}, "no site 'absent'"),
        ({"needs": ("median:lm_head",)}, "expected '<kind>:<site>'"),
        ({"drops": ("absent",)}, "tensor absent does not exist at this point"),
        ({"fn": lambda p, s: ({NORM: p[NORM], "extra": p[NORM]}, {})}, "returns ['extra', 'model.norm.weight']"),
    ],
)
def test_steps_that_break_their_word_are_refused(tiny, change, message):
    spec = torch.empty(32, device="meta")
    step = {"name": "bad", "reads": (NORM,), "writes": {NORM: spec}, "fn": lambda p, s: (p, {}), **change}
    assert message in problems(tiny, Fixed(Step(**step)))


def test_statistics_without_a_closed_form_name_both_steps(tiny, monkeypatch):
    class Median(type(KINDS["absmax"])):
        def rescale(self, state, s):
            raise NotImplementedError("the median of x / s")

    monkeypatch.setitem(KINDS, "median", Median("median"))
    site = "model.layers.0.self_attn.q_proj"
    step = Step(name="clip", reads=(NORM,), writes={NORM: torch.empty(32, device="meta")}, needs=(f"median:{site}",), fn=lambda p, s: (p, {}))  # fmt: skip
    found = problems(tiny, chain(SmoothQuant(), Fixed(step)))
    assert "smooth[model.layers.0.input_layernorm] changes an activation whose statistics clip needs" in found
    rg.plan(chain(Fixed(step), Rescale(scales={})), tiny().params, tiny().graph)  # before an edit it is fine


def test_an_error_inside_a_step_has_the_name_of_the_step(tiny):
    def refuse(params, stats):
        raise PlanError(["one", "two"])

    step = Step(name="clip", reads=(NORM,), writes={NORM: torch.empty(32, device="meta")}, fn=refuse)
    assert problems(tiny, Fixed(step)).splitlines() == ["clip: one", "clip: two"]


def test_steps_that_share_a_changed_statistic_are_in_one_cell(tiny):
    """The second reads what the first leaves of the statistic, though they share no tensor."""
    model, site = tiny(), "model.layers.0.self_attn.q_proj"

    def clip(params, stats):
        return {NORM: params[NORM] * stats[f"absmax:{site}"].amax()}, {}

    step = Step(name="clip", reads=(NORM,), writes={NORM: torch.empty(32, device="meta")}, needs=(f"absmax:{site}",), fn=clip)  # fmt: skip
    plan = rg.plan(chain(Rescale(scales={"model.layers.0.input_layernorm": torch.full((32,), 4.0)}), Fixed(step)), model.params, model.graph)  # fmt: skip
    cell = next(c for c in plan.cells if NORM in c.reads)
    assert {s.name for s in cell.steps} == {"rescale[model.layers.0.input_layernorm]", "clip"}
    sink = rg.Memory()
    rg.execute(plan, rg.Memory(model.params), sink, model.stats)
    expected = model.params[NORM] * (model.stats[f"absmax:{site}"].amax() / 4)
    assert torch.allclose(sink.params[NORM], expected)
    assert torch.equal(rg.apply(plan, model.params, model.stats)[NORM], sink.params[NORM])


def test_a_statistic_that_is_only_read_does_not_join_cells(tiny):
    model, site = tiny(), "model.layers.0.self_attn.o_proj"
    names = (NORM, "model.layers.0.input_layernorm.weight")
    steps = [Step(name=n, reads=(n,), writes={n: torch.empty(32, device="meta")}, needs=(f"absmax:{site}",), fn=lambda p, s: (p, {})) for n in names]  # fmt: skip
    plan = rg.plan(chain(*(Fixed(step) for step in steps)), model.params, model.graph)
    assert max(len(cell.steps) for cell in plan.cells) == 1


def test_specs_of_reads_no_data(tiny):
    specs = rg.transforms.specs_of(tiny().params)
    assert all(p.is_meta for p in specs.values())
    assert {n: (p.shape, p.dtype) for n, p in specs.items()} == {
        n: (p.shape, p.dtype) for n, p in tiny().params.items()
    }
    assert [s.name for s in rg.plan(Quantize(ignore=HEAD), specs, tiny().graph).steps]


def test_repeated_blocks_are_run_once_on_meta_tensors_unless_they_differ(tiny):
    model = tiny()
    runs = []

    def fn(params, stats, *, name):
        runs.append(name)
        return {name: params[name] * 2}, {}

    @dataclass(frozen=True)
    class Double:
        def plan(self, specs, graph):
            names = [n for n in specs if n.endswith("q_proj.weight")]
            return tuple(Step(name=n, reads=(n,), writes={n: specs[n]}, fn=partial(fn, name=n)) for n in names)

    rg.plan(Double(), model.params, model.graph)
    assert runs == ["model.layers.0.self_attn.q_proj.weight"]
    runs.clear()
    other = {**model.params, "model.layers.1.self_attn.q_proj.weight": torch.ones(8, 4)}
    rg.plan(Double(), other, model.graph)
    assert len(runs) == 2
