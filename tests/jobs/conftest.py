"""Tiny checkpoint folders with a tokenizer of their own, so that jobs run without a network."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, PreTrainedTokenizerFast

CHAT = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps in warm sun until evening comes"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 entries, a chat template, and no pad token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    inner.train_from_iterator([WORDS], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    made.chat_template = CHAT
    return made


CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "tied_llama": LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "opt": OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        vocab_size=320,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    ),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320, n_positions=256, bos_token_id=0, eos_token_id=0),
}


@pytest.fixture(scope="session")
def make_folder_of(tokenizer):
    """Write a random model of a config and dtype into a folder; the same seed every time."""

    def make(config, folder: Path, dtype: torch.dtype = torch.bfloat16, **save) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 1 and "bias" not in name:  # norms that differ from one, so that folding them shows
                    p.uniform_(0.5, 1.5)
        model.save_pretrained(folder, **save)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_folder(make_folder_of, tmp_path_factory):
    """The same by kind, into a folder of its own."""
    return lambda kind="llama", *args, **save: make_folder_of(
        CONFIGS[kind], tmp_path_factory.mktemp(kind), *args, **save
    )


@pytest.fixture(scope="session")
def llama(make_folder) -> Path:
    return make_folder("llama")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Statistics are cached in a folder of the test's own."""
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path) -> Path:
    """A text file that makes a few dozen short sequences."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"{i} {WORDS}" for i in range(200)))
    return path
