"""Smaller models: quantized and pruned ones are whole directories, and predict nearly as well."""

from __future__ import annotations

import errno
import json
import math

import pytest
import torch
from tiny_models import TEXT, tiny_model

import hpcserve.smaller.quantize
from hpcserve.__main__ import main
from hpcserve.config import StoredKind, read_config
from hpcserve.errors import ServeError
from hpcserve.kernels import WeightKind
from hpcserve.model import whole_part
from hpcserve.smaller.perplexity import perplexity, text_tokens, whole_model, windows
from hpcserve.smaller.prune import prune_model
from hpcserve.smaller.quantize import model_size, new_model, quantize_model
from hpcserve.weights import INDEX_NAME, WeightFiles


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def logits_of(directory, kind=WeightKind.FP32):
    """Return the logits of a model for a fixed text."""
    model = whole_model(directory, kind)
    ((_, hidden, step),) = windows(model, text_tokens(directory, model, TEXT, 40))
    return model.logits(hidden, step)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(("kind", "error"), [(StoredKind.INT8, 0.05), (StoredKind.INT4, 0.5)], ids=["int8", "int4"])
def test_a_quantized_model_computes_nearly_the_same(tmp_path, family, kind, error):
    source = tiny_model(tmp_path / "source", family)
    quantize_model(source, tmp_path / "small", kind)
    assert read_config(tmp_path / "small").stored is kind
    wanted, found = logits_of(source), logits_of(tmp_path / "small")
    assert (found - wanted).norm() / wanted.norm() < error
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


# A sixteenth of the weights is the embedding, another one the head, as of a Llama with 1.1 billion weights.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.53), ("int4", 0.33)], ids=["int8", "int4"])
def test_a_quantized_model_has_half_or_a_third_of_the_bytes(tmp_path, kind, share):
    source = tiny_model(tmp_path / "source", **WIDE)
    quantize_model(source, tmp_path / "small", StoredKind(kind))
    size = model_size(tmp_path / "small")
    assert size.bf16_bytes == model_size(source).bf16_bytes
    assert size.stored_bytes < share * size.bf16_bytes
    with WeightFiles(tmp_path / "small") as files:
        assert files.tensors["model.embed_tokens.weight.int8"].shape == (320, 256)


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("kind", [StoredKind.INT8, StoredKind.INT4])
def test_a_quantized_file_computes_what_quantizing_at_load_does(tmp_path, kind, tied):
    source = tiny_model(tmp_path / "source", tie_word_embeddings=tied)
    quantize_model(source, tmp_path / "small", kind)
    found, wanted = logits_of(tmp_path / "small", WeightKind(kind)), logits_of(source, WeightKind(kind))
    most = 0.2 if tied and kind is StoredKind.INT4 else 1e-5  # the head is made of the embedding's int8
    assert (found - wanted).norm() / wanted.norm() < most


def test_a_model_whose_embedding_was_left_in_floats_is_still_read(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(hpcserve.smaller.quantize, "PLAIN_MATRICES", hpcserve.smaller.quantize.EMBEDDINGS)
    quantize_model(llama, tmp_path / "small", StoredKind.INT8)
    with WeightFiles(tmp_path / "small") as files:
        assert "model.embed_tokens.weight" in files.tensors
    wanted = logits_of(llama, WeightKind.INT8)
    assert (logits_of(tmp_path / "small", WeightKind.INT8) - wanted).norm() / wanted.norm() < 0.2


def test_perplexity_is_the_exponential_of_the_mean_loss(llama):
    score = perplexity(llama, TEXT, WeightKind.FP32)
    model = whole_model(llama, WeightKind.FP32)
    tokens = text_tokens(llama, model, TEXT, 8192)
    logits = logits_of(llama)
    first = torch.log_softmax(logits, -1)[range(39), tokens[1:40]]
    short = perplexity(llama, TEXT, WeightKind.FP32, most_tokens=40)
    assert short.tokens == 39
    assert short.perplexity == pytest.approx(math.exp(-float(first.mean())), rel=1e-4)
    assert score.tokens == len(tokens) - 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pruning_keeps_the_columns_that_matter(tmp_path, family):
    source = tiny_model(tmp_path / "source", family)
    name = "transformer.h.1.mlp.c_proj.weight" if family == "gpt2" else "model.layers.1.mlp.down_proj.weight"
    silence(source, name, 0 if family == "gpt2" else 1)
    assert prune_model(source, tmp_path / "small", 0.67, TEXT) == 64
    assert read_config(tmp_path / "small").ffn == 64
    with WeightFiles(tmp_path / "small") as files:
        kept = files.read(name)
    assert torch.count_nonzero(kept.abs().sum(1 if family == "gpt2" else 0)) == 64
    assert perplexity(tmp_path / "small", TEXT).tokens > 40


def silence(directory, name, axis):
    """Make every third column of a layer's second FFN matrix have no effect."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    columns = torch.arange(0, 96, 3)
    tensors[name].index_fill_(axis, columns, 0.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_large_models_are_written_in_shards(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(hpcserve.smaller.quantize, "SHARD_BYTES", 20_000)
    quantize_model(llama, tmp_path / "small", StoredKind.INT8)
    table = json.loads((tmp_path / "small" / INDEX_NAME).read_text())["weight_map"]
    assert len(set(table.values())) > 2
    assert logits_of(tmp_path / "small").shape == (40, 320)


def test_a_full_disk_leaves_nothing(tmp_path, llama, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hpcserve.smaller.quantize, "save_file", full)
    with pytest.raises(ServeError, match="No space left"):
        quantize_model(llama, tmp_path / "small", StoredKind.INT8)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_never_replaced(tmp_path, llama):
    (tmp_path / "small").mkdir()
    with pytest.raises(ServeError, match="it exists"):
        quantize_model(llama, tmp_path / "small", StoredKind.INT8)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def stopped(writer):
        writer.add("one", torch.zeros(3))
        writer.flush()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError), new_model(tmp_path / "new") as writer:
        stopped(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_model_is_not_quantized_or_pruned_again(tmp_path, llama):
    quantize_model(llama, tmp_path / "small", StoredKind.INT8)
    with pytest.raises(ServeError, match="int8 already"):
        quantize_model(tmp_path / "small", tmp_path / "smaller", StoredKind.INT4)
    with pytest.raises(ServeError, match="before it is quantized"):
        prune_model(tmp_path / "small", tmp_path / "smaller", 0.5, TEXT)


def test_the_commands_report_size_and_perplexity(tmp_path, llama, capsys):
    text = tmp_path / "text"
    text.write_text(TEXT)
    words = [str(llama), str(tmp_path / "small"), "--text", str(text)]
    assert main(["quantize", *words]) == 0
    assert "perplexity over" in capsys.readouterr().out
    assert main(["perplexity", str(tmp_path / "small"), "--text", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1
    assert main(["quantize", *words]) == 1
    assert "it exists" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    assert main(["perplexity", str(llama), "--text", str(tmp_path / "empty")]) == 1
    assert "fewer than 2 tokens" in capsys.readouterr().err
    assert main(["perplexity", str(llama), "--text", str(tmp_path / "none")]) == 1
    assert whole_part(read_config(llama)).ffn.stop == 96
