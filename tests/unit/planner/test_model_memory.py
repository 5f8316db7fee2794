"""The memory of models: sums by hand, hostile configurations, and peaks that were measured."""

from __future__ import annotations

import json

import pytest

from hpcsched.errors import RequestError
from hpcsched.planner.memory import (
    MARGIN,
    Model,
    Serving,
    Training,
    model_from_numbers,
    parse_params,
    read_config,
    serving_need,
    training_need,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def read(**changes: object) -> Model:
    return read_config(json.dumps({name: value for name, value in (LLAMA | changes).items() if value is not None}), "m")


def test_parameters_of_known_models() -> None:
    assert read().params == pytest.approx(6.738e9, rel=0.001)  # Llama 2 7B
    mixtral = read(
        model_type="mixtral",
        intermediate_size=14336,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    assert mixtral.params == pytest.approx(46.7e9, rel=0.001)
    assert mixtral.params_per_token == pytest.approx(12.9e9, rel=0.01)
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    assert read_config(json.dumps(gpt2), "gpt2").params == pytest.approx(124.4e6, rel=0.001)


def test_training_with_adam_takes_16_bytes_a_parameter_beside_activations() -> None:
    model = read()
    parts = training_need(model, Training(sequence=1)).parts
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 16 * model.params
    half = training_need(model, Training(sequence=1, dtype="bf16")).parts
    assert half["weights"] + half["gradients"] + half["optimizer"] == 16 * model.params


def test_the_optimizer_is_divided_by_zero_and_is_small_with_sgd() -> None:
    model = read()
    assert training_need(model, Training(zero_ranks=4)).parts["optimizer"] == 2 * model.params
    assert training_need(model, Training(optimizer="sgd")).parts["optimizer"] == 0


def test_activations_grow_with_tokens_and_shrink_with_recomputation() -> None:
    model = read()
    one, two = (training_need(model, Training(batch=batch)).parts["activations"] for batch in (1, 2))
    assert two == 2 * one
    assert training_need(model, Training(recompute=True)).parts["activations"] < one / 5


def test_the_cache_counts_keys_and_values_of_all_tokens() -> None:
    need = serving_need(read(num_key_value_heads=8), Serving(streams=4, context=2048))
    assert need.parts["cache"] == 2 * 32 * 8 * 128 * 2 * 4 * 2048
    assert need.peak == sum(need.parts.values())
    assert need.total > need.peak * MARGIN


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "mamba"}, "the family 'mamba' is not known"),
        ({"model_type": None}, "the family 'None' is not known"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": "32000"}, "vocab_size is 32000, not a number"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_attention_heads": 1.5}, "num_attention_heads is 1.5"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        read(**changes)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"model_type": "llama"}'])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot (read|tell)"):
        read_config(text, "m")


def test_numbers_make_a_model_and_contradictions_are_refused() -> None:
    none = {"params": "", "layers": 0, "hidden": 0, "heads": 0, "kv_heads": 0, "vocab": 0, "ffn": 0}
    seven = model_from_numbers(**(none | {"params": "7B"}))  # type: ignore[arg-type]
    assert (seven.params, 24 <= seven.layers <= 48, 3000 <= seven.hidden <= 5000) == (7 * 10**9, True, True)
    for changes, why in (
        ({}, "give a directory"),
        ({"layers": 2, "hidden": 100, "vocab": 10, "heads": 3}, "100 among 3 heads"),
        ({"params": "7B", "hidden": 4096, "heads": 32, "kv_heads": 5}, "32 heads among 5"),
    ):
        with pytest.raises(RequestError, match=why):
            model_from_numbers(**(none | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "-7B", "7X", "nan", "1e9", "9" * 30, "7B7"])
def test_a_number_of_parameters_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RequestError, match="number of parameters"):
        parse_params(text)
