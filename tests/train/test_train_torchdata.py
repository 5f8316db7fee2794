"""torch's Dataset and DataLoader as they are: which samples come when, and that nothing depends on ranks or workers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ranks import HERE, Ended, finish, needs_mpi, python, run_mpi, started
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from waiting import wait_until

from hpctrain.data.prefetch import Prefetcher
from hpctrain.data.torchdata import TorchSource, in_order, source_for
from hpctrain.errors import TrainError
from hpctrain.optim.schedule import EpochEnd

CPU = torch.device("cpu")
NUMBERS = TensorDataset(torch.arange(10.0))
SCRIPT = HERE / "augmented.py"


class Noise(Dataset):
    """Samples that are random numbers alone."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> tuple[float, float, torch.Tensor]:
        return random.random(), np.random.rand(), torch.rand(())


class Pair(NamedTuple):
    """What a collate_fn may make."""

    numbers: torch.Tensor
    names: list[str]


def values(source: TorchSource, low: int, high: int) -> list[float]:
    return source[low:high][0].tolist()


def test_a_dataset_is_shuffled_and_a_loader_only_if_it_shuffles() -> None:
    shuffled = source_for(NUMBERS, 1, None)
    assert len(shuffled) == 10
    first, second = values(shuffled, 0, 10), values(shuffled, 10, 20)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10))
    assert values(source_for(DataLoader(NUMBERS, 4, shuffle=True), 1, None), 0, 10) == first
    plain = source_for(DataLoader(NUMBERS, 4), 1, None)
    assert values(plain, 8, 12) == [8, 9, 0, 1]
    assert (plain.batch, plain.epoch_end, plain.workers) == (4, EpochEnd.SHORT, 0)
    assert source_for(DataLoader(NUMBERS, 4, drop_last=True, num_workers=2), 1, None).epoch_end is EpochEnd.DROP
    assert source_for(DataLoader(NUMBERS, 4, num_workers=2), 1, None).workers == 2
    assert source_for(DataLoader(NUMBERS, 4, num_workers=2), 1, 3).workers == 3
    assert values(in_order(NUMBERS, None), 0, 10) == list(range(10))
    assert values(source_for(Subset(NUMBERS, [3, 5]), 1, None), 0, 2) in ([3, 5], [5, 3])


def test_data_without_an_order_of_samples_is_refused_with_a_remedy() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    weighted = WeightedRandomSampler([1.0] * 10, 10)
    for data, why in (
        (Stream(), "cannot take an IterableDataset: .*give a map-style dataset"),
        (DataLoader(Stream()), "cannot take an IterableDataset"),
        (DataLoader(NUMBERS, sampler=weighted), "with a WeightedRandomSampler: .*data.low:high. returns"),
        (
            DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)),
            "with a RandomSampler: samples have to",
        ),
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)), "with a DistributedSampler: remove it"),
        (DataLoader(NUMBERS, batch_size=None), "its own batch_sampler or no batch_size"),
        (TensorDataset(torch.zeros(0)), "it has no length, or none in it"),
    ):
        with pytest.raises(TrainError, match=why):
            source_for(data, 1, None)


def test_random_numbers_of_a_sample_are_its_own_and_leave_the_generators_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    source = source_for(Noise(), 7, None)
    whole = [part.tolist() for part in source[0:20]]
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
    pieces = [[part.tolist() for part in source[low : low + 4]] for low in range(0, 20, 4)]
    assert whole == [[x for piece in pieces for x in piece[kind]] for kind in range(3)]
    assert len({*whole[0]}) == 20  # and others in the next epoch
    assert [part.tolist() for part in source_for(Noise(), 8, None)[0:20]] != whole


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_the_same_samples_in_any_number(workers: int) -> None:
    spans = [(low, low + 3) for low in range(0, 18, 3)]
    alone = source_for(Noise(), 7, 0)
    source = source_for(Noise(), 7, workers)
    feed = Prefetcher(source, CPU, 2)
    assert feed.ahead == 2 * workers
    feed.expect(spans)
    try:
        for low, high in spans:
            assert all(map(torch.equal, feed.take(low, high), alone[low:high]))
    finally:
        feed.close()
        source.close()


def test_a_loaders_own_functions_are_used() -> None:
    def collate(samples: list[tuple[torch.Tensor]]) -> Pair:
        return Pair(torch.stack([sample[0] for sample in samples]), [f"{sample[0]:g}" for sample in samples])

    loader = DataLoader(NUMBERS, 2, collate_fn=collate)
    feed = Prefetcher(source_for(loader, 1, None), CPU, 2)
    taken = feed.take(2, 4)
    assert isinstance(taken, Pair)
    assert (taken.numbers.tolist(), taken.names) == ([2.0, 3.0], ["2", "3"])


def test_an_error_in_a_worker_is_the_scripts_and_a_worker_that_dies_is_named() -> None:
    class Broken(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> int:
            if place == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"no sample {place}")

    source = source_for(DataLoader(Broken(), 1, num_workers=1), 1, None)
    try:
        with pytest.raises(KeyError, match="no sample 1"):
            source[1:2]
        with pytest.raises(TrainError, match="cannot load samples 3 to 4: a data worker died"):
            source[3:4]
    finally:
        source.close()


def test_workers_die_with_their_rank(tmp_path: Path) -> None:
    program = tmp_path / "holds.py"
    program.write_text(
        "import os, torch, time\n"
        "from torch.utils.data import TensorDataset\n"
        "from hpctrain.data.torchdata import source_for\n"
        "source = source_for(TensorDataset(torch.arange(4.0)), 1, 2)\n"
        "source[0:2]\n"
        "print(*source._pool._processes, flush=True)\n"
        "time.sleep(100)\n"
    )
    with started([*python(), program]) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), what="the end of the workers")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def taken(output: str) -> dict[int, dict[int, float]]:
    """By step: each sample's place and its (random) number, of all ranks."""
    found: dict[int, dict[int, float]] = {}
    for step, places, numbers in re.findall(r"took (\d+) (\[[^]]*\]) (\[[^]]*\])", output):
        found.setdefault(int(step), {}).update(zip(json.loads(places), json.loads(numbers), strict=True))
    return found


def run_plain(*words: str | Path) -> Ended:
    with started([*python(), SCRIPT, *words]) as process:
        return finish(process)


@needs_mpi
def test_each_sample_comes_once_per_epoch_on_any_ranks_and_workers(tmp_path: Path) -> None:
    alone = run_plain("--out", tmp_path / "one")
    assert alone.status == 0, alone.output
    assert "batch 6, 12 steps = 3 epochs" in alone.output
    steps = taken(alone.output)
    assert [len(steps[step]) for step in range(1, 13)] == [6, 6, 6, 2] * 3
    for epoch in range(3):
        assert sorted(place for step in range(4) for place in steps[4 * epoch + step + 1]) == list(range(20))
    both = run_mpi(2, SCRIPT, "--out", tmp_path / "two", "--workers", "2")
    assert both.status == 0, both.output
    assert taken(both.output) == steps
    half = run_mpi(2, SCRIPT, "--out", tmp_path / "half", "--steps", "5")
    assert half.status == 0, half.output
    rest = run_plain("--out", tmp_path / "half", "--epochs", "3")
    assert "resumed from step 5" in rest.output
    assert taken(half.output) | taken(rest.output) == steps
