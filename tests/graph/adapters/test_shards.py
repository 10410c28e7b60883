"""Folders of safetensors: what is read, what is refused, and what is written."""

import json
import struct

import pytest
import regauge as rg
import torch
from regauge import LayoutError
from safetensors.torch import load_file, save_file
from torch import nn

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


def test_the_order_of_writing_does_not_show_in_many_files_either(tmp_path):
    params = values()
    one = write(tmp_path / "1", params, limit=20)
    two = write(tmp_path / "2", params, order=sorted(params, reverse=True), limit=20)
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in two.iterdir())
    assert len(names) == 5
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_the_library_would_lay_a_single_file_out_alike(tmp_path):
    params = values()
    folder = write(tmp_path / "out", params)
    save_file(params, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own(tmp_path):
    folder = write(tmp_path / "out", values(), limit=1)
    files = sorted(folder.glob("*.safetensors"))
    held = [set(load_file(file)) for file in files]
    assert sum(map(len, held)) == len(SPECS)
    assert max(sum(SPECS[n].nbytes > 0 for n in names) for names in held) == 1


def test_views_and_transposes_are_written_as_what_they_hold(tmp_path):
    spec = {"a": torch.empty(5, 3, device="meta"), "b": torch.empty(2, device="meta")}
    base = torch.arange(15.0).reshape(3, 5)
    tmp_path.joinpath("out").mkdir()
    writer = rg.ShardWriter(tmp_path / "out", spec)
    writer.write({"a": base.T, "b": nn.Parameter(base[1:, 2])})
    writer.close()
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(back["a"], base.T)
    assert back["b"].tolist() == [7.0, 12.0]


def test_every_dtype_of_the_format_comes_back(tmp_path):
    codes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    codes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    params = {str(dtype): torch.tensor([0, 1, 1, 0, 1], dtype=torch.float32).to(dtype) for dtype in codes}
    (tmp_path / "out").mkdir()
    writer = rg.ShardWriter(tmp_path / "out", params)
    writer.write(params)
    writer.close()
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    with rg.Shards(tmp_path / "out").read(params) as ours:
        for name, p in params.items():
            for got in (ours[name], theirs[name]):
                assert got.dtype == p.dtype
                assert torch.equal(got.float(), p.float())


def test_reading_gives_tensors_of_its_own(tmp_path):
    """Editing what was read must not reach the file."""
    folder = write(tmp_path / "out", values())
    before = (folder / "model.safetensors").read_bytes()
    store = rg.Shards(folder)
    with store.read(["a"]) as first, store.read(["a"]) as second:
        first["a"].zero_()
        assert torch.equal(second["a"], values()["a"])
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    folder = write(tmp_path / "out", values())
    with pytest.raises(LayoutError, match="no tensor nothing"), rg.Shards(folder).read(["nothing"]):
        pass


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    folder = write(tmp_path / "out", values())
    store = rg.Shards(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(LayoutError, match="the file ends early"), store.read(SPECS):
        pass


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
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"\0" * 8, "takes 8 bytes, not -8"),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, b"\0" * 8, "malformed"),
        ({"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 8]}}, b"\0" * 8, "malformed"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, b"\0" * 8, "malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, b"\0" * 8, "malformed"),
        (b'{"\xff": 1}', b"", "the header is not JSON"),
        ({}, b"\0" * 8, "the header describes"),
    ],
)
def test_damaged_files_are_refused_when_opened(tmp_path, header, data, message):
    raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(LayoutError, match=message):
        rg.Shards(tmp_path)


def entry(start, stop, **change):
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop], **change}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12),
        ({"a": entry(4, 8)}, 8),
        (b'{"a":%s,"a":%s}' % tuple(json.dumps(entry(n, n + 4)).encode() for n in (0, 4)), 8),
        ({"a": entry(0, 8, dtype=[])}, 8),
        ({"a": entry(0, 4, shape=[True])}, 4),
        ({"a": entry(0, 0, shape=[0, 2**40, 2**40])}, 0),
        (b"[" * 100_000, 0),
    ],
    ids=["overlap", "same_bytes", "hole", "hole_in_front", "name_twice", "dtype", "bool", "overflow", "nested"],
)
def test_headers_that_the_library_would_not_write_are_refused_when_opened(tmp_path, header, size):
    raw(tmp_path / "model.safetensors", header, b"\0" * size)
    with pytest.raises(LayoutError, match=r"model\.safetensors"):
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


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "2.safetensors")
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(LayoutError, match=r"2\.safetensors: a is also in 1\.safetensors"):
        rg.Shards(tmp_path)


def test_a_damaged_shard_among_many_is_named(tmp_path):
    folder = write(tmp_path / "out", values(), limit=20)
    path = folder / "model-00003-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LayoutError, match=r"model-00003-of-00004\.safetensors: truncated"):
        rg.Shards(folder)


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
