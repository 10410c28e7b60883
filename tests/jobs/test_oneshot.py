"""The main job on tiny models: what it writes loads in transformers and computes what we say it computes."""

import json
from functools import partial
from pathlib import Path

import pytest
import regauge as rg
import torch
from regauge import LayoutError, PlanError
from regauge.jobs.checkpoint import open_checkpoint
from regauge.jobs.evaluate import load_model
from regauge.jobs.oneshot import parse_size
from regauge.transforms import LogEqualize, Quantize, SmoothQuant, chain
from safetensors.torch import load_file

HEAD = ("lm_head",)
GROUPED = partial(Quantize, group_size=16, ignore=HEAD)
RECIPES = {
    "rtn_w8a8": partial(Quantize, scheme="W8A8", ignore=HEAD),
    "w8a16": partial(Quantize, scheme="W8A16", ignore=HEAD),
    "w4a16": partial(GROUPED, scheme="W4A16"),
    "w4a16_asym": partial(GROUPED, scheme="W4A16_ASYM"),
    "w3_channel": partial(Quantize, scheme={"weights": {"num_bits": 3, "strategy": "channel"}}, ignore=HEAD),
    "w8_tensor_asym": partial(
        Quantize, scheme={"weights": {"num_bits": 8, "strategy": "tensor", "symmetric": False}}, ignore=HEAD
    ),
}


@pytest.fixture
def run(tmp_path, text):
    """`oneshot` with a little calibration text, into a folder of the test's own."""
    return partial(
        rg.oneshot,
        dataset=str(text),
        output_dir=tmp_path / "out",
        num_calibration_samples=4,
        max_seq_length=24,
        plots=False,
    )


def simulated(folder, transform) -> torch.Tensor:
    """Logits of our own fake-quantized forward: rounded weights, and rounded activations where the scheme says so."""
    model = load_model(folder)
    params = {name: p.detach() for name, p in model.named_parameters()}
    plan = rg.plan(transform, params, open_checkpoint(folder).graph)
    with torch.no_grad(), rg.quantized_activations(model, plan.schemes):
        return torch.func.functional_call(model, rg.apply(plan, params), (TOKENS,)).logits


TOKENS = torch.arange(3, 35)[None]


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder)(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_checkpoint_computes_the_simulated_logits(make_folder, run, name, dtype):
    folder = make_folder("llama", dtype)
    report = run(folder, recipe=RECIPES[name]())
    ours, theirs = simulated(folder, RECIPES[name](form="fake")), logits(report.output_dir)
    error = (ours - theirs).norm() / ours.norm()
    # the library rounds activations in their own dtype and we in float32, which shows in bf16 alone
    assert error < (2e-2 if name == "rtn_w8a8" and dtype == torch.bfloat16 else 1e-6)
    assert (ours - logits(folder)).norm() / ours.norm() > max(4e-6, error)  # and quantization itself is visible


# OPT flattens activations to (tokens, channels), of which compressed-tensors takes one scale for all tokens
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("llama", "W8A8"), ("tied_llama", "W8A8"), ("llama", "W8A16"), ("tied_llama", "W8A16"), ("opt", "W8A16")],
)
def test_embeddings_and_a_tied_head_are_quantized_consistently(make_folder, run, kind, scheme):
    folder = make_folder(kind, torch.float32)
    quantize = partial(Quantize, scheme=scheme, targets=("Linear", "Embedding"))
    report = run(folder, recipe=quantize())
    expected = simulated(folder, quantize(form="fake"))
    assert torch.allclose(logits(report.output_dir), expected, atol=1e-4, rtol=1e-4)
    model = load_model(report.output_dir)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert torch.equal(head, table) == (kind != "llama")


@pytest.mark.parametrize(
    "equalize", [SmoothQuant(alpha=0.6), LogEqualize(), SmoothQuant(kinds=("norm", "v_o", "up_down"))]
)
@pytest.mark.parametrize("kind", ["llama", "tied_llama", "opt"])
def test_equalizing_alone_keeps_the_function(make_folder, run, kind, equalize):
    folder = make_folder(kind, torch.float32)
    report = run(folder, recipe=equalize)
    assert torch.allclose(logits(folder), logits(report.output_dir), atol=1e-4, rtol=1e-4)
    before, after = load_file(folder / "model.safetensors"), load_file(Path(report.output_dir) / "model.safetensors")
    assert set(before) == set(after)
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= 8


def test_conv1d_models_are_written_fake_quantized_or_refused(make_folder, run):
    folder = make_folder("gpt2", torch.float32)
    recipe = partial(chain, SmoothQuant())
    with pytest.raises(PlanError, match="no layout for Conv1D"):
        run(folder, recipe=recipe(Quantize(ignore=HEAD)))
    report = run(folder, recipe=recipe(Quantize(ignore=HEAD, form="fake")))
    error = (logits(folder) - logits(report.output_dir)).norm() / logits(folder).norm()
    assert 0 < error < 0.05
    assert "quantization_config" not in json.loads((Path(report.output_dir) / "config.json").read_text())


def test_equal_inputs_give_equal_folders(llama, run, tmp_path, monkeypatch):
    folders = []
    for name in ("one", "two"):
        monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / name / "cache"))
        report = run(llama, recipe="smooth_w8a8", output_dir=tmp_path / name / "out")
        assert not report.statistics_reused
        folders.append(Path(report.output_dir))
    names = sorted(p.name for p in folders[0].iterdir())
    assert names == sorted(p.name for p in folders[1].iterdir())
    for name in set(names) - {"report.json"}:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_statistics_are_reused_for_another_alpha_and_not_for_other_data(llama, run, tmp_path, text):
    recipes = [chain(SmoothQuant(alpha=a), Quantize(ignore=HEAD)) for a in (0.5, 0.7)]
    first = run(llama, recipe=recipes[0])
    second = run(llama, recipe=recipes[1], output_dir=tmp_path / "second")
    again = run(llama, recipe=recipes[1], output_dir=tmp_path / "again", reuse_statistics=False)
    wider = run(llama, recipe=SmoothQuant(kinds=("norm", "up_down")), output_dir=tmp_path / "wider")
    text.write_text(text.read_text()[40:])
    other = run(llama, recipe=recipes[1], output_dir=tmp_path / "other")
    assert [r.statistics_reused for r in (first, second, again, wider, other)] == [False, True, False, False, False]
    assert first.statistics_key == second.statistics_key != other.statistics_key
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("second", "again")]
    assert same[0] == same[1]


def test_damaged_statistics_are_made_again(llama, run, tmp_path):
    run(llama, recipe="smooth_w8a8")
    (path,) = (tmp_path / "cache" / "statistics").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    report = run(llama, recipe="smooth_w8a8", overwrite_output_dir=True)
    assert not report.statistics_reused


def test_small_shards_hold_the_same_tensors(llama, run, tmp_path):
    run(llama, recipe="rtn_w8a8")
    run(llama, recipe="rtn_w8a8", output_dir=tmp_path / "many", max_shard_size="50KB")
    many = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(many) > 2
    assert all(p.stat().st_size < 70_000 for p in many)
    joined = {name: p for file in many for name, p in load_file(file).items()}
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "many"))


def test_report_says_what_was_done_and_what_was_not(llama, run, text):
    measured = rg.Data(name=str(text), num_samples=2, max_seq_length=24)
    report = run(llama, recipe="smooth_w8a8", evaluation=measured, plots=True)
    folder = Path(report.output_dir)
    saved = json.loads((folder / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_json()))
    assert len(report.linears) == 14
    assert set(report.unquantized) == {"lm_head", "model.embed_tokens"}
    assert all(30 < row.sqnr_db < 60 for row in report.linears)
    assert report.before is not None
    assert report.after.top1 > 0.5
    assert report.after.kl > 0
    assert set(report.seconds) == {"check", "calibrate", "write", "evaluate"}
    assert "perplexity" in report.table()
    assert [Path(p).read_bytes()[1:4] for p in report.plots] == [b"PNG", b"PNG"]
    provenance = json.loads((folder / "regauge.json").read_text())
    assert provenance["steps"][0] == "smooth[model.layers.0.input_layernorm]"
    assert {p.name for p in folder.glob("*.safetensors")} == set(provenance["sha256"])
    assert not list(folder.parent.glob("*.partial"))


def test_the_founding_call_reads_rows_and_settings(llama, tmp_path):
    rows = [{"instruction": f"say {i}", "input": "", "output": "some words to learn from"} for i in range(6)]
    (tmp_path / "open_platypus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = rg.oneshot(
        model=str(llama),
        dataset=str(tmp_path / "open_platypus.jsonl"),
        output_dir=str(tmp_path / "out"),
        recipe="log_w8a8",
        overwrite_output_dir=True,
        splits={"calibration": "train"},
        concatenate_data=False,
        num_calibration_samples=6,
        max_seq_length=64,
        plots=False,
    )
    assert report.num_samples == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "nope"}, "neither a .yaml file"),
        ({"model": "absent"}, "no such folder"),
        ({"dataset": "absent.txt"}, "no such file"),
        ({"num_calibration_samples": 10_000}, "lower num_samples"),
        ({"max_shard_size": "5 apples"}, "max_shard_size"),
        ({"splits": {"train": "x"}}, "expected the key 'calibration'"),
        ({"recipe": SmoothQuant(mappings=((("re:.*nothing",), "re:.*norm"),))}, "matches none of"),
        ({"recipe": Quantize(scheme="W4A16", ignore=HEAD)}, "sizes that fit all: 32, 16"),
    ],
)
def test_bad_input_fails_before_anything_is_written(llama, run, tmp_path, settings, message):
    before = sorted(tmp_path.iterdir())
    with pytest.raises((PlanError, LayoutError), match=message):
        run(**{"model": llama, "recipe": "smooth_w8a8", **settings})
    assert sorted(p for p in tmp_path.iterdir() if p.name != "cache") == before


def test_an_existing_folder_is_kept_unless_overwriting_is_asked_for(llama, run, tmp_path):
    run(llama, recipe="rtn_w8a8")
    with pytest.raises(LayoutError, match="exists; choose another folder"):
        run(llama, recipe="rtn_w4a16")
    run(llama, recipe=RECIPES["w4a16"](), overwrite_output_dir=True)
    assert any(name.endswith("weight_packed") for name in load_file(tmp_path / "out" / "model.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == ["out"]


def test_foreign_folders_are_never_overwritten(llama, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(LayoutError, match="not a folder that this program wrote"):
        run(llama, recipe="rtn_w8a8", overwrite_output_dir=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_failure_while_writing_keeps_the_old_output_and_leaves_a_recognisable_partial(
    llama, run, tmp_path, monkeypatch
):
    run(llama, recipe="rtn_w8a8")
    old = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(self, params):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rg.ShardWriter, "write", fail)
        with pytest.raises(OSError, match="No space"):
            run(llama, recipe="rtn_w8a8", overwrite_output_dir=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == old
    assert (tmp_path / "out.partial" / ".regauge-partial").exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()  # nothing loads it by mistake
    run(llama, recipe="rtn_w8a8", overwrite_output_dir=True)
    assert not (tmp_path / "out.partial").exists()


def test_a_foreign_partial_folder_is_not_removed(llama, run, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(LayoutError, match="is not ours"):
        run(llama, recipe="rtn_w8a8")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(("size", "expected"), [(10, 10), ("5GB", 5_000_000_000), ("1.5 mb", 1_500_000), ("7", 7)])
def test_sizes_are_parsed(size, expected):
    assert parse_size(size) == expected
