"""Reading, formatting, tokenizing and batching text."""

import json

import pytest
import torch
from regauge import Data, LayoutError
from regauge.jobs.data import batches, sequences


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pydoc_has_two_disjoint_halves_of_equal_sequences(tokenizer):
    train = sequences(Data(num_samples=4, max_seq_length=32), tokenizer)
    test = sequences(Data(split="test", num_samples=4, max_seq_length=32), tokenizer)
    assert [len(ids) for ids in train + test] == [32] * 8
    assert train[0] != test[0]


def test_plain_text_is_joined_and_cut(tokenizer, text):
    found = sequences(Data(name=str(text), num_samples=3, max_seq_length=20), tokenizer)
    stream = tokenizer(text.read_text())["input_ids"]
    assert found == [stream[0:20], stream[20:40], stream[40:60]]


def test_folder_reads_its_files_in_order(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text("second " * 50)
    (tmp_path / "a.md").write_text("first " * 50)
    found = sequences(Data(name=str(tmp_path), num_samples=1, max_seq_length=8), tokenizer)
    assert tokenizer.decode(found[0]).startswith("first fi")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "plain words"}, "plain words"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "<user> hi\n"),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
            "<user> hi\n<assistant> yo\n",
        ),
        ({"instruction": "add", "input": "1 2", "output": "3"}, "<user> add\n\n1 2\n<assistant> 3\n"),
        ({"question": "why", "response": "so"}, "<user> why\n<assistant> so\n"),
    ],
)
def test_rows_are_formatted_by_their_columns(tokenizer, tmp_path, row, expected):
    name = write_rows(tmp_path / "rows.jsonl", [row])
    found = sequences(Data(name=name, num_samples=1, max_seq_length=64), tokenizer)
    assert tokenizer.decode(found[0]) == expected


def test_rows_are_truncated_one_by_one_or_joined(tokenizer, tmp_path):
    name = write_rows(tmp_path / "rows.jsonl", [{"text": "one two three four five six"}, {"text": "seven eight"}] * 4)
    apart = sequences(Data(name=name, num_samples=3, max_seq_length=6), tokenizer)
    joined = sequences(Data(name=name, num_samples=3, max_seq_length=6, concatenate=True), tokenizer)
    assert apart[0] == tokenizer("one two three four five six")["input_ids"][:6]
    assert apart[1] == tokenizer("seven eight")["input_ids"][:6]
    assert joined[1] != apart[1]


def test_json_list_and_parquet_read_as_rows(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row number {i} of some words"} for i in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    both = [
        sequences(Data(name=str(tmp_path / name), num_samples=4, max_seq_length=8), tokenizer)
        for name in ("rows.json", "rows.parquet")
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty"),
        ("short.txt", "a few words", "lower num_samples"),
        ("bad.jsonl", "{not json", "bad.jsonl:1: not JSON"),
        ("columns.jsonl", '{"foo": 1}', "no usable column among foo"),
        ("scalar.jsonl", "3", "expected rows with columns"),
        ("object.json", '{"text": "x"}', "expected a JSON list"),
        ("data.csv", "a,b", "expected .txt"),
        ("absent.txt", None, "no such file"),
    ],
)
def test_bad_data_names_the_file_and_the_fault(tokenizer, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(LayoutError, match=message):
        sequences(Data(name=str(path), num_samples=8, max_seq_length=64), tokenizer)


def test_folder_without_text_is_an_error(tokenizer, tmp_path):
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(LayoutError, match=r"no \.txt"):
        sequences(Data(name=str(tmp_path)), tokenizer)


@pytest.mark.parametrize("field", ["num_samples", "max_seq_length"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=field):
        Data(**{field: value})


def test_batches_pad_on_the_right_and_mask_the_padding():
    made = list(batches([[1, 2], [3, 4, 5], [6]], size=2, pad=9))
    assert [b.index.tolist() for b in made] == [[1, 0], [2]]
    assert made[0].input_ids.tolist() == [[3, 4, 5], [1, 2, 9]]
    assert made[0].attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert torch.equal(made[1].attention_mask, torch.ones(1, 1, dtype=torch.long))
