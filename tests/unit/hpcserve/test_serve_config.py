"""config.json: all families, in old and new form; what is impossible or unsupported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, LLAMA3_ROPE

from hpcserve.config import ModelFamily, NormKind, RopeKind, StoredKind, parse_config, read_config
from hpcserve.errors import ModelFileError


def values(family: str = "llama", **changes: Any) -> dict[str, Any]:
    made = {"model_type": family, **FAMILIES[family], **changes}
    return {name: value for name, value in made.items() if value is not ...}


def test_sliding_windows_of_each_family() -> None:
    assert parse_config(values("mistral")).windows == (24, 24)
    assert parse_config(values("mistral", sliding_window=None)).windows == (None, None)
    assert parse_config(values("gemma2", num_hidden_layers=3)).windows == (24, None, 24)
    gemma3 = parse_config(values("gemma3", num_hidden_layers=7, layer_types=...))
    assert gemma3.windows == (24,) * 5 + (None, 24)
    assert [rope.theta for rope in gemma3.ropes if rope] == [1e4] * 5 + [1e6, 1e4]
    qwen = {"sliding_window": 9, "max_window_layers": 1}
    assert parse_config(values("qwen2", **qwen)).windows == (None, None)
    assert parse_config(values("qwen2", **qwen, use_sliding_window=True)).windows == (None, 9)


def test_rotary_positions_in_old_and_new_form() -> None:
    old = parse_config(values(rope_theta=5e5, rope_scaling=LLAMA3_ROPE))
    new = parse_config(values(rope_theta=..., rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}))
    assert old == new
    assert old.ropes[0] is not None
    assert (old.ropes[0].kind, old.ropes[0].theta) == (RopeKind.LLAMA3, 5e5)
    linear = parse_config(values(rope_scaling={"type": "linear", "factor": 2.0})).ropes[0]
    assert linear is not None
    assert (linear.kind, linear.factor) == (RopeKind.LINEAR, 2.0)
    dynamic = parse_config(values(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert dynamic.ropes == parse_config(values()).ropes


def test_a_family_is_found_by_its_model_type_alone() -> None:
    config = parse_config(values("gemma3", architectures=...) | {"model_type": "gemma3_text"})
    assert (config.family, config.norm) == (ModelFamily.GEMMA3, NormKind.RMS_PLUS_ONE)


def test_the_numbers_of_quantized_files_are_read() -> None:
    assert parse_config(values(hpcserve={"weights": "int8"})).stored is StoredKind.INT8
    assert parse_config(values(eos_token_id=[3, 4])).eos_tokens == (3, 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are Llama"),
    "no_architecture": ({"architectures": [], "model_type": "t5"}, "model_type 't5' is not supported"),
    "heads": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    "no_layers": ({"num_hidden_layers": 0}, "num_hidden_layers .* from 1"),
    "many_layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers .* from 1"),
    "negative": ({"hidden_size": -1}, "hidden_size"),
    "text": ({"hidden_size": "64"}, "hidden_size of config.json is '64'"),
    "true": ({"hidden_size": True}, "hidden_size"),
    "missing": ({"vocab_size": ...}, "vocab_size is missing"),
    "odd_heads": ({"head_dim": 15}, "even number"),
    "eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "activation": ({"hidden_act": "relu"}, "activation 'relu' is not supported; supported are"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported; supported are"),
    "rope_text": ({"rope_scaling": "linear"}, "has to be an object|rope"),
    "rope_factor": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    "rope_order": ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "layer_types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "layer_lists": ({"layer_types": [[], []]}, "layer_types"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "hserve quantize"),
    "stored": ({"hpcserve": {"weights": "int2"}}, "int2"),
    "tokens": ({"eos_token_id": "</s>"}, "eos_token_id"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_impossible_value_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ModelFileError, match=words):
        parse_config(values(**changes))


@pytest.mark.parametrize("heads", [3, 128])
def test_heads_that_do_not_divide_the_width_of_gpt2_are_refused(heads: int) -> None:
    with pytest.raises(ModelFileError, match=f"n_embd 64 has to be a multiple of n_head {heads}"):
        parse_config(values("gpt2", n_head=heads))


def test_layers_without_experts_are_refused() -> None:
    with pytest.raises(ModelFileError, match="without experts"):
        parse_config(values("qwen3_moe", mlp_only_layers=[0]))
    with pytest.raises(ModelFileError, match="num_experts_per_tok"):
        parse_config(values("qwen3_moe", num_experts_per_tok=5))


def test_a_models_own_code_is_ignored_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    parse_config(values(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert "ignored" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{", b"[" * 100_000, b" " * (5 << 20), b"\xff"], ids=range(7))
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match="cannot read"):
        read_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_any_value_of_any_key_is_read_or_refused(family: str, data: st.DataObject) -> None:
    made = values(family)
    name = data.draw(st.sampled_from([*made, "rope_parameters", "rope_scaling", "layer_types", "hpcserve"]))
    try:
        parse_config(made | {name: data.draw(JSON)})
    except ModelFileError:
        pass


def test_a_directory_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values(hidden_act="relu")))
    with pytest.raises(ModelFileError, match=f"cannot serve '{tmp_path}': activation"):
        read_config(tmp_path)
