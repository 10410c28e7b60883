"""What `inspect` shows, writes and reads."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import regauge as rg
from regauge.graph.types import Axis, Graph, Linear, Proof, Rejection
from regauge.jobs.folding import axis_note, braces, fold, label_of, relative
from regauge.jobs.graph_plot import COLORS, panels_of, plot_graph
from shapes import SHAPE
from transformers import DeepseekV3Config, GemmaConfig, LlamaConfig, LongformerConfig, MixtralConfig, Phi3Config

_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "gemma": GemmaConfig(**SHAPE, head_dim=8),
    "phi3": Phi3Config(**SHAPE),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=8),
    "deepseek_v3": DeepseekV3Config(**{**SHAPE, **_DEEPSEEK}, first_k_dense_replace=1),
    "longformer": LongformerConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        attention_window=[4, 4],
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder(kind)`: a folder that holds a config.json and nothing else."""
    made = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            CONFIGS[kind].save_pretrained(made[kind])
        return made[kind]

    return get


@pytest.fixture(scope="session")
def inspected(folder):
    """`inspected(kind)`: made once."""
    made = {}

    def get(kind: str) -> rg.Inspection:
        if kind not in made:
            made[kind] = rg.inspect(folder(kind))
        return made[kind]

    return get


def section(table: str, title: str) -> str:
    return next(part for part in table.split("\n\n") if part.startswith(title))


def test_json_is_plain_and_complete(inspected):
    found = inspected("llama")
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    graph = found.graph
    assert (record["model_type"], record["class"], record["untraced"]) == ("llama", "LlamaForCausalLM", None)
    assert record["blocks"] == ["model.layers.0", "model.layers.1"]
    assert [x["name"] for x in record["linears"]] == list(graph.linears)
    assert [x["name"] for x in record["sites"]] == list(graph.sites)
    assert [x["name"] for x in record["symmetries"]] == [s.name for s in graph.symmetries]
    assert [x["name"] for x in record["rejected"]] == [r.name for r in graph.rejected]
    assert set(record["proofs"]) == {s.name for s in graph.symmetries}
    assert all(proof["holds"] for proof in record["proofs"].values())
    v_o = next(s for s in record["symmetries"] if s["kind"] == "v_o")
    assert len(v_o["consumers"][0]["classes"]) == 32
    assert max(v_o["consumers"][0]["classes"]) == v_o["width"] - 1


def test_a_figure_that_is_not_a_number_becomes_null(inspected):
    found = inspected("llama")
    proof = Proof(method="none", error="no instance")
    unproved = replace(found, graph=replace(found.graph, proofs={"a": proof}))
    record = json.loads(json.dumps(unproved.to_json(), allow_nan=False))["proofs"]["a"]
    assert record == {"method": "none", "change": None, "control": None, "error": "no instance", "holds": False}


def test_the_table_shows_equal_blocks_once(inspected):
    table = inspected("llama").table()
    assert table.count("model.layers.0-1 (2 alike)") == 4  # header and three sections
    symmetries = section(table, "SYMMETRIES")
    assert "self_attn.{q_proj, k_proj, v_proj}" in symmetries
    assert symmetries.count("up_down") == 1
    assert "32 columns in 16 classes" in symmetries
    assert symmetries.count(" jvp ") == 6
    assert "11: 4 norm, 2 q_k, 2 v_o, 2 up_down, 1 head" in table
    assert max(map(len, table.splitlines())) < 125


def test_unlike_blocks_are_not_folded(inspected):
    table = inspected("deepseek_v3").table()
    assert "model.layers.0, model.layers.1-2 (2 alike)" in table
    symmetries = section(table, "SYMMETRIES")
    assert symmetries.index("model.layers.0\n") < symmetries.index("model.layers.1-2 (2 alike)\n")
    assert symmetries.count("mlp.shared_experts.down_proj\n") + symmetries.count("mlp.shared_experts.down_proj ") == 2
    assert "rows 16-31, each of 8 experts" in symmetries
    assert "rows 8-63, 32 of them in 4 classes" in symmetries


def test_blocks_of_other_widths_are_not_folded(inspected):
    graph = inspected("llama").graph
    up = "model.layers.1.mlp.up_proj"
    wider = {**graph.linears, up: replace(graph.linears[up], shape=(64, 32))}
    assert [p.label for p in fold(graph)] == ["model.layers.0-1", "outside all blocks"]
    assert [p.label for p in fold(replace(graph, linears=wider))] == [
        "model.layers.0",
        "model.layers.1",
        "outside all blocks",
    ]


def test_fused_rows_experts_and_offsets_are_said(inspected):
    assert "rows 48-95" in inspected("phi3").table()
    mixtral = inspected("mixtral").table()
    assert "and mlp.experts.gate_up_proj" in section(mixtral, "SYMMETRIES")
    assert "11, 4 of them not observable" in mixtral
    assert section(mixtral, "SITES").count("not observable") == 2
    gemma = inspected("gemma").table()
    assert gemma.count("as 1 + w") == 2
    assert "tie         lm_head.weight -> model.embed_tokens.weight" in gemma


def test_rejected_producers_have_reasons(inspected):
    rejected = section(inspected("llama").table(), "REJECTED")
    assert rejected.count("mlp.gate_proj") == 1
    assert "silu in *.mlp.act_fn" in rejected
    assert "pow in model.layers.0.input_layernorm" in rejected


def test_a_failed_proof_is_shown_with_its_figures(inspected):
    found = inspected("llama")
    reason = Proof(method="jvp", change=0.25, control=0.5).reason
    graph = replace(found.graph, rejected=(Rejection(name="model.norm", kind="head", reasons=(reason,)),))
    assert "jvp: the output moves by 2.5e-01" in section(replace(found, graph=graph).table(), "REJECTED")


def test_an_untraced_model_says_what_to_do_first(inspected, tmp_path):
    found = inspected("longformer")
    table = found.table()
    assert table.startswith("NOT TRACED: the forward cannot be traced")
    assert "mappings" in table
    assert "leave the equalization stage out" in table
    assert section(table, "SYMMETRIES").endswith("  none")
    assert found.to_json()["untraced"] == found.graph.untraced
    assert [name for name, _ in panels_of(found.graph)] == ["ties"]
    assert not plot_graph(replace(found.graph, ties={}), tmp_path / "graph.svg", "nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi3", "mixtral", "deepseek_v3"])
def test_the_picture_is_xml_and_has_a_band_for_each_row_of_the_table(kind, inspected, tmp_path):
    graph = inspected(kind).graph
    parts = fold(graph)
    bands = [band for _, bands in panels_of(graph) for band in bands]
    assert sum(b.kind in COLORS for b in bands) == sum(len(p.symmetries) for p in parts)
    assert sum(b.kind == "rejected" for b in bands) == sum(len(p.rejected) for p in parts)
    assert sum(b.kind == "tie" for b in bands) == len(graph.ties)
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    assert plot_graph(graph, first, kind)
    assert ET.parse(first).getroot().tag.endswith("svg")
    if kind == "llama":
        plot_graph(graph, second, kind)
        assert first.read_bytes() == second.read_bytes()


def test_no_text_of_the_picture_meets_another_or_the_edge(inspected, tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    boxes = []

    def measure(figure, path, **_):
        renderer = FigureCanvasAgg(figure).get_renderer()
        axes = figure.axes[0]
        boxes.extend((t.get_text(), t.get_window_extent(renderer)) for t in axes.texts if t.get_text())
        boxes.append(("", axes.get_window_extent(renderer)))

    monkeypatch.setattr(Figure, "savefig", measure)
    plot_graph(inspected("deepseek_v3").graph, tmp_path / "graph.svg", "title")
    *texts, (_, page) = boxes
    assert len(texts) > 100
    for i, (text, box) in enumerate(texts):
        assert page.x0 < box.x0, text
        assert box.x1 < page.x1, text
        # a line of text has empty space above and below its letters
        assert not [other for other, b in texts[:i] if box.shrunk(1, 0.8).overlaps(b.shrunk(1, 0.8))], text


def test_files_are_written_without_reading_weights(folder, tmp_path, monkeypatch):
    import safetensors

    monkeypatch.setattr(safetensors, "safe_open", None)
    monkeypatch.setattr("regauge.graph.adapters.Shards.__init__", None)
    found = rg.inspect(str(folder("llama")), tmp_path / "new" / "out")
    assert found.files == tuple(str(tmp_path / "new" / "out" / name) for name in ("inspect.json", "graph.svg"))
    text = Path(found.files[0]).read_text()
    assert json.loads(text) == found.to_json()
    assert text.count("\n") < 200  # long lists are on one line
    assert {p.name for p in folder("llama").iterdir()} == {"config.json", "regauge-proofs.json"}


def test_without_matplotlib_only_json_is_written(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["regauge.jobs.inspect"], "can_plot", lambda: False)
    assert [Path(p).name for p in rg.inspect(folder("llama"), tmp_path / "out").files] == ["inspect.json"]


@pytest.mark.parametrize("text", [None, '{"model_type": "nope"}', "{", "{}"])
def test_faults_of_the_folder_are_one_line(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(rg.LayoutError, match=r"config\.json") as caught:
        rg.inspect(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_output_folder_is_refused(folder, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(rg.LayoutError, match="output_dir: .* is not a folder"):
        rg.inspect(folder("llama"), tmp_path / "out")


def test_a_graph_without_linears_is_shown():
    empty = rg.Inspection(model="m", model_type="t", cls="C", graph=Graph(linears={}, sites={}), seconds=0.0)
    assert empty.table().count("  none") == 4


@pytest.mark.parametrize(
    ("axis", "shape", "note"),
    [
        (Axis(param="w", dim=0, size=4), (4, 2), ""),
        (Axis(param="w", dim=0, size=2, start=2), (4, 2), "rows 2-3"),
        (Axis(param="w", dim=1, size=4, classes=(0, 0, 1, 1)), (2, 4), "4 columns in 2 classes"),
        (Axis(param="w", dim=0, size=4, classes=(0, -1, 1, -1)), (4, 2), "2 of 4 rows"),
        (Axis(param="w", dim=0, size=3, start=1, classes=(0, -1, 0)), (4, 2), "rows 1-3, 2 of them in 1 class"),
        (Axis(param="w", dim=0, size=4, offset=1.0), (4,), "as 1 + w"),
        (Axis(param="experts.w", dim=1, size=2, start=2, stack=0), (3, 4, 5), "rows 2-3, each of 3 experts"),
        (Axis(param="w", dim=2, size=2, stack=0, classes=(0, 0, 1, 1)), (2, 4, 2), "2 columns in 1 class, each of 2 matrices"),
    ],
)  # fmt: skip
def test_axes_are_put_into_words(axis, shape, note):
    assert axis_note(axis, {axis.param: shape}) == note


def test_names_are_shortened():
    assert braces(["a.q", "a.k", "b", "e.0.w", "e.1.w", "e.3.w"]) == ["a.{q, k}", "b", "e.0-1,3.w"]
    assert label_of(["h.0", "h.1", "h.2", "h.7"]) == "h.0-2,7"
    assert relative("add in h.1; pow in h.2.ln, h.12.ln", "h.1") == "add in *; pow in *+1.ln, h.12.ln"
    assert relative("pow in h.2.ln", "h.1", reach=0) == "pow in h.2.ln"
    assert relative("path.h.1.x", "h.1") == "path.h.1.x"


def test_activations_that_many_blocks_share_do_not_keep_them_apart():
    """The keys of every decoder block read the encoder's output, a site with the name of the first of them."""
    names = [f"h.{i}.k" for i in range(4)]
    linears = {
        n: Linear(name=n, weight=f"{n}.weight", shape=(2, 2), site="h.0.k", block=i) for i, n in enumerate(names)
    }
    graph = Graph(linears=linears, sites={}, blocks=("h.0", "h.1", "h.2", "h.3"))
    assert [p.label for p in fold(graph)] == ["h.0-3"]
