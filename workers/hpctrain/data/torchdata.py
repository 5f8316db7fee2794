"""A Dataset or DataLoader of torch.utils.data as a source of samples.

    run.steps(model, optimizer, data=DataLoader(train_set, batch_size=64, shuffle=True, num_workers=4))

Used of a DataLoader: the dataset, the order (shuffled or not), batch_size (summed over all ranks), drop_last, collate_fn,
num_workers, multiprocessing_context and worker_init_fn.  Does not know ranks.
Rules:
- A sample depends only on (seed, global index): Python's, NumPy's and torch's CPU generators are seeded with them before
  `dataset[i]` is called.  So augmentation is the same with any number of ranks and workers, and after a restart.
- The order is that of `hpctrain.data.sources`, not of torch's generators: each sample once per epoch.
- Workers die with the process that started them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Sized
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hpctrain.data.sources import Source, mix, order_of
from hpctrain.errors import TrainError
from hpctrain.optim.schedule import EpochEnd

SAMPLE_KEY = 0x5A3B1E  # separates the seeds of samples from those of the order
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TorchSource:
    """Samples of a map-style dataset by global index.

    `batch` is the DataLoader's batch size, or None.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        shuffle: bool,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
        batch: int | None = None,
        epoch_end: EpochEnd = EpochEnd.SHORT,
        workers: int = 0,
        context: Any = None,
        worker_init: Callable[[int], object] | None = None,
    ) -> None:
        if not isinstance(dataset, Sized) or not len(dataset):
            raise TrainError(f"cannot take samples of this {type(dataset).__name__}: it has no length, or none in it")
        self._dataset: Any = dataset
        self._seed, self._shuffle, self._collate = seed, shuffle, collate
        self.batch, self.epoch_end, self.workers = batch, epoch_end, workers
        self._context, self._worker_init = context, worker_init
        self._pool: ProcessPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indexes: slice) -> Any:
        if not self.workers:
            return self._load_here(indexes.start, indexes.stop)
        self.begin()
        assert self._pool is not None
        try:
            return self._pool.submit(_load_in_worker, indexes.start, indexes.stop).result()
        except BrokenProcessPool as error:
            raise TrainError(
                f"cannot load samples {indexes.start} to {indexes.stop}: a data worker died; if memory is short, use fewer "
                "--workers"
            ) from error

    def begin(self) -> None:
        """Start the workers; call it in a thread that outlives them."""
        if self._pool is not None or not self.workers:
            return
        context = self._context
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context or "fork")
        facts = (self._load, self._worker_init, context.Value("i", 0), os.getpid())
        self._pool = ProcessPoolExecutor(self.workers, context, _begin_worker, facts)
        self._pool.submit(int).result()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _load_here(self, low: int, high: int) -> Any:
        """Load in this process, and restore its random generators."""
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            return self._load(low, high)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])

    def _load(self, low: int, high: int) -> Any:
        indexes = np.arange(low, high, dtype=np.int64)
        count = len(self._dataset)
        places = order_of(low, high, count, self._seed) if self._shuffle else indexes % count
        samples = []
        for place, number in zip(places.tolist(), mix(indexes, self._seed ^ SAMPLE_KEY).tolist(), strict=True):
            random.seed(number)
            np.random.seed(number % 2**32)
            torch.default_generator.manual_seed(number % 2**63)
            samples.append(self._dataset[place])
        return self._collate(samples)


def source_for(data: Any, seed: int, workers: int | None) -> Any:
    """Return a source for `data`.

    A torch Dataset or DataLoader is adapted, another object returned as it is.

    `workers`: None if the DataLoader decides.

    Raises:
        TrainError: the samples have no global index; tells what to do.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, seed, workers)
    if isinstance(data, IterableDataset):
        raise _refused_iterable()
    if isinstance(data, (Dataset, list)) or hasattr(data, "__getitems__"):
        return TorchSource(data, seed, shuffle=True, workers=workers or 0)
    return data


def in_order(data: Any, workers: int | None) -> Any:
    """Return a source for validation.

    Each sample once, a torch Dataset or DataLoader unshuffled.
    """
    source: Source = source_for(data, 0, workers)
    if isinstance(source, TorchSource):
        source._shuffle = False
    if not isinstance(source, Sized):
        raise TrainError(f"cannot validate with a {type(data).__name__}: it has no length")
    return source


def _of_loader(loader: DataLoader[Any], seed: int, workers: int | None) -> TorchSource:
    if isinstance(loader.dataset, IterableDataset):
        raise _refused_iterable()
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise TrainError(
            "cannot take this DataLoader: it has its own batch_sampler or no batch_size, and run.steps makes the batches of "
            "all ranks; give it batch_size=NUMBER, or give run.steps the dataset and use --batch"
        )
    return TorchSource(
        loader.dataset,
        seed,
        shuffle=_is_shuffled(loader),
        collate=loader.collate_fn,
        batch=loader.batch_size,
        epoch_end=EpochEnd.DROP if loader.drop_last else EpochEnd.SHORT,
        workers=loader.num_workers if workers is None else workers,
        context=loader.multiprocessing_context,
        worker_init=loader.worker_init_fn,
    )


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    dataset: Any = loader.dataset
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        return True
    what = "remove it and use shuffle=True: run.steps gives each rank its part of each batch"
    if not isinstance(sampler, DistributedSampler):
        what = (
            "samples have to come in order or once an epoch in random order (shuffle=True). For some of them use "
            "torch.utils.data.Subset; for another order give run.steps an object whose data[low:high] returns the samples "
            "with these global indexes"
        )
    raise TrainError(f"cannot take a DataLoader with a {type(sampler).__name__}: {what}")


def _refused_iterable() -> TrainError:
    return TrainError(
        "cannot take an IterableDataset: its samples have no index, so ranks could not share them out, nor resume where they "
        "stopped; give a map-style dataset (with __len__ and __getitem__), or an object whose data[low:high] returns the "
        "samples with these global indexes (for texts: python -m hpctrain.data text)"
    )


_load: Callable[[int, int], Any]  # in a worker process


def _load_in_worker(low: int, high: int) -> Any:
    return _load(low, high)


def _begin_worker(
    load: Callable[[int, int], Any], init: Callable[[int], object] | None, started: Any, parent: int
) -> None:
    global _load  # noqa: PLW0603
    _load = load
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before PR_SET_PDEATHSIG was set
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank decides when to stop
    torch.set_num_threads(1)
    with started.get_lock():
        mine, started.value = started.value, started.value + 1
    if init is not None:
        init(mine)
