"""What the sampler reads: fixture trees for hardware that no test machine has, real processes for jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcnode.agent import sampler
from hpcnode.agent.gpu_watch import GpuWatch
from hpcnode.agent.helpers import Helpers
from hpcnode.agent.sampler import JOB_COLUMNS, Counters, Energy, JobTrees, NodeSampler, file_systems, sensors
from hpcnode.os.loop import Loop
from hpcnode.wire import protocol
from hpcsched.metrics.series import SAMPLED, TABLE, Group, read_column

PROC = {
    "stat": "cpu  100 20 30 4000 50 6 7 8 0 0\ncpu0 1 2 3\nintr 5 0 0\nctxt 123\nbtime 1700000000\nprocesses 44\n"
    "procs_running 2\nprocs_blocked 1\nsoftirq 9\n",
    "meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nCached: 200 kB\nSwapTotal: 100 kB\n"
    "SwapFree: 40 kB\nDirty: 8 kB\n",
    "vmstat": "nr_free_pages 1\npgmajfault 7\npswpin 1\npswpout 2\noom_kill 3\n",
    "loadavg": "0.52 0.1 0.0 2/300 999\n",
    "net/snmp": "Tcp: RtoMin OutSegs RetransSegs\nTcp: 200 5000 12\n",
    "sys/fs/file-nr": "1184\t0\t9223372036854775807\n",
    "diskstats": "8 0 sda 1 0 100 0 1 0 200 0 0 1500 0 0 0 0 0\n7 0 loop0 1 0 1 0 1 0 1 0 0 1 0\n",
    "pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n",
    "pressure/io": "some avg10=0.0 avg60=0.0 avg300=0.0 total=1000000\nfull avg10=0.0 avg60=0.0 avg300=0.0 total=7\n",
}
NET = "Inter-|\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0 0 0 0 0 0 0\n"


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def net_line(name: str, received: int = 1000, sent: int = 500) -> str:
    return f"  {name}: {received} 1 2 3 0 0 0 0 {sent} 1 4 5 0 0 0 0\n"


@pytest.fixture
def sys_root(tmp_path: Path) -> str:
    return tree(tmp_path / "sys", {"class/net/eth0/device/vendor": "1", "block/sda/device/model": "x"})


def test_counters_of_proc_are_read_in_base_units(tmp_path: Path, sys_root: str) -> None:
    proc = tree(tmp_path / "proc", {**PROC, "net/dev": NET + net_line("eth0")})
    found = Counters(proc, sys_root).look()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    wanted = {
        "node_cpu_seconds_total:user": 100 * tick,
        "node_cpu_seconds_total:steal": 8 * tick,
        "node_cpu_seconds_total:irq": (6 + 7) * tick,
        "node_processes_blocked": 1,
        "node_memory_available_bytes": 600 << 10,
        "node_swap_used_bytes": 60 << 10,
        "node_oom_kills_total": 3,
        "node_load1": 0.52,
        "node_tcp_retransmits_total": 12,
        "node_open_files": 1184,
        "node_network_receive_bytes_total:eth0": 1000,
        "node_network_errors_total:eth0": 6,
        "node_network_drops_total:eth0": 8,
        "node_disk_read_bytes_total:sda": 100 * 512,
        "node_disk_busy_seconds_total:sda": 1.5,
        "node_pressure_seconds_total:cpu:some": 2.5,
        "node_pressure_seconds_total:io:full": 7e-6,
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert not [name for name in found if "loop0" in name or ":lo" in name]


def test_a_kernel_without_psi_has_no_pressure(tmp_path: Path, sys_root: str) -> None:
    proc = tree(tmp_path / "proc", {name: text for name, text in PROC.items() if "pressure" not in name})
    found = Counters(proc, sys_root).look()
    assert "node_load1" in found
    assert not [name for name in found if "pressure" in name]


@pytest.mark.parametrize("broken", ["", "\n", "x", "cpu", "\x00" * 5000, "Tcp: a\n", "MemTotal: x kB\n", "sda sda\n"])
def test_a_file_in_another_format_is_absent(tmp_path: Path, sys_root: str, broken: str) -> None:
    proc = tree(tmp_path / "proc", dict.fromkeys([*PROC, "net/dev"], broken) | {"loadavg": "1.5 0 0"})
    assert Counters(proc, sys_root).look()["node_load1"] == 1.5


def test_300_virtual_devices_are_one_sum_that_never_falls(tmp_path: Path, sys_root: str) -> None:
    many = "".join(net_line(f"veth{i}", 1000) for i in range(300))
    proc = tree(tmp_path / "proc", {"net/dev": NET + net_line("eth0") + many})
    counters = Counters(proc, sys_root)
    assert counters.look()["node_network_receive_bytes_total:virtual"] == 300_000
    tree(tmp_path / "proc", {"net/dev": NET + net_line("eth0") + net_line("veth0", 1500)})
    found = counters.look()
    assert found["node_network_receive_bytes_total:virtual"] == 300_500
    assert len([name for name in found if "receive_bytes" in name]) == 2


def test_more_disks_than_columns_are_left_out(tmp_path: Path) -> None:
    names = [f"sd{i}" for i in range(500)]
    sys_root = tree(tmp_path / "sys", {f"block/{name}/device/model": "x" for name in names})
    proc = tree(tmp_path / "proc", {"diskstats": "".join(f"8 0 {n} 1 0 1 0 1 0 1 0 0 1 0\n" for n in names)})
    found = Counters(proc, sys_root).look()
    assert len(found) == 3 * sampler.MAX_DEVICES


def test_device_names_with_any_bytes_are_labels(tmp_path: Path) -> None:
    name = 'a "b\\: ../../etc'
    sys_root = tree(tmp_path / "sys", {"class/net/eth0/device/x": ""})
    proc = tree(tmp_path / "proc", {"net/dev": NET + net_line(name)})
    found = Counters(proc, sys_root).look()
    assert found["node_network_receive_bytes_total:virtual"] == 1000
    assert sampler.label(b"a\nb\xff") == "a?b\ufffd"
    assert len(sampler.label("x" * 999)) == sampler.MAX_LABEL


def test_4096_cpus_are_read_whole(tmp_path: Path, sys_root: str) -> None:
    per_cpu = "".join(f"cpu{i} 123456789 2 3 4 5 6 7 8 9 10\n" for i in range(4096))
    text = PROC["stat"].replace("cpu0 1 2 3\n", per_cpu + "intr " + "0 " * 50_000 + "\n")
    found = Counters(tree(tmp_path / "proc", {"stat": text}), sys_root).look()
    assert found["node_processes_blocked"] == 1


def test_every_column_is_in_the_table() -> None:
    found = {**Counters().look(), **sensors(), **file_systems(["/"]), "node_samples_skipped_total": 0}
    assert [column for column in found if read_column(column, SAMPLED) is None] == []
    assert [name for name in JOB_COLUMNS if TABLE[name].group is not Group.JOB] == []
    assert len(found) > 30


# ----- sensors: hardware that no machine here has, as fixture trees


def test_sensors_are_read_and_broken_ones_are_absent(tmp_path: Path) -> None:
    base = "devices/system/cpu"
    root = tree(
        tmp_path,
        {
            "class/hwmon/hwmon0/name": "coretemp\n",
            "class/hwmon/hwmon0/temp1_input": "45000\n",
            "class/hwmon/hwmon0/temp1_label": "Package id 0\n",
            "class/hwmon/hwmon0/temp2_input": "nan\n",
            "class/hwmon/hwmon0/temp3_input": "51000\n",
            "class/hwmon/hwmon0/temp4_input": "511000\n",
            "class/hwmon/hwmon1/temp1_input": "-273000\n",
            "class/hwmon/hwmon0/temp1_crit": "100000\n",
            "class/hwmon/hwmon0/power1_average": "65000000\n",
            "class/thermal/thermal_zone0/temp": "38500\n",
            "class/thermal/thermal_zone0/type": "x86_pkg_temp\n",
            **{f"{base}/cpu{i}/topology/physical_package_id": "0\n" for i in range(4)},
            **{f"{base}/cpu{i}/topology/core_id": f"{i // 2}\n" for i in range(4)},
            **{f"{base}/cpu{i}/thermal_throttle/core_throttle_count": f"{5 + i // 2}\n" for i in range(4)},
            **{f"{base}/cpu{i}/thermal_throttle/package_throttle_count": "9\n" for i in range(4)},
            "devices/system/edac/mc/mc0/ce_count": "3\n",
            "devices/system/edac/mc/mc0/ue_count": "1\n",
            "class/power_supply/AC/type": "Mains\n",
            "class/power_supply/AC/online": "0\n",
            "class/power_supply/BAT0/type": "Battery\n",
            "class/powercap/intel-rapl:0/name": "package-0\n",
            "class/powercap/intel-rapl:0/energy_uj": "2500000\n",
            "class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850\n",
            "class/powercap/intel-rapl:1/energy_uj/not_a_file": "",
            "class/net/eth0/device/x": "",
            "class/net/eth0/carrier_changes": "4\n",
        },
    )
    found = sensors(root)
    assert found.pop(sampler.RANGE + "package-0") == pytest.approx(262143.32885)
    assert found == {
        "node_temperature_celsius:coretemp": 51.0,  # the hottest
        "node_power_watts:coretemp/power1": 65.0,
        "node_throttled_total:core": 11,  # each physical core once
        "node_throttled_total:package": 9,
        "node_ecc_errors_total:corrected": 3,
        "node_ecc_errors_total:uncorrected": 1,
        "node_on_mains": 0,
        "node_energy_joules_total:package-0": 2.5,
        "node_network_carrier_changes_total:eth0": 4,
    }


def test_thermal_zones_are_read_where_there_is_no_hwmon(tmp_path: Path) -> None:
    files = {"class/thermal/thermal_zone0/temp": "38500\n", "class/thermal/thermal_zone0/type": "cpu\n"}
    assert sensors(tree(tmp_path, files)) == {"node_temperature_celsius:thermal_zone0/cpu": 38.5}


def test_directories_of_one_file_system_are_shown_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = file_systems([str(tmp_path), str(tmp_path / "a")])
    assert f"node_filesystem_size_bytes:{tmp_path}" in found
    assert not [name for name in found if name.endswith("/a")]


def test_a_file_system_that_counts_no_inodes_has_no_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs("/")
    assert "node_filesystem_free_inodes:/" in file_systems(["/"])
    values = [*real[:5], 0, 0, 0, *real[8:]]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*values, real.f_fsid)[:11]))
    found = file_systems(["/"])
    assert "node_filesystem_size_bytes:/" in found
    assert "node_filesystem_free_inodes:/" not in found


def test_a_machine_without_sensors_has_none(tmp_path: Path) -> None:
    assert sensors(str(tmp_path)) == {}


def test_a_wrapped_energy_counter_continues() -> None:
    energy, column = Energy(), "node_energy_joules_total:package-0"
    looks = [energy.unwrapped({column: value, sampler.RANGE + "package-0": 100.0}) for value in (90.0, 20.0, 30.0, 5.0)]
    assert [look[column] for look in looks] == [90.0, 120.0, 130.0, 205.0]
    assert list(looks[0]) == [column]


def test_a_file_system_that_hangs_costs_the_deadline_and_the_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hang, real = threading.Event(), os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/hung":
            hang.wait(30)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    try:
        found = file_systems(["/hung", "/", "/not/there"], deadline_s=0.2)
    finally:
        hang.set()
    assert found["node_filesystem_answers:/hung"] == 0
    assert found["node_filesystem_answers:/"] == 1
    assert found["node_filesystem_size_bytes:/"] == real("/").f_blocks * real("/").f_frsize
    assert not [name for name in found if "/not/there" in name or ("size" in name and "hung" in name)]


# ----- jobs


@pytest.fixture
def shepherd() -> Iterator[subprocess.Popen[str]]:
    """A process whose children burn CPU and end, as those of a job."""
    program = """
import os, sys, time
for line in sys.stdin:
    if os.fork() == 0:
        until = time.process_time() + 0.1
        while time.process_time() < until: pass
        if line == "stay\\n": time.sleep(60)
        os._exit(0)
    if line == "end\\n": os.wait()
    print("done", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as made:
        yield made
        os.killpg(made.pid, 9)


def ask(shepherd: subprocess.Popen[str], word: str) -> None:
    assert shepherd.stdin is not None
    assert shepherd.stdout is not None
    print(word, file=shepherd.stdin, flush=True)
    shepherd.stdout.readline()


def test_a_job_keeps_the_time_of_its_ended_processes_and_steps(shepherd: subprocess.Popen[str]) -> None:
    trees, token = JobTrees(), f"feedc0de.7.1.0.n1.{'0' * 32}"
    other = f"feedc0de.7.1.batch.n1.{'1' * 32}"
    ask(shepherd, "stay")
    wait_until(lambda: trees.look({token: (7, 1, shepherd.pid)})[0][2] >= 0.05, what="the child's time")
    first = trees.look({token: (7, 1, shepherd.pid)})
    assert first[0][:2] == [7, 1]
    assert first[0][6] == 1  # processes: the shepherd is not the job's
    assert first[0][3] > 1 << 20
    ask(shepherd, "end")
    both = trees.look({token: (7, 1, shepherd.pid), other: (7, 1, 0)})
    assert both[0][2] >= first[0][2] + 0.05
    assert both[0][6] == 1
    after = trees.look({other: (7, 1, 0)})
    assert after[0][2] == pytest.approx(both[0][2], abs=0.06)
    gauges = [2 + JOB_COLUMNS.index(name) for name in JOB_COLUMNS if not name.endswith("_total")]
    assert [after[0][place] for place in gauges] == [0] * len(gauges)
    assert trees.look({}) == []
    assert trees.look({other: (7, 1, 0)})[0][2] == 0  # nothing of an ended job is kept


def test_threads_that_want_a_cpu_are_counted() -> None:
    program = """
import sys, threading
work = threading.Barrier(4)
def burn():
    work.wait()
    while True: sum(range(1000))
def wait():
    threading.Event().wait()
for target in (burn, burn, burn, wait): threading.Thread(target=target, daemon=True).start()
work.wait()
print("started", flush=True)
sys.stdin.readline()
"""
    shell = [
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run(sys.argv[1:])",
        sys.executable,
        "-c",
        program,
    ]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        parent.stdout.readline()
        trees = JobTrees()
        steps = {f"feedc0de.7.1.0.n1.{'0' * 32}": (7, 1, parent.pid)}
        place = 2 + JOB_COLUMNS.index("job_threads_runnable")
        wait_until(lambda: trees.look(steps)[0][place] >= 1, what="a thread that runs")
        child = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: trees.look(steps)[0][place] == 0, what="the stopped program")
        os.kill(child, signal.SIGCONT)
        parent.stdin.write("\n")


# ----- all together


class World:
    """A sampler on a real loop, whose connection is full or not."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.sent: list[protocol.Sample] = []
        self.unsent = 0
        gpus = GpuWatch(self.loop, {"PATH": "/nowhere"})
        self.sampler = NodeSampler(
            self.loop, Helpers(self.loop), gpus, ["/"], lambda: iter(()), self.send, lambda: self.unsent
        )

    def send(self, message: Any) -> bool:
        self.sent.append(protocol.read_as(protocol.Sample, protocol.to_json(message)))
        return True

    def until(self, done: Any) -> None:
        for _ in range(200):
            if done():
                return
            self.loop.turn()
        raise AssertionError("it did not come")


def test_columns_are_sent_once_and_a_full_connection_drops_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LEAST_INTERVAL_S", 0.01)
    world = World()
    world.sampler.every(protocol.SampleEvery(0.01))
    world.until(lambda: any("node_filesystem_size_bytes:/" in sample.columns for sample in world.sent))
    assert "node_load1" in world.sent[0].columns
    assert world.sent[0].job_columns == JOB_COLUMNS
    assert [bool(sample.columns) for sample in world.sent].count(True) == 2  # the slow look added some
    count = len(world.sent)
    world.unsent = sampler.ROOM_BYTES + 1
    for _ in range(5):
        world.loop.turn()
    assert len(world.sent) == count
    world.unsent = 0
    world.until(lambda: len(world.sent) > count)
    last = world.sent[-1]
    assert last.columns == []
    skipped = world.sent[0].columns.index("node_samples_skipped_total")
    assert last.values[skipped] >= 4
    world.sampler.every(protocol.SampleEvery(0.0))
    count = len(world.sent)
    world.loop.later(0.05, lambda: None)
    world.loop.turn()
    assert len(world.sent) == count


# ----- machines that change while they are measured


def received(found: dict[str, Any]) -> dict[str, Any]:
    mark = "node_network_receive_bytes_total:"
    return {name[len(mark) :]: value for name, value in found.items() if name.startswith(mark)}


def test_an_interface_that_is_renamed_continues_under_its_new_name(tmp_path: Path) -> None:
    files = {f"class/net/{name}/device/vendor": "1" for name in ("wlan0", "wlp3s0")}
    sys_root, proc = tree(tmp_path / "sys", files), tmp_path / "proc"
    tree(proc, {"net/dev": NET + net_line("wlan0", 10**12)})
    counters = Counters(str(proc), sys_root)
    assert received(counters.look()) == {"wlan0": 10**12}
    tree(proc, {"net/dev": NET + net_line("wlp3s0", 10**12 + 7)})
    assert received(counters.look()) == {"wlp3s0": 10**12 + 7}


def test_a_virtual_device_that_comes_with_a_past_adds_none_of_it(tmp_path: Path, sys_root: str) -> None:
    proc = tmp_path / "proc"
    tree(proc, {"net/dev": NET + net_line("br0", 10**12)})
    counters = Counters(str(proc), sys_root)
    assert received(counters.look()) == {"virtual": 10**12}
    tree(proc, {"net/dev": NET + net_line("br-lan", 10**12 + 7)})
    assert received(counters.look()) == {"virtual": 10**12}
    tree(proc, {"net/dev": NET + net_line("br-lan", 10**12 + 10)})
    assert received(counters.look()) == {"virtual": 10**12 + 3}
    tree(proc, {"net/dev": NET + net_line("br-lan", 5)})  # its counter began again
    assert received(counters.look()) == {"virtual": 10**12 + 8}


def test_a_wifi_card_that_roams_and_resets_is_as_the_kernel_says(tmp_path: Path) -> None:
    sys_root, proc = tree(tmp_path / "sys", {"class/net/wlan0/device/vendor": "1"}), tmp_path / "proc"
    counters = Counters(str(proc), sys_root)
    for count in (10**9, None, 40):  # connected, away, with another access point after the driver was loaded again
        tree(proc, {"net/dev": NET + ("" if count is None else net_line("wlan0", count))})
        assert received(counters.look()).get("wlan0") == count


def test_500_loop_devices_have_no_columns_and_are_looked_up_once(
    tmp_path: Path, sys_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = "".join(f"7 {i} loop{i} 1 0 1 0 1 0 1 0 0 1 0\n" for i in range(500))
    proc = tree(tmp_path / "proc", {"diskstats": loops + PROC["diskstats"]})
    counters, looked = Counters(proc, sys_root), []
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: looked.append(path) or exists(path))  # type: ignore[func-returns-value]
    assert {name.rpartition(":")[2] for name in counters.look()} == {"sda"}
    assert len(looked) == 501
    counters.look()
    assert len(looked) == 501


def test_500_mounts_are_asked_with_a_bound(tmp_path: Path) -> None:
    mounts = [str(tmp_path / f"snap{i}") for i in range(500)]
    for mount in mounts:
        os.mkdir(mount)
    found = sampler.file_systems(mounts)
    assert {name.rpartition(":")[2] for name in found} == {mounts[0]}  # all are of one file system


def test_columns_of_devices_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LEAST_INTERVAL_S", 0.001)
    world = World()
    names = iter(range(10**6))
    monkeypatch.setattr(
        world.sampler._counters, "look", lambda: {"node_load1": 1.0, f"node_network_errors_total:enx{next(names)}": 5}
    )
    world.sampler.every(protocol.SampleEvery(0.001))
    world.until(lambda: len(world.sent) > 150)
    monkeypatch.setattr(sampler, "MAX_COLUMNS", 20)
    count = len(world.sent)
    world.until(lambda: len(world.sent) > count + 40)
    assert max(len(sample.values) for sample in world.sent[count:]) <= 20
    columns = world.sent[count].columns
    for sample in world.sent[count + 1 :]:
        columns = sample.columns or columns
        assert len(sample.values) == len(columns)
        assert sample.values[columns.index("node_load1")] == 1.0


def test_a_laptop_that_slept_sends_nothing_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LEAST_INTERVAL_S", 0.01)
    world, asleep_s = World(), [0.0]
    boot_clock_s, disk = sampler.process.boot_clock_s, "node_filesystem_size_bytes:/"
    monkeypatch.setattr(sampler.process, "boot_clock_s", lambda: boot_clock_s() + asleep_s[0])
    world.sampler.every(protocol.SampleEvery(0.01))
    columns: list[str] = []

    def sent_disk() -> bool:
        columns[:] = next(sample.columns for sample in reversed(world.sent) if sample.columns) if world.sent else []
        return disk in columns and world.sent[-1].values[columns.index(disk)] is not None

    world.until(sent_disk)
    monkeypatch.setattr(world.sampler, "_look_slowly", lambda _now_s: None)
    asleep_s[0] = 8 * 3600.0
    world.until(lambda: not sent_disk())
    assert (world.sampler.growth(), world.sampler._slow_due_s < boot_clock_s() + asleep_s[0]) == ({}, True)
    monkeypatch.undo()
    monkeypatch.setattr(sampler, "LEAST_INTERVAL_S", 0.01)
    monkeypatch.setattr(sampler.process, "boot_clock_s", lambda: boot_clock_s() + asleep_s[0])
    world.until(sent_disk)


def test_the_wall_clock_is_in_no_value_but_the_boot_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.time, "time", lambda: 1 / 0)  # a sample has the head's time of receipt
    found = Counters().look()
    assert found["node_boot_time_seconds"] > 0
