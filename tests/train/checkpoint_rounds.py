"""Rounds of faults on the share: `python -m tests.train.checkpoint_rounds --rounds 1000 --seed 1`.

In each round an attempt writes a checkpoint of every step to a share whose requests fail by chance. At a random request it is
killed, or its machine loses power, or it is stopped while the next attempt takes over, and wakes up then: a zombie. Then a client
with fresh caches and no faults looks: every published checkpoint is whole, the newest is what it says, nothing that was
reported as published is gone, and at most one step is lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

import numpy as np  # noqa: E402
from losing_disk import why_not  # noqa: E402
from share_disk import ShareDisk  # noqa: E402

from hpctrain.checkpoint.manifest import CheckpointFacts, LoggedStep, Taken, checkpoint_names  # noqa: E402
from hpctrain.checkpoint.restore import Gradients, Replay, read_checkpoint, restore_newest  # noqa: E402
from hpctrain.checkpoint.writing import local_fallback  # noqa: E402
from hpctrain.checkpoint.writing.buffers import Buffer, lay_out  # noqa: E402
from hpctrain.checkpoint.writing.files import Claim, claim  # noqa: E402
from hpctrain.checkpoint.writing.maker import WriteOrder, WriterSetup  # noqa: E402
from hpctrain.checkpoint.writing.process import CheckpointKeeper  # noqa: E402
from hpctrain.checkpoint.writing.publish import Published, RetentionPolicy  # noqa: E402
from hpctrain.env import JobFacts  # noqa: E402
from hpctrain.errors import NoCheckpointError, PublishError, StaleAttemptError  # noqa: E402

NO_JOB = JobFacts(job=None, attempt=None, restarts=0)
NUMBERS = 6000
CHUNK_BYTES = 4096
LAYOUT = lay_out([(f"{name}.w", "float32", (NUMBERS,)) for name in ("model", "optim")])
FLAT = lay_out([("0", "float32", (NUMBERS,))])
ENDS = ("kill", "power", "zombie")


def gradient(step: int) -> np.ndarray:
    """The gradient of a step, the same in every attempt."""
    return (np.random.default_rng(step).standard_normal(NUMBERS) * 1e-3).astype(np.float32)


def moved(state: np.ndarray, grad: np.ndarray) -> None:
    """A step of an optimizer with one moment; (2, NUMBERS)."""
    state[1] = np.float32(0.9) * state[1] + grad
    state[0] -= state[1]


def state_after(step: int) -> np.ndarray:
    """What the state is after so many steps: (2, NUMBERS)."""
    state = np.zeros((2, NUMBERS), np.float32)
    for number in range(1, step + 1):
        moved(state, gradient(number))
    return state


def content_of(published: Published, directory: Path) -> np.ndarray:
    """The state that a checkpoint holds, logged steps taken again."""
    assert published.snapshot is not None
    parts = [np.frombuffer(published.snapshot.content(slot), np.float32).copy() for slot in published.snapshot.layout]
    state = np.stack(parts)
    for flats in Gradients(directory, published.logs):
        moved(state, flats[0].numpy())
    return state


def newest_state(directory: Path, told: Callable[[str], None]) -> tuple[int, np.ndarray] | None:
    """The newest checkpoint's step and state."""
    replayed: list[np.ndarray] = []
    take = Replay(take=lambda where, found: replayed.append(content_of(found, where)))
    restored = restore_newest(directory, None, told, take)
    if restored is None:
        return None
    found = restored.published
    return found.manifest.facts.step, replayed[-1] if replayed else content_of(found, directory)


def publish_kept(directory: Path, mine: Claim) -> None:
    """Publish what this node has kept; errors of the share are raised."""
    local_fallback.bring_parts(local_fallback.local_directory(directory), directory)
    local_fallback.join_parts(mine)


def attempt(directory: Path, steps: int, told: Callable[[str], None]) -> None:
    """One life of a run: claim, restore, take steps with a checkpoint of each."""
    mine = _patiently(lambda: claim(directory, NO_JOB, time.time()))
    _patiently(lambda: publish_kept(directory, mine))
    step, state = _patiently(lambda: newest_state(directory, told)) or (0, np.zeros((2, NUMBERS), np.float32))
    told(f"from {step}")
    task = WriterSetup(
        claim=mine, parent=None, base_every=6, policy=RetentionPolicy(keep=2), distrusted=(), chunk_bytes=CHUNK_BYTES
    )
    keeper, last, log = CheckpointKeeper(task, None, 60.0), -1, False
    for number in range(step + 1, step + steps + 1):
        grad = gradient(number)
        moved(state, grad)
        flat, loose = Buffer(FLAT), Buffer(())
        flat.content(FLAT[0])[:] = grad.tobytes()
        taken = Taken(
            since=number - 1,
            steps=(LoggedStep(number=number, lr=0.1, factor=1.0, flats=flat),),
            order=(("w",),),
            tied={},
            loose=loose,
            device={},
            optimizer={},
            probe=b"",
        )
        snapshot = None if log and last == number - 1 else Buffer(LAYOUT)
        if snapshot is not None:
            for slot, part in zip(LAYOUT, state, strict=True):
                snapshot.content(slot)[:] = part.tobytes()
        facts = CheckpointFacts(
            step=number, attempt=mine.attempt, generation=0, world=1, job=None, written_at_s=time.time(), state={}
        )
        told(f"begun {number}")
        report, standing = keeper.make(WriteOrder(snapshot=snapshot, taken=taken, facts=facts))
        if isinstance(report, StaleAttemptError):
            told("stale")
            return
        word = "done" if report.error is None else "kept" if "kept on" in report.error else "failed"
        told(f"{word} {number} {report.kind} {report.error or ''}")
        last, log = standing.last_step, standing.takes_log
        keeper.retry()
        keeper.tidy()
    told("end")


def _patiently(call: Callable[[], object]):  # noqa: ANN202
    """A start that the share does not let succeed is tried again, as a requeued job does."""
    for _ in range(200):
        try:
            return call()
        except (OSError, PublishError, NoCheckpointError) as error:
            last = error
    raise AssertionError("the share has failed 200 times in a row") from last


def begin(directory: Path, steps: int, note: Path) -> int:
    """Start an attempt in a process of its own, and return its pid; what it tells is in `note`."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with note.open("a", buffering=1) as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            attempt(directory, steps, lambda text: print(text, file=stream))
        status = 0
    except StaleAttemptError:
        status = 0
    except BaseException:
        with note.open("a") as stream:
            traceback.print_exc(file=stream)
    finally:
        os._exit(status)


def one_round(disk: ShareDisk, top: Path, number: int, rng: random.Random) -> str:
    """Run one round, and return how the attempt ended.

    Raises:
        AssertionError: a promise was broken.
    """
    name = f"run-{number}"
    local_fallback.local_directory = lambda directory: top / "local" / name  # both clients' node is the same here
    first, second, fresh = (path / name for path in disk.paths)
    fresh.mkdir()
    disk.crash(0), disk.crash(1)
    end, notes = rng.choice(ENDS), [top / f"{name}.first", top / f"{name}.second"]
    rate = rng.choice((0.0, 0.01, 0.03, 0.1))
    disk.faults(0, rate, rng.getrandbits(32)), disk.faults(1, rate, rng.getrandbits(32))
    pid = begin(first, 8, notes[0])
    disk.strike(0, pid, rng.randint(1, 160), signal.SIGSTOP if end == "zombie" else signal.SIGKILL)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if end == "power":
        disk.crash(0)
    stopped = os.WIFSTOPPED(status)
    before = notes[0].read_text() if notes[0].exists() else ""
    again = begin(second, 4, notes[1])
    if stopped:
        if rng.random() < 0.5:  # the zombie wakes up while the other one writes, else after it
            os.kill(pid, signal.SIGCONT)
        _wait(again, notes[1])
        os.kill(pid, signal.SIGCONT)
        _wait(pid, notes[0])
    else:
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, notes[0].read_text()
        _wait(again, notes[1])
    disk.faults(0, 0.0, 0), disk.faults(1, 0.0, 0), disk.crash(2)
    check(fresh, before, [note.read_text() if note.exists() else "" for note in notes])
    return end if stopped or os.WIFSIGNALED(status) else "untouched"


def _wait(pid: int, note: Path) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), status
    assert os.WEXITSTATUS(status) == 0, note.read_text()


def check(directory: Path, before: str, told: list[str]) -> None:
    """Hold what was promised against what is there; `before`: what the first attempt told until the second one began."""
    names = checkpoint_names(directory)
    for name in names:  # raises DamagedError
        read_checkpoint(directory, name)
    done = [int(line.split()[1]) for text in told for line in text.splitlines() if line.startswith("done ")]
    newest = int(names[0][5:15]) if names else 0
    assert newest >= max(done, default=0), f"step {max(done)} was published, and {newest} is the newest"
    # Of the first attempt the second one has all but the step that was being written; what it has begun is kept somewhere.
    begun = [int(line.split()[1]) for line in before.splitlines() if line.startswith("begun ")]
    failed = [line for line in before.splitlines() if line.startswith("failed ")]
    start = [int(line.split()[1]) for line in told[1].splitlines() if line.startswith("from ")]
    if start and not failed:
        assert start[0] >= max(begun, default=0) - 1, f"from step {start[0]} on, and {max(begun)} had begun"
    mine = Claim(directory=directory, attempt=10**6)
    publish_kept(directory, mine)
    warnings: list[str] = []
    found = newest_state(directory, warnings.append)
    assert not warnings
    if found is None:
        assert not done
        return
    step, state = found
    assert np.array_equal(state.view(np.uint32), state_after(step).view(np.uint32)), f"another state at step {step}"


def rounds(top: Path, count: int, seed: int, patience_s: float = 1e9) -> tuple[Counter[str], dict[str, int]]:
    """Run so many rounds, or as many as there is time for; return how attempts ended, and which faults there were."""
    ends: Counter[str] = Counter()
    until_s = time.monotonic() + patience_s
    with ShareDisk(top / "mounts", 3) as disk:
        for number in range(count):
            if time.monotonic() > until_s:
                break
            try:
                ends[one_round(disk, top, number, random.Random(f"{seed}/{number}"))] += 1
            except Exception as error:
                notes = "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(top.glob(f"run-{number}.*")))
                raise AssertionError(f"round {number} of seed {seed}: {error}\n{notes}") from error
        return ends, disk.injected()


def main() -> int:
    """Run the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if why := why_not():
        print(f"cannot mount the share: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as top:
        ends, faults = rounds(Path(top), options.rounds, options.seed)
    print(f"{sum(ends.values())} rounds, all promises kept: {dict(ends)}; faults: {faults}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
