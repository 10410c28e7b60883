"""Perplexity and distances, against plain computations."""

import math

import pytest
import torch
from regauge import LayoutError, evaluate
from regauge.jobs.evaluate import compare, load_model


@pytest.fixture(scope="module")
def model(llama):
    return load_model(llama)


def test_perplexity_is_exp_of_the_mean_loss_over_predicted_tokens(model):
    ids = [[5, 6, 7, 8, 9], [10, 11, 12]]
    total, count = 0.0, 0
    for row in ids:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0].float()
        for position in range(len(row) - 1):
            total -= torch.log_softmax(logits[position], -1)[row[position + 1]].item()
            count += 1
    result = compare(model, ids, batch_size=2)
    assert result.tokens == count == 6
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=2e-2)  # padding changes bf16 attention


def test_a_model_agrees_with_itself(model):
    result = compare(model, [[1, 2, 3, 4]], reference=model)
    assert result.kl == 0.0
    assert result.top1 == 1.0


def test_kl_is_directed_from_the_reference(model, llama):
    other = load_model(llama)
    with torch.no_grad():
        other.lm_head.weight.mul_(3.0)
    ids = [[1, 2, 3, 4, 5, 6]]
    with torch.no_grad():
        p = torch.log_softmax(other(input_ids=torch.tensor(ids)).logits[0, :-1].float(), -1)
        q = torch.log_softmax(model(input_ids=torch.tensor(ids)).logits[0, :-1].float(), -1)
    expected = (q.exp() * (q - p)).sum(-1).mean().item()
    assert expected > 1e-3
    assert compare(other, ids, reference=model).kl == pytest.approx(expected, rel=1e-4)


def test_module_needs_a_tokenizer(model):
    with pytest.raises(LayoutError, match="tokenizer"):
        evaluate(model)


def test_one_token_has_nothing_to_predict(model):
    with pytest.raises(LayoutError, match="at least two tokens"):
        compare(model, [[1]])


def test_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(LayoutError, match="no usable tokenizer"):
        evaluate(tmp_path)
