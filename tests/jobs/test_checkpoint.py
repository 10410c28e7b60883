"""Opening, fingerprinting and configuring checkpoint folders, and what is refused."""

import json
import shutil

import pytest
import torch
from regauge import LayoutError
from regauge.jobs.checkpoint import copy_side_files, fingerprint, open_checkpoint, quantized_config
from regauge.transforms import PRESETS, QuantArgs, Scheme
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(llama, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(llama, tmp_path / "model")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_opening_reads_names_and_shapes_only(llama):
    checkpoint = open_checkpoint(llama)
    assert all(p.is_meta for p in checkpoint.params.values())
    assert set(checkpoint.params) == set(load_file(llama / "model.safetensors"))


def test_missing_tensor_is_named(folder):
    edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(folder)


def test_shape_that_disagrees_with_the_config_is_named(folder):
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(63, dtype=torch.bfloat16)}))
    with pytest.raises(LayoutError, match=r"model\.norm\.weight: config\.json says shape \(64,\).*\(63,\)"):
        open_checkpoint(folder)


def test_foreign_tensor_is_named(folder):
    edit(folder, lambda t: t.update({"model.extra.weight": torch.ones(1)}))
    with pytest.raises(LayoutError, match=r"1 tensors are not part of llama, first model\.extra\.weight"):
        open_checkpoint(folder)


def test_old_rotary_buffers_and_copies_of_a_tied_head_are_dropped(make_folder):
    folder = make_folder("tied_llama")
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(
        folder,
        lambda t: t.update(
            {"lm_head.weight": embeddings.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        ),
    )
    checkpoint = open_checkpoint(folder)
    assert "lm_head.weight" not in checkpoint.params
    assert not any("inv_freq" in name for name in checkpoint.params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ("{}", "config.json"),
        ("not json", "config.json"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}', "quantized already"),
    ],
)
def test_unusable_configs_are_refused(folder, config, message):
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(LayoutError, match=message):
        open_checkpoint(folder)


def test_a_config_of_another_model_is_told_by_its_tensors(folder):
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(LayoutError, match=r"tensor shared.weight is missing"):
        open_checkpoint(folder)


def test_no_folder(tmp_path):
    with pytest.raises(LayoutError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_fingerprint_depends_on_bytes_not_on_files(make_folder, folder):
    one, many = make_folder("llama"), make_folder("llama", max_shard_size="50KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    first = fingerprint(open_checkpoint(one))
    assert first == fingerprint(open_checkpoint(many))
    edit(folder, lambda t: t["model.norm.weight"].add_(1))
    assert fingerprint(open_checkpoint(folder)) != first


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    edit(folder, lambda t: t["model.layers.0.mlp.up_proj.weight"][3].fill_(value))
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: 64 of 6144 weights are NaN"):
        fingerprint(open_checkpoint(folder))


def test_broken_side_file_is_named_before_work(folder, tmp_path):
    (folder / "generation_config.json").write_text("{")
    (tmp_path / "out").mkdir()
    with pytest.raises(LayoutError, match=r"generation_config\.json: not JSON"):
        copy_side_files(folder, tmp_path / "out")


def test_code_in_the_folder_is_not_copied(folder, tmp_path):
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (tmp_path / "out").mkdir()
    names = copy_side_files(folder, tmp_path / "out")
    assert "tokenizer.json" in names
    assert not (tmp_path / "out" / "modeling_evil.py").exists()
    assert not {"config.json", "model.safetensors"} & set(names)


def config_of(llama, schemes):
    return quantized_config(json.loads((llama / "config.json").read_text()), open_checkpoint(llama).graph, schemes)


def test_unquantized_model_keeps_its_config(llama):
    assert config_of(llama, {}) == json.loads((llama / "config.json").read_text())


def test_one_scheme_targets_its_class_and_ignores_the_rest_by_name(llama):
    graph = open_checkpoint(llama).graph
    schemes = {n: PRESETS["W8A8"] for n, x in graph.linears.items() if x.cls == "Linear" and n != "lm_head"}
    made = config_of(llama, schemes)["quantization_config"]
    assert made["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert made["ignore"] == ["lm_head"]
    assert made["format"] == "int-quantized"


def test_mixed_schemes_target_modules_by_name(llama):
    schemes = {
        "model.layers.0.mlp.up_proj": PRESETS["W8A8"],
        "model.layers.0.mlp.down_proj": Scheme(weights=QuantArgs(num_bits=4, strategy="channel")),
    }
    made = config_of(llama, schemes)["quantization_config"]
    assert [g["targets"] for g in made["config_groups"].values()] == [[name] for name in schemes]
    assert made["ignore"] == []
    assert made["format"] == "mixed-precision"


# the library's W8A16 was per channel, as ours, until 0.20 made it groups of 128
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"W8A16"}))
def test_compressed_tensors_reads_the_config_and_finds_the_same_settings(llama, preset):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    made = config_of(llama, {"model.layers.0.mlp.up_proj": PRESETS[preset]})["quantization_config"]
    group = quantization.QuantizationConfig(**made).config_groups["group_0"]
    theirs = quantization.preset_name_to_scheme(preset, ["Linear"])
    for side in ("weights", "input_activations"):
        ours, want = getattr(group, side), getattr(theirs, side)
        for key in ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic"):
            assert (ours is None) == (want is None)
            assert ours is None or getattr(ours, key) == getattr(want, key), (side, key)
