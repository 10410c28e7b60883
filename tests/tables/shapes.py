"""The sizes of the tiny models that tests, and the benchmark of architectures, build."""

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
