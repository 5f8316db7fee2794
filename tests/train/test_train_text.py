"""Text as tokens: nothing is lost, the same files give the same data set, and what is no text is refused by place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data import prepare
from hpctrain.data.__main__ import main
from hpctrain.data.dataset import Dataset
from hpctrain.data.prepare import documents, is_validation, tokenizer_from, train_tokenizer
from hpctrain.errors import DamagedError, TrainError

tokenizers = pytest.importorskip("tokenizers")

LINES = [f"the {word} number {number} is {number * number}\n" for number in range(300) for word in ("first", "other")]
TOKENIZER = train_tokenizer(LINES, 400)


@given(text=st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_text_survives(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens.dtype == np.uint16
    assert 0 not in tokens
    assert TOKENIZER.decode(tokens) == text


def test_learning_the_same_text_gives_the_same_tokenizer_and_fewer_tokens_than_bytes() -> None:
    assert train_tokenizer(LINES, 400).to_bytes() == TOKENIZER.to_bytes()
    assert TOKENIZER.vocabulary == 400
    assert len(TOKENIZER.encode(LINES[0])) < len(LINES[0]) / 2
    again = tokenizer_from(TOKENIZER.to_bytes(), "t")
    assert again.encode("the other").tolist() == TOKENIZER.encode("the other").tolist()
    assert again.decode([0]) == "\n\n"


def test_a_file_that_is_not_our_tokenizer_is_refused() -> None:
    with pytest.raises(TrainError, match="a vocabulary of 100: bytes alone need 257"):
        train_tokenizer(LINES, 100)
    with pytest.raises(DamagedError, match="cannot use t: it is not a tokenizer"):
        tokenizer_from(b"{}", "t")
    foreign = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode()
    with pytest.raises(DamagedError, match=r"its token 0 is not <\|end\|>"):
        tokenizer_from(foreign, "t")


def test_a_long_text_comes_in_pieces_cut_at_lines_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PIECE_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES) + "é" * 300)
    parts = list(documents([path], "text"))
    assert "".join(parts) == path.read_text()
    assert all(part.endswith("\n") for part in parts[:-1])
    assert max(map(len, parts[:-1])) <= 200


def test_documents_of_jsonl_and_of_packed_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": f"text {number}"}) + "\n" for number in range(3))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"whole"))
    found = list(documents(sorted(tmp_path.iterdir()), "body"))
    assert found == ["text 0", "text 1", "text 2"] * 2 + ["whole"]


def test_the_command_makes_the_same_data_set_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02d}.txt").write_text("".join(LINES[number : number + 40]))
    words = ["text", "--vocabulary", "300", "--validation", "0.2", "--shard-mib", "1", str(texts)]
    for name in ("a", "b"):
        assert main([*words, "--out", str(tmp_path / name)]) == 0
    first, second = Dataset(tmp_path / "a"), Dataset(tmp_path / "b")
    assert (first.digest, first.vocabulary) == (second.digest, 300)
    content = first.tokenizer()
    assert content is not None
    tokenizer = tokenizer_from(content, "a")
    split = first.split("train")
    text = tokenizer.decode(split[0 : split.size])
    kept = [path.read_text() for path in sorted(texts.iterdir()) if not is_validation(path.read_bytes(), 0.2)]
    assert text == "".join(document + "\n\n" for document in kept)
    assert 0 < len(kept) < 40
    assert main([*words[:1], *words[3:], "--tokenizer", str(tmp_path / "a"), "--out", str(tmp_path / "c")]) == 0
    assert Dataset(tmp_path / "c").digest == first.digest
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"tokenizer\.json: it does not match its hash"):
        Dataset(tmp_path / "a").tokenizer()


def test_small_shards_hold_all_tokens_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))
    for name, shard_bytes in (("one", 1 << 20), ("many", 500)):
        prepare.prepare_text(
            tmp_path / name, [path], tokenizer=TOKENIZER, vocabulary=0, validation=0.0, shard_bytes=shard_bytes
        )
    one, many = (Dataset(tmp_path / name) for name in ("one", "many"))
    assert len(many.splits["train"]) > 10
    assert max(entry.rows for entry in many.splits["train"]) <= 250
    rows = one.split("train").size
    assert np.array_equal(one.split("train")[0:rows], many.split("train")[0:rows])


def test_a_file_that_is_not_text_is_refused_and_leaves_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin.txt").write_bytes(b"good line\nbad \xff line\n")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"abc" * 1000)[:-10])
    (tmp_path / "empty.txt").write_text("")
    for name, why in (
        ("bin.txt", "bin.txt: byte 14 is not UTF-8"),
        ("x.jsonl", "cannot read line 2 of"),
        ("cut.txt.gz", "cut.txt.gz: Compressed file ended"),
        ("empty.txt", "there is no text in"),
        ("none.txt", "there is no such file"),
    ):
        assert main(["text", "--vocabulary", "300", "--out", str(tmp_path / "out"), str(tmp_path / name)]) == 1
        assert why in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
