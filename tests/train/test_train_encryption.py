"""Encrypted checkpoints: nothing of them is readable, nothing in them can be altered unseen, and they are never mixed."""

from __future__ import annotations

import base64
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import HERE, needs_mpi, run_mpi
from test_train_checkpoint import CHUNK_BYTES, NO_JOB, assert_holds, facts, state, write
from test_train_fallback import failing
from test_train_gradlog import World, assert_alike, kinds
from thread_writer import ThreadWriter

from hpctrain.checkpoint import Checkpointer
from hpctrain.checkpoint.__main__ import main
from hpctrain.checkpoint.chunks import digest
from hpctrain.checkpoint.encryption import CheckpointKey, FileSealer, checkpoint_key, opened_chunk
from hpctrain.checkpoint.manifest import Manifest, check_key, checkpoint_names, with_checksum
from hpctrain.checkpoint.restore import read_chain, read_checkpoint, restore_newest
from hpctrain.checkpoint.script import Trees
from hpctrain.checkpoint.writing import local_fallback
from hpctrain.checkpoint.writing.files import claim
from hpctrain.checkpoint.writing.maker import CheckpointReport, WriteOrder, WriterSetup
from hpctrain.checkpoint.writing.process import CheckpointKeeper
from hpctrain.checkpoint.writing.publish import Retention, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, layout_of
from hpctrain.errors import CheckpointKeyError, DamagedError
from hpctrain.loop import RunIdentity
from hpctrain.run import publish_weights

KEY, OTHER = CheckpointKey(bytes(range(32))), CheckpointKey(bytes(range(1, 33)))
CANARY = secrets.token_bytes(64)  # bytes that no packing makes smaller
SMALL = {"model.w": torch.arange(12.0), "model.canary": torch.frombuffer(bytearray(CANARY), dtype=torch.uint8)}


def write_encrypted(directory: Path, steps: list[int], of: Callable = state, key: CheckpointKey = KEY) -> None:
    """Write checkpoints of these steps with a key; every third one is a base."""
    mine = claim(directory, NO_JOB, now_s=0.0)
    restored = restore_newest(directory, None, print, key=key)
    retention = Retention(mine, RetentionPolicy(keep=2), key=key)
    writer = ThreadWriter(mine, restored and restored.published, 3, retention, CHUNK_BYTES, key=key)
    for step in steps:
        writer.begin(of(step), facts(step, mine.attempt))
        report = writer.wait()
        assert report is not None
        assert report.error is None, report.error
    writer.close()


def places_of(secret: bytes, directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file() and secret in path.read_bytes()]


def manifests(directory: Path, key: CheckpointKey = KEY) -> list[Manifest]:
    return [read_chain(directory, name, key)[-1][0] for name in checkpoint_names(directory)]


def key_file(folder: Path, key: CheckpointKey = KEY) -> Path:
    path = folder / "run.key"
    path.write_text(key.secret.hex() + "\n")
    path.chmod(0o600)
    return path


# ----- the format


def test_increments_are_as_small_as_without_a_key(tmp_path: Path) -> None:
    write(tmp_path / "plain", [1, 2, 3, 4], base_every=3)
    write_encrypted(tmp_path / "sealed", [1, 2, 3, 4])
    for name in checkpoint_names(tmp_path / "plain"):
        plain = read_chain(tmp_path / "plain", name)[-1][0]
        sealed = read_chain(tmp_path / "sealed", name, KEY)[-1][0]
        chunks = [chunk for tensor in sealed.tensors for chunk in tensor.chunks]
        assert [chunk.packing for tensor in plain.tensors for chunk in tensor.chunks] == [
            chunk.packing for chunk in chunks
        ]
        stored = len({chunk.at for chunk in chunks if chunk.stored})
        assert sealed.data[0].bytes - plain.data[0].bytes == 16 * stored, "a tag for each chunk, and nothing else"
    assert_holds(tmp_path / "plain", 4)
    restored = restore_newest(tmp_path / "sealed", layout_of(state(0)), print, key=KEY)
    for name, tensor in restored.published.snapshot.named().items():
        assert torch.equal(tensor, state(4)[name]), name


def test_f1_nothing_of_the_state_is_readable(tmp_path: Path) -> None:
    def named(step: int) -> dict[str, torch.Tensor]:
        return SMALL | {"model.secret_name": torch.tensor(step)}

    write_encrypted(tmp_path, [1, 2], of=named)
    content = memoryview(CANARY)
    secrets_of_it = (CANARY, b"secret_name", b"next_sample", b"float32", KEY.secret, KEY.digest(content).encode())
    assert [places_of(secret, tmp_path) for secret in secrets_of_it] == [[]] * len(secrets_of_it)
    assert repr(KEY) == "CheckpointKey()"


def test_a_hash_confirms_no_guess_of_a_content() -> None:
    assert len({KEY.digest(CANARY), OTHER.digest(CANARY), digest(CANARY)}) == 3


def test_a_pair_of_key_and_nonce_is_never_used_twice(tmp_path: Path) -> None:
    for _ in range(2):  # the second attempt continues, and writes the same content
        write_encrypted(tmp_path, [1, 2, 3, 4])
    World(tmp_path / "log", key=KEY).run(3)
    used: dict[tuple[str, int], tuple[str, int]] = {}
    salts: dict[str, str] = {}
    for manifest in [*manifests(tmp_path), *manifests(tmp_path / "log")]:
        flats = [flat for step in (manifest.log.steps if manifest.log else ()) for flat in step.flats]
        for tensor in (*manifest.tensors, *flats):
            for chunk in tensor.chunks:
                if chunk.stored:
                    data = manifest.data[chunk.file]
                    assert salts.setdefault(data.salt, data.file) == data.file
                    place = (data.file, chunk.at)  # equal chunks of a file are stored once
                    assert used.setdefault((data.salt, chunk.number), place) == place
    assert len(salts) >= 7
    assert "gradients" in {manifest.kind for manifest in manifests(tmp_path / "log")}
    sealer = FileSealer(KEY)
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: sealer.next_number(), range(5000)))
    assert len(set(numbers)) == 5000


# ----- tampering


def test_each_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    write_encrypted(tmp_path, [1], of=lambda _: {"model.w": torch.arange(3.0)})
    (name,) = checkpoint_names(tmp_path)
    content = (tmp_path / f"{name}.json").read_bytes()
    assert with_checksum(name, content, KEY)[0].facts.step == 1
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            with_checksum(name, bytes(flipped), KEY)
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            with_checksum(name, content[:length], KEY)


def test_each_altered_byte_of_a_data_file_is_detected_and_named(tmp_path: Path) -> None:
    write_encrypted(tmp_path, [1], of=lambda _: SMALL)
    (name,) = checkpoint_names(tmp_path)
    path = next(tmp_path.glob("data-*"))
    content = path.read_bytes()
    assert len(content) == 8 + 48 + 64 + 2 * 16
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=path.name):
            read_checkpoint(tmp_path, name, key=KEY)
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        with pytest.raises(DamagedError, match=path.name):
            read_checkpoint(tmp_path, name, key=KEY)
    path.write_bytes(content)
    read_checkpoint(tmp_path, name, key=KEY)


def numbers_of(step: int) -> dict[str, torch.Tensor]:
    """A state that no packing makes smaller, so that the files of all steps have the same layout."""
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 255, (2 * CHUNK_BYTES,), generator=generator).to(torch.uint8)}


def test_a_swapped_moved_or_rolled_back_piece_is_detected_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_encrypted(run, [1, 2, 3, 4, 5, 6], of=numbers_of)
    name = checkpoint_names(run)[0]
    chain = read_chain(run, name, KEY)
    newest, older = (run / manifest.data[0].file for manifest, _ in (chain[-1], chain[-2]))
    assert newest.stat().st_size == older.stat().st_size
    kept = newest.read_bytes()
    one = 16 + CHUNK_BYTES
    swapped = kept[:8] + kept[8 + one :] + kept[8 : 8 + one]
    for what, content in {"rolled back": older.read_bytes(), "reordered": swapped}.items():
        newest.write_bytes(content)
        with pytest.raises(DamagedError, match=rf"{newest.name} .*altered, moved or replaced"):
            read_checkpoint(run, name, key=KEY)
        assert what
    newest.write_bytes(kept)
    # a manifest under another name, and a parent of another history
    shutil.copy(run / f"{chain[-2][0].name}.json", run / "step-0000000009.a0000.json")
    with pytest.raises(DamagedError, match="step-0000000009.a0000.json: it was altered, or belongs to another"):
        read_checkpoint(run, "step-0000000009.a0000", key=KEY)
    write_encrypted(tmp_path / "other", [1, 2, 3, 4, 5], of=lambda step: numbers_of(step + 50))
    shutil.copy(tmp_path / "other" / f"{chain[-2][0].name}.json", run)
    with pytest.raises(DamagedError, match=f"{chain[-2][0].name}.json is not the one that {name} was made from"):
        read_checkpoint(run, name, key=KEY)


def test_a_damaged_checkpoint_costs_only_itself(tmp_path: Path) -> None:
    write_encrypted(tmp_path, [1, 2, 3, 4])
    (tmp_path / f"{checkpoint_names(tmp_path)[0]}.json").write_bytes(b'{"format":"hpctrain-encrypted","key":"x"}')
    told: list[str] = []
    restored = restore_newest(tmp_path, layout_of(state(0)), told.append, key=KEY)
    assert restored.published.manifest.facts.step == 3
    assert "trying the one before" in told[0]


# ----- keys


def test_a_missing_or_wrong_key_says_what_to_do_and_nothing_is_mixed(tmp_path: Path) -> None:
    write(tmp_path / "plain", [1])
    write_encrypted(tmp_path / "sealed", [1])
    for directory, key, said in (
        ("sealed", None, rf"encrypted with the key {KEY.id}: give it with --checkpoint-key-file FILE or"),
        ("sealed", OTHER, rf"encrypted with the key {KEY.id}, and yours is {OTHER.id}: give the run's own key"),
        (
            "plain",
            KEY,
            "is not encrypted, and you gave the key .* never mixed: give another --out, or leave the key away",
        ),
    ):
        with pytest.raises(CheckpointKeyError, match=said):
            restore_newest(tmp_path / directory, None, print, key=key)
        with pytest.raises(CheckpointKeyError, match=said):
            read_checkpoint(tmp_path / directory, "step-0000000001.a0000", key=key)
    assert restore_newest(tmp_path / "plain", None, print) is not None
    for path in (tmp_path / "plain").glob("*-0000000001*"):  # an attacker's: not sealed, and of a later step
        shutil.copy(path, tmp_path / "sealed" / path.name.replace("0000000001", "0000000009"))
    with pytest.raises(CheckpointKeyError, match=r"step-0000000009.*is not encrypted"):
        restore_newest(tmp_path / "sealed", None, print, key=KEY)


def test_a_run_with_the_wrong_key_does_not_stop_the_attempt_that_writes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path, every=1, key_file=key_file(tmp_path), model=model) as run:
        run.step_done()
    for environ in ({}, {"HPCTRAIN_CHECKPOINT_KEY_COMMAND": f"echo {OTHER.secret.hex()}"}):
        with pytest.raises(CheckpointKeyError, match="encrypted with the key"):
            Checkpointer(tmp_path, every=1, environ=environ, model=model)
    assert [path.name for path in (tmp_path / "checkpoints").glob("attempt.*")] == ["attempt.0000"]
    assert Checkpointer(tmp_path, key_file=key_file(tmp_path), model=torch.nn.Linear(2, 2)).step == 1


def test_a_key_comes_from_a_private_file_a_command_or_the_environment(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    file, text = {"HPCTRAIN_CHECKPOINT_KEY_FILE": str(path)}, base64.b64encode(OTHER.secret).decode()
    command = {"HPCTRAIN_CHECKPOINT_KEY_COMMAND": f"printf %s '{text}'"}
    assert checkpoint_key(None, None, {}) is None
    assert checkpoint_key(path, None, command) == checkpoint_key(None, None, file) == KEY
    assert checkpoint_key(None, None, command) == OTHER, "base64, as KMS commands print it"
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "short").write_text("abcd")
    (tmp_path / "short").chmod(0o600)
    for what, said in (
        (lambda: checkpoint_key(None, None, file | command), "a file or a command"),
        (lambda: checkpoint_key(tmp_path / "no", None, {}), "head -c 32 /dev/urandom"),
        (lambda: checkpoint_key(tmp_path / "link", None, {}), "cannot read the key"),
        (lambda: checkpoint_key(tmp_path, None, {}), "is not a file"),
        (lambda: checkpoint_key(tmp_path / "short", None, {}), "4 characters, not 32 bytes.*head -c 32 /dev/urandom"),
        (lambda: checkpoint_key(None, "false", {}), "ended with status 1"),
        (lambda: checkpoint_key(None, "/no/such", {}), "No such file"),
        (lambda: checkpoint_key(None, "echo 'a", {}), "No closing quotation"),
    ):
        with pytest.raises(CheckpointKeyError, match=said):
            what()
    path.chmod(0o640)
    with pytest.raises(CheckpointKeyError, match=f"mode 0640.*chmod 600 {path}"):
        checkpoint_key(path, None, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(key_file(tmp_path), 12345, -1)
    with pytest.raises(CheckpointKeyError, match="belongs to uid 12345, not to you"):
        checkpoint_key(tmp_path / "run.key", None, {})


# ----- every reader and writer


@pytest.mark.parametrize("kind", ["ours", "adamw"])  # taken again in memory, and by the optimizer
def test_logged_steps_are_replayed(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, kind, key=KEY)
    assert kinds(world.run(4)) == ["base", "gradients", "gradients", "gradients"]
    again = World(tmp_path, kind, key=KEY)
    assert again.restore() is not None
    assert_alike(world, again)
    (manifest, *_) = manifests(tmp_path)
    path = tmp_path / manifest.data[0].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert again.restore().published.manifest.facts.step == 3
    assert path.name in again.warnings[0]


def test_a_state_that_the_share_did_not_take_is_encrypted_on_the_node_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FALLBACK_DIR", str(tmp_path / "local"))
    share = tmp_path / "share"
    mine = claim(share, NO_JOB, now_s=0.0)
    task = WriterSetup(
        claim=mine, parent=None, base_every=9, policy=RetentionPolicy(keep=2), distrusted=(), key=KEY, chunk_bytes=4096
    )
    assert KEY.secret.hex() not in repr(task)
    keeper = CheckpointKeeper(task, None, 60.0)
    snapshot = TensorSnapshot(layout_of(SMALL))
    snapshot.fill(SMALL)
    with monkeypatch.context() as full:
        failing(share, errno.ENOSPC, full)
        report, _ = keeper.make(WriteOrder(snapshot=snapshot, taken=None, facts=facts(2, 0)))
        assert isinstance(report, CheckpointReport)
        assert "kept on" in str(report.error)
    (record,) = (tmp_path / "local").rglob("part-*.json")
    assert places_of(CANARY, tmp_path) == places_of(b"model", tmp_path) == []
    for key in (None, OTHER):
        with pytest.raises(CheckpointKeyError, match=str(record)):
            local_fallback.bring_host_parts(share, key)
    keeper.retry()
    restored = restore_newest(share, None, print, key=KEY)
    assert torch.equal(restored.published.snapshot.named()["model.canary"], SMALL["model.canary"])
    assert places_of(CANARY, tmp_path) == []


def test_the_weights_of_the_best_validation_are_a_checkpoint_of_their_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    for step in (4, 8):
        with torch.no_grad():
            model.bias.fill_(step)
        publish_weights(tmp_path / "best", model, RunIdentity(attempt=2, generation=0, job="7"), step, KEY)
    assert [manifest.facts.step for manifest in manifests(tmp_path / "best")] == [8], "the one before is removed"
    assert len(list((tmp_path / "best").glob("data-*"))) == 1
    assert main(["export", "--key-file", str(key_file(tmp_path)), str(tmp_path / "best"), str(tmp_path / "b.pt")]) == 0
    assert torch.load(tmp_path / "b.pt", weights_only=True)["bias"].tolist() == [8.0] * 3


def test_the_tool_lists_verifies_prunes_and_exports_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write_encrypted(run, [1, 2, 3, 4, 5])
    for words in (["list"], ["verify"], ["prune"], ["export", str(tmp_path / "out.pt")]):
        assert main([words[0], str(run), *words[1:]]) == 1
        told = capsys.readouterr()
        assert f"encrypted with the key {KEY.id}: give it with" in told.err
        assert "key-file=FILE of hctl" in told.err
    monkeypatch.setenv("HPCTRAIN_CHECKPOINT_KEY_FILE", str(key_file(tmp_path)))
    assert main(["list", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 5
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole (") == 5
    assert main(["prune", "--keep", "1", str(run)]) == 0
    assert len(checkpoint_names(run)) == 2
    assert main(["export", str(run), str(tmp_path / "out.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], state(5)["model.w"])
    next(run.glob("data-step-0000000005*")).write_bytes(b"")
    assert main(["verify", str(run)]) == 1


def test_an_opened_chunk_of_another_number_or_file_is_refused() -> None:
    sealer = FileSealer(KEY)
    stored = sealer.seal(3, CANARY)
    assert opened_chunk(KEY, sealer.salt, 3, stored) == CANARY
    for key, salt, number in ((KEY, sealer.salt, 4), (KEY, FileSealer(KEY).salt, 3), (OTHER, sealer.salt, 3)):
        with pytest.raises(DamagedError, match="altered, moved or replaced"):
            opened_chunk(key, salt, number, stored)


@needs_mpi
def test_f1_a_killed_run_resumes_encrypted_and_leaves_no_weight_readable(tmp_path: Path) -> None:
    script = str(HERE / "tiny.py")
    words = [script, "--steps", "8", "--checkpoint-every", "2", "--patient", "--canary", CANARY.hex()]
    extra = {"PYTHONPATH": str(HERE.parent)}
    plain = run_mpi(2, *words, "--out", tmp_path / "plain", extra=extra)
    assert plain.status == 0, plain.output
    assert places_of(CANARY, tmp_path / "plain"), "in model.pt and in the checkpoints"
    words += ["--out", str(tmp_path / "run"), "--checkpoint-key-file", str(key_file(tmp_path))]
    killed = run_mpi(2, *words, "--die", "1:5", extra=extra)
    assert killed.status != 0
    assert checkpoint_names(tmp_path / "run" / "checkpoints")
    ended = run_mpi(2, *words, extra=extra)
    assert ended.status == 0, ended.output
    assert "attempt 1" in ended.output
    assert ended.output.split("weights sha256")[1].split()[0] == plain.output.split("weights sha256")[1].split()[0]
    assert "weights: encrypted, in the last checkpoint; python3 -m hpctrain.checkpoint export" in ended.output
    assert places_of(CANARY, tmp_path / "run") == []
    assert not (tmp_path / "run" / "model.pt").exists()
    check_key(tmp_path / "run" / "checkpoints", KEY)


def test_a_script_that_did_not_read_first_does_not_mix_either(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", [1])
    trees = Trees(tmp_path, key_file=key_file(tmp_path))
    with pytest.raises(CheckpointKeyError, match="is not encrypted"):
        trees.begin(2, {"w": torch.zeros(3)})
    assert [path.name for path in (tmp_path / "checkpoints").glob("attempt.*")] == ["attempt.0000"]
