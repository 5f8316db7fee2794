"""The loop: train a small Llama, export it, quantize it, and judge what will be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hpctrain.data.__main__ as data_main
from hpcserve.__main__ import main as serve_main
from hpcserve.kernels import WeightKind
from hpcserve.smaller.perplexity import perplexity, text_tokens, whole_model, windows
from hpctrain.checkpoint.__main__ import main as checkpoint_main
from hpctrain.examples import llama

SENTENCE = "the head node runs one daemon, and nodes need nothing but an ssh server and python. "


def test_a_trained_model_is_exported_quantized_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(SENTENCE * 300)
    words = ["text", "--out", str(tmp_path / "texts"), "--vocabulary", "300", str(tmp_path / "text")]
    assert data_main.main(words) == 0
    size = ["--layers", "1", "--width", "64", "--heads", "4", "--groups", "2", "--context", "32"]
    run = ["--out", str(tmp_path / "run"), "--data", str(tmp_path / "texts"), "--steps", "40", "--batch", "8"]
    assert llama.main([*run, *size, "--lr", "1e-2", "--warmup", "5"]) == 0
    model = tmp_path / "model"
    model.mkdir()
    assert checkpoint_main(["export", str(tmp_path / "run"), str(model / "model.safetensors")]) == 0
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    assert perplexity(model, SENTENCE * 9).perplexity < 30  # of 300 tokens
    capsys.readouterr()
    small = tmp_path / "small"
    assert serve_main(["quantize", str(model), str(small), "--text", str(tmp_path / "text"), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["perplexity_after"] < 1.01 * judged["perplexity_before"]
    words = [str(model), str(tmp_path / "smaller"), "--kind", "int4", "--text", str(tmp_path / "text"), "--json"]
    assert serve_main(["quantize", *words]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["perplexity_after"] < 1.05 * judged["perplexity_before"]


def test_the_served_model_computes_what_the_trained_one_does(tmp_path: Path) -> None:
    from tiny_models import tiny_model

    directory = tiny_model(tmp_path / "model", tie_word_embeddings=True, head_dim=8)
    config = json.loads((directory / "config.json").read_text())
    served = whole_model(directory, WeightKind.FP32)
    from safetensors.torch import load_file

    trained = llama.Llama(config)
    trained.load_state_dict(load_file(directory / "model.safetensors"))
    ((window, hidden, step),) = windows(served, text_tokens(directory, served, SENTENCE, 40))
    with torch.no_grad():
        wanted = trained(torch.tensor([window]))[0]
    torch.testing.assert_close(served.logits(hidden, step), wanted, rtol=1e-4, atol=1e-4)
