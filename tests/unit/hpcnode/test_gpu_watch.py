"""The watcher of GPUs against a fake driver's library in C and a fake nvidia-smi. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcnode.agent import gpu_watch
from hpcnode.agent.gpu_watch import GpuWatch, Nvml, Values, smi_looks, smi_values
from hpcnode.os import process
from hpcnode.os.loop import Loop
from hpcsched.metrics.series import SAMPLED, read_column

SOURCE = Path(__file__).with_name("fake_nvml.c")
NO_LIBRARY = "libnvidia-ml-of-nobody.so.1"
GPU0 = {
    "gpu_info:0:GPU-0:Fake? 9000": 1,
    "gpu_utilization_ratio:0": 0.75,
    "gpu_memory_bytes:0": 1 << 34,
    "gpu_memory_used_bytes:0": 1 << 33,
    "gpu_power_watts:0": 250.5,
    "gpu_power_limit_watts:0": 300.0,
    "gpu_energy_joules_total:0": 5000.123,
    "gpu_temperature_celsius:0": 60,
    "gpu_clock_hertz:0": 1001 * 10**6,
    "gpu_ecc_errors_total:0:corrected": 3,
    "gpu_ecc_errors_total:0:uncorrected": 4,
    "gpu_throttle:0:heat": 1,  # the power limit that a user set is not heat
    "gpu_processes:0": 2,
}


def built(folder: Path, *flags: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        assert os.environ.get("CI") != "true", "a C compiler is missing"
        pytest.skip("a C compiler is missing: the driver's library cannot be imitated")
    path = folder / f"libnvidia-ml{len(flags)}.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(path), str(SOURCE)], check=True, timeout=60)
    return str(path)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Return a function that sets how many GPUs the driver has, and its mode."""
    path = tmp_path / "driver"
    monkeypatch.setenv("FAKE_NVML", str(path))
    return path.write_text


def loaded(library: str) -> Nvml:
    import ctypes

    return Nvml(ctypes.CDLL(library))


def test_all_values_of_the_library_are_read(library: str, driver: Callable[[str], object]) -> None:
    driver("1 ok")
    assert loaded(library).look() == pytest.approx(GPU0)
    assert [column for column in GPU0 if read_column(column, SAMPLED) is None] == []


def test_a_lost_gpu_a_mig_gpu_and_a_changed_count(library: str, driver: Callable[[str], object]) -> None:
    driver("3 lost")
    nvml = loaded(library)
    assert {column.split(":")[1] for column in nvml.look()} == {"0", "2"}  # GPU 1 is lost
    driver("1 mig")
    found = nvml.look()
    assert "gpu_utilization_ratio:0" not in found  # not 0
    assert found["gpu_memory_bytes:0"] == 1 << 34
    driver("0 ok")
    assert nvml.look() == {}
    driver("1 unloaded")
    assert nvml.look() == {}
    driver("2 ok")
    assert len(nvml.look()) == 2 * len(GPU0)


def test_an_older_library_lacks_functions(tmp_path: Path, driver: Callable[[str], object]) -> None:
    driver("1 ok")
    found = loaded(built(tmp_path, "-DOLD")).look()
    assert GPU0.keys() - found.keys() == {"gpu_energy_joules_total:0", "gpu_processes:0"}


# ----- nvidia-smi


def tool(folder: Path, script: str) -> dict[str, str]:
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


LINE = "0, GPU-0, Fake 9000, 75, 16384, 8192, 60, 250.50, 300.00, 1001, 0x0000000000000044, 3, 4"


def test_nvidia_smi_is_read_look_by_look(tmp_path: Path) -> None:
    second = LINE.replace("0, GPU-0", "1, GPU-1")
    environ = tool(tmp_path, f"echo '{LINE}'; echo '{second}'; read never < {tmp_path}/pipe; echo '{LINE}'")
    os.mkfifo(tmp_path / "pipe")
    looks = smi_looks(1.0, environ)
    first = next(looks)
    assert {name: first[name] for name in first if name.split(":")[1] == "0"} == pytest.approx(
        {
            name.replace("?", ""): value
            for name, value in GPU0.items()
            if not name.startswith(("gpu_energy", "gpu_processes"))
        }
    )
    assert "gpu_memory_bytes:1" in first
    (tmp_path / "pipe").write_text("\n")
    assert "gpu_memory_bytes:1" not in next(looks)
    assert list(looks) == []


@pytest.mark.parametrize(
    "word", ["[N/A]", "N/A", "ERR!", "[GPU is lost]", "[Not Supported]", "75,5", "", "٣", "1e9", "-1", "nan"]
)
def test_what_is_no_number_is_absent(word: str) -> None:
    fields = dict(zip(gpu_watch._BASIC, ["0", "GPU-0", "Fake", word, word, "8192", word, word], strict=True))
    assert smi_values(fields) == {"gpu_info:0:GPU-0:Fake": 1, "gpu_memory_used_bytes:0": 8192 << 20}


def test_messages_for_people_are_skipped_and_an_older_tool_is_asked_for_less(tmp_path: Path) -> None:
    basic = ", ".join(LINE.split(", ")[:8])
    environ = tool(
        tmp_path,
        f"""case $1 in *throttle*) echo 'Field "clocks.sm" is not a valid field to query.'; exit 2;; esac
echo 'Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU'
echo '99999999999, x, y, 1, 2, 3, 4, 5'
echo '{basic}'
""",
    )
    (found,) = smi_looks(1.0, environ)
    assert found["gpu_utilization_ratio:0"] == 0.75
    assert {name.split(":")[1] for name in found} == {"0"}


def test_without_the_tool_there_is_nothing() -> None:
    assert list(smi_looks(1.0, {"PATH": "/nowhere"})) == []


# ----- the child


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[GpuWatch, Callable[[Any], Any]]]]:
    """Return a function that starts a watcher, and returns it with a wait that turns its loop."""
    monkeypatch.setattr(gpu_watch, "AGAIN_S", 0.05)
    made: list[GpuWatch] = []

    def start(environ: dict[str, str], library: str) -> tuple[GpuWatch, Callable[[Any], Any]]:
        loop = Loop()
        watch = GpuWatch(loop, environ, library)
        made.append(watch)
        watch.start(0.02)

        def until(done: Callable[[], Any]) -> Any:
            def turned() -> Any:
                loop.later(0.01, lambda: None)
                loop.turn()
                return done()

            return wait_until(turned, 30.0)

        return watch, until

    yield start
    for watch in made:
        watch.stop()


def now(watch: GpuWatch) -> Values:
    return watch.values(process.boot_clock_s())


def test_a_child_that_is_killed_is_started_again(
    library: str, driver: Callable[[str], object], tmp_path: Path, watching: Any
) -> None:
    driver("1 ok")
    watch, until = watching(tool(tmp_path, "exit 1"), library)
    assert until(lambda: now(watch)) == pytest.approx({"gpu_driver_answers": 1, **GPU0})
    pid = watch._pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: watch._pid != pid)
    driver("2 ok")
    until(lambda: "gpu_memory_bytes:1" in now(watch))
    watch.stop()
    assert now(watch) == {}
    os.waitpid(watch._pid, 0)
    os.waitpid(pid, 0)


def test_a_driver_that_hangs_costs_the_agent_nothing(
    library: str, driver: Callable[[str], object], tmp_path: Path, watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("1 ok")
    watch, until = watching(tool(tmp_path, "exit 1"), library)
    until(lambda: now(watch))
    driver("1 hang")
    monkeypatch.setattr(gpu_watch, "SILENT_S", 0.3)
    assert until(lambda: now(watch).get("gpu_driver_answers") == 0 and now(watch)) == {"gpu_driver_answers": 0}
    driver("1 ok")
    until(lambda: now(watch).get("gpu_driver_answers") == 1)


def test_a_tool_that_never_returns_is_a_driver_that_does_not_answer(
    tmp_path: Path, watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "SILENT_S", 0.2)
    watch, until = watching(tool(tmp_path, "exec sleep 60"), NO_LIBRARY)
    until(lambda: now(watch) == {"gpu_driver_answers": 0})
    watch.stop()
    os.waitpid(watch._pid, 0)


def test_a_node_without_gpus_starts_no_child(tmp_path: Path, watching: Any) -> None:
    watch, _ = watching({"PATH": str(tmp_path)}, NO_LIBRARY)
    assert now(watch) == {}
    assert watch._pid == 0
