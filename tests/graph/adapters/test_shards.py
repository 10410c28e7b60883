"""Folders of safetensors: what is read, what is refused, and what is written."""

import json
import struct

import pytest
import regauge as rg
import torch
from regauge import LayoutError
from safetensors.torch import load_file, save_file

SPECS = {
    "a": torch.empty(3, 5, dtype=torch.bfloat16, device="meta"),
    "b": torch.empty(7, dtype=torch.int8, device="meta"),
    "c": torch.empty(2, 2, dtype=torch.float32, device="meta"),
    "empty": torch.empty(0, 4, dtype=torch.float32, device="meta"),
    "scalar": torch.empty((), dtype=torch.int64, device="meta"),
}


def values():
    generator = torch.Generator().manual_seed(0)
    return {n: (100 * torch.rand(p.shape, generator=generator)).to(p.dtype) for n, p in SPECS.items()}


def write(folder, params, order=None, limit=10**9):
    folder.mkdir()
    writer = rg.ShardWriter(folder, SPECS, limit)
    for name in order or params:
        writer.write({name: params[name]})
    writer.close()
    return folder


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_what_is_written_is_read_by_the_library_and_by_us(tmp_path):
    params = values()
    folder = write(tmp_path / "out", params)
    theirs = load_file(folder / "model.safetensors")
    with rg.Shards(folder).read(SPECS) as ours:
        for name, p in params.items():
            assert torch.equal(theirs[name], p)
            assert torch.equal(ours[name], p)
            assert ours[name].dtype == p.dtype
    assert rg.Shards(folder).specs().keys() == SPECS.keys()


def test_the_order_of_writing_does_not_show(tmp_path):
    params = values()
    one, two = write(tmp_path / "1", params), write(tmp_path / "2", params, order=sorted(params, reverse=True))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_many_files_have_an_index_that_names_them(tmp_path):
    folder = write(tmp_path / "out", values(), limit=20)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["a"] == "model-00001-of-00004.safetensors"
    assert index["metadata"]["total_size"] == rg.Shards(folder).nbytes == 30 + 7 + 16 + 8
    assert set(index["weight_map"].values()) == {p.name for p in folder.glob("*.safetensors")}


def test_offsets_are_aligned_for_every_dtype(tmp_path):
    folder = write(tmp_path / "out", values())
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    for name, p in SPECS.items():
        assert header[name]["data_offsets"][0] % p.dtype.itemsize == 0


def test_a_tensor_that_never_came_is_named(tmp_path):
    writer = rg.ShardWriter(tmp_path, SPECS)
    writer.write({"a": values()["a"]})
    with pytest.raises(LayoutError, match="4 tensors were never written: b"):
        writer.close()
    writer.abort()


@pytest.mark.parametrize("p", [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 5)])
def test_a_tensor_of_another_layout_is_refused(tmp_path, p):
    writer = rg.ShardWriter(tmp_path, SPECS)
    with pytest.raises(LayoutError, match="a: laid out as torch.bfloat16"):
        writer.write({"a": p})
    writer.abort()


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (GOOD, b"\0" * 7, "truncated: a ends at byte"),
        (GOOD, b"\0" * 9, "the header describes"),
        (b"{broken", b"", "the header is not JSON"),
        (b"[]", b"", "not a JSON object"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, "dtype 'F4' is not supported"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"\0" * 8, "takes 12 bytes, not 8"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"\0" * 8, "malformed"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "malformed"),
        ({"a": 3}, b"", "malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"\0" * 8, "malformed"),
    ],
)
def test_damaged_files_are_refused_when_opened(tmp_path, header, data, message):
    raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(LayoutError, match=message):
        rg.Shards(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", struct.pack("<Q", 10**15), struct.pack("<Q", 50) + b"{}"])
def test_files_that_are_not_safetensors_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LayoutError, match="not a whole safetensors file"):
        rg.Shards(tmp_path)


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_cannot_name_a_file_outside_the_folder(tmp_path, name):
    index(tmp_path, {"a": name})
    with pytest.raises(LayoutError, match="not a file name inside the folder"):
        rg.Shards(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    index(tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(LayoutError, match=r"model-1\.safetensors is missing \(it should hold a\)"):
        rg.Shards(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(LayoutError, match="the index says it holds b"):
        rg.Shards(tmp_path)
    index(tmp_path, {"a": "1.safetensors", "x": "2.safetensors"})
    with pytest.raises(LayoutError, match="the index says it holds x"):
        rg.Shards(tmp_path)


@pytest.mark.parametrize("text", ["nothing", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LayoutError, match="expected a JSON object with a 'weight_map'"):
        rg.Shards(tmp_path)


def test_folders_without_safetensors_are_told_apart(tmp_path):
    with pytest.raises(LayoutError, match="no such folder"):
        rg.Shards(tmp_path / "absent")
    with pytest.raises(LayoutError, match="neither"):
        rg.Shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LayoutError, match="convert pytorch_model.bin to safetensors"):
        rg.Shards(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_stop_the_run(tiny, value):
    model = tiny()
    plan = rg.plan(rg.transforms.Quantize(ignore=("lm_head",)), model.params, model.graph)
    name = "model.layers.1.mlp.down_proj.weight"
    bad = model.params[name].clone()
    bad[0, 0] = value
    with pytest.raises(LayoutError, match=f"{name}: 1 of 1536 weights are NaN or infinite"):
        rg.execute(plan, rg.Memory({**model.params, name: bad}), rg.Memory())
