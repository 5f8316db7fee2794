"""Ranks that sum: our ring against a reference, gradients against one process, errors that take all ranks down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ranks import HERE, finish, needs_mpi, run_mpi, run_plain, started

from hpctrain.comm import choose
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.hosts import best_ring
from hpctrain.env import LauncherKind, RankInfo, job_facts, rank_info, require
from hpctrain.errors import MissingPackageError, TrainError
from hpctrain.exchange.sync import decide, make_sync


@needs_mpi
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_ring_sums_any_length_and_type_to_the_same_bits_on_all_ranks(count: int) -> None:
    ended = run_mpi(count, HERE / "check_ring.py")
    assert ended.status == 0, ended.output
    assert f"checked on {count}" in ended.output


@needs_mpi
@pytest.mark.parametrize(
    ("count", "hosts", "algorithms"),
    [
        (2, 1, "shared_memory mpi shared"),
        (3, 1, "shared_memory mpi shared"),
        (3, 2, "two levels mpi"),
        (4, 2, "two levels mpi"),
        (4, 4, "tcp_ring ring gather mpi"),
    ],
)
def test_every_way_to_sum_gives_the_same_bits_on_all_ranks(count: int, hosts: int, algorithms: str) -> None:
    ended = run_mpi(count, HERE / "check_algorithms.py", str(hosts))
    assert ended.status == 0, ended.output
    assert f"checked {algorithms} on {count}" in ended.output


@needs_mpi
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_compressed_gradients_are_near_and_residuals_are_sent_later(backend: str) -> None:
    ended = run_mpi(3, HERE / "check_compress.py", backend)
    assert ended.status == 0, ended.output
    assert f"compressed over {backend}" in ended.output


def test_auto_sends_fewer_bits_only_if_that_pays_and_gives_the_reason() -> None:
    assert decide(0.1, 0.005) == (
        "exact",
        "a step computes 100 ms and waits 5 ms for the exchange, too little to send fewer bits",
    )
    assert decide(0.1, 0.015)[0] == "bf16"
    assert decide(0.1, 0.1)[0] == "int8"
    assert decide(0.1, 1.0)[1].endswith("local steps would help more: --sync local:50:int8")


@pytest.mark.parametrize(
    ("name", "size", "is_told"),
    [
        ("int8", 2, True),
        ("bf16", 2, True),
        ("int8", 1, False),
        ("exact", 2, False),
        ("auto", 2, False),
        ("local:5", 2, False),
    ],
)
def test_lossy_sync_without_a_benefit_is_reported(name: str, size: int, is_told: bool) -> None:
    one_host = SingleCommunicator()
    one_host.size = size
    sync = make_sync(name, [torch.nn.Parameter(torch.zeros(3))], one_host, overlap=None)
    assert sync.advice() == (
        f"sync {name}: loses bits and saves no time among ranks of one host; omit --sync there" if is_told else ""
    )


def test_an_unknown_sync_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TrainError, match=r"cannot sync by 'carrier-pigeon': use exact, bf16.*local:H.* or auto"):
        make_sync("carrier-pigeon", [torch.nn.Parameter(torch.zeros(3))], SingleCommunicator(), overlap=False)


@pytest.mark.parametrize(
    "name",
    [
        "_",
        "bits",
        "topk:2",
        "topk:x",
        "powersgd:0",
        "bf16:3",
        "local",
        "local:0",
        "local:5:nine",
        "local:2:powersgd",
    ],
)
def test_a_way_to_sync_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(TrainError, match="cannot (sync|compress)"):
        make_sync(name, [torch.nn.Parameter(torch.zeros(3))], SingleCommunicator(), overlap=False)


@needs_mpi
def test_a_resumed_run_sums_in_the_same_order(tmp_path: Path) -> None:
    script = tmp_path / "follow.py"
    script.write_text(
        "import os\n"
        "from hpctrain.comm import connect\n"
        "comm = connect('mpi', os.environ)\n"
        "plan = comm.plan()\n"
        "assert plan['where'] == [2, 1] and plan['algorithms'][-1][0] is None, plan\n"
        "comm.follow(plan | {'where': [4, 2], 'algorithms': [[None, 'mpi']]})\n"
        "comm.follow(plan | {'algorithms': [[None, 'carrier pigeon']]})\n"
        "assert comm.plan() == plan\n"
        "comm.follow({'where': [2, 1], 'algorithms': [[64, 'shared_memory'], [None, 'mpi']]})\n"
        "assert comm.plan() == {'where': [2, 1], 'algorithms': [[64, 'shared_memory'], [None, 'mpi']]}, comm.plan()\n"
        "comm.barrier()\n"
        "comm.close()\n"
    )
    ended = run_mpi(2, script)
    assert ended.status == 0, ended.output


def test_hosts_stand_in_the_ring_so_that_its_slowest_link_is_fast() -> None:
    rooms = [[0.0, 1.0, 9.0, 9.0], [1.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, 1.0], [9.0, 9.0, 1.0, 0.0]]
    assert best_ring(rooms) == [0, 2, 1, 3]
    alike = [[9.0 + (a + b) % 3 for b in range(4)] for a in range(4)]
    assert best_ring(alike) == [0, 1, 2, 3]


@needs_mpi
def test_gradients_over_mpi_equal_those_of_one_process() -> None:
    ended = run_mpi(2, HERE / "check_gradients.py", "mpi")
    assert ended.status == 0, ended.output
    assert "gradients equal over mpi" in ended.output


def test_gradients_over_gloo_equal_those_of_one_process() -> None:
    ended = run_plain(2, HERE / "check_gradients.py", "auto")
    assert [one.status for one in ended] == [0, 0], ended
    assert "gradients equal over gloo" in ended[0].output


@needs_mpi
def test_gloo_meets_under_mpirun_without_an_address() -> None:
    ended = run_mpi(2, HERE / "check_gradients.py", "gloo")
    assert ended.status == 0, ended.output
    assert "gradients equal over gloo" in ended.output


@needs_mpi
def test_gloo_meets_under_mpirun_despite_equal_host_names_and_dead_addresses() -> None:
    ended = run_mpi(2, HERE / "check_gloo_hosts.py", "gloo")
    assert ended.status == 0, ended.output
    assert "gradients equal over gloo" in ended.output


def test_gloo_offers_the_address_at_which_hosts_reach_each_other_not_that_of_a_name() -> None:
    ended = run_plain(2, HERE / "check_gloo_hosts.py", "gloo")
    assert [one.status for one in ended] == [0, 0], ended


@needs_mpi
def test_a_rank_that_raises_ends_all_ranks_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import os\n"
        "from hpctrain.comm import connect\n"
        "from hpctrain.run import all_or_none\n"
        "comm = connect('mpi', os.environ)\n"
        "with all_or_none(comm):\n"
        "    if comm.rank == 1:\n"
        "        raise ValueError('the disk is on fire')\n"
        "    comm.barrier()\n"  # would wait for ever
    )
    ended = run_mpi(2, script)
    assert ended.status != 0
    assert "rank 1 of 2" in ended.output
    assert "the disk is on fire" in ended.output


def mpi_place(world: int) -> RankInfo:
    return RankInfo(launcher=LauncherKind.MPI, rank=0, world=world, local_rank=0)


def test_mpi_is_closer_than_an_outer_rank() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "RANK": "5", "WORLD_SIZE": "8"}
    assert rank_info(environ) == RankInfo(launcher=LauncherKind.MPI, rank=1, world=2, local_rank=1)
    open_mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert rank_info(open_mpi).world == 4


def test_rank_and_world_size_alone_are_enough() -> None:
    here = rank_info({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (here.launcher, here.rank, here.world) == (LauncherKind.TORCH, 1, 2)
    assert rank_info({}) == RankInfo(launcher=LauncherKind.NOBODY, rank=0, world=1, local_rank=0)


def test_a_task_that_sees_one_gpu_takes_that_one() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HPCSCHED_LOCALID": "1", "HPCSCHED_TASK_GPUS": "5"}
    assert rank_info(environ).own_gpu
    assert not rank_info(environ | {"HPCSCHED_TASK_GPUS": "4,5"}).own_gpu
    assert not rank_info(environ | {"HPCSCHED_LOCALID": "0"}).own_gpu  # torchrun's second process in the first task
    assert not rank_info({name: value for name, value in environ.items() if name != "HPCSCHED_TASK_GPUS"}).own_gpu


@pytest.mark.parametrize("environ", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_a_rank_that_cannot_be_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(TrainError, match="cannot tell which rank this is: RANK="):
        rank_info(environ)


def test_job_facts_come_from_the_scheduler() -> None:
    facts = job_facts({"HPCSCHED_JOB_ID": "17", "HPCSCHED_ATTEMPT": "2", "HPCSCHED_RESTART_COUNT": "2"})
    assert (facts.job, facts.attempt, facts.restarts) == ("17", 2, 2)
    assert job_facts({}).attempt is None


def test_auto_chooses_by_the_launcher_and_single_refuses_company() -> None:
    assert choose("auto", mpi_place(2)) == "mpi"
    assert choose("auto", rank_info({})) == "single"
    with pytest.raises(TrainError, match="the launcher started 2 ranks"):
        choose("single", mpi_place(2))
    with pytest.raises(TrainError, match="known ones are auto, mpi, gloo"):
        choose("carrier-pigeon", rank_info({}))


def test_a_missing_package_is_named_with_the_install_command() -> None:
    with pytest.raises(MissingPackageError, match="no_such_package_x not installed .* pip install no_such_package_x"):
        require("json", "no_such_package_x")


def test_a_missing_mpi4py_is_named_with_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py')\n")
    command = [sys.executable, "-m", "hpctrain.examples.chargpt", "--backend", "mpi", "--out", tmp_path / "out"]
    with started(command, {"PYTHONPATH": str(tmp_path)}) as process:
        ended = finish(process)
    assert ended.status == 1
    assert "cannot use MPI: mpi4py is not installed; install with: pip install mpi4py" in ended.output
