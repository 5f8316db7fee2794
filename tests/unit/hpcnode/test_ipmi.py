"""The power reading of a management board, against an imitation of the kernel's device. No real board is tested."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from hpcnode.agent.ipmi import measured_watts
from hpcnode.agent.sampler import sensors

READING = bytes((0, 0xDC)) + (347).to_bytes(2, "little") * 4 + bytes(8) + b"\x40"
SEND, RECEIVE = 0x8028690D, 0xC030690B  # as the kernel's header makes them on 64 bits


class Board:
    """The kernel's device: it takes one request, and has answers."""

    def __init__(self, *answers: bytes, msgids: tuple[int, ...] = (1,)) -> None:
        self.answers = list(zip(msgids, answers, strict=True))
        self.asked: list[tuple[int, int, bytes]] = []

    def ioctl(self, fd: int, number: int, given: Any) -> int:
        if number == SEND:
            data = ctypes.string_at(given.msg.data, given.msg.data_len)
            self.asked.append((given.msg.netfn, given.msg.cmd, data))
            assert ctypes.string_at(given.addr, 7) == bytes((0x0C, 0, 0, 0, 0x0F, 0, 0))
            return 0
        assert number == RECEIVE
        given.msgid, answer = self.answers.pop(0)
        ctypes.memmove(given.msg.data, answer, len(answer))
        given.msg.netfn, given.msg.cmd, given.msg.data_len = 0x2D, 2, len(answer)
        return 0


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "ipmi0"
    path.touch()  # a file is always readable, as a device with an answer is
    return str(path)


def test_the_present_power_is_read(device: str) -> None:
    board = Board(READING)
    assert measured_watts(device, board.ioctl) == 347.0
    assert board.asked == [(0x2C, 0x02, bytes((0xDC, 1, 0, 0)))]


def test_an_answer_to_another_request_is_left_out(device: str) -> None:
    assert measured_watts(device, Board(b"\xc0", READING, msgids=(7, 1)).ioctl) == 347.0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",  # the board does not know the command
        READING[:10],
        READING[:18] + b"\x00",  # it does not measure
        bytes((0, 0xDD)) + READING[2:],
        bytes((0, 0xDC)) + bytes(16) + b"\x40",  # 0 W
        bytes((0, 0xDC)) + b"\xff" * 17,  # more than any machine takes
    ],
)
def test_what_is_no_reading_is_no_value(device: str, answer: bytes) -> None:
    assert measured_watts(device, Board(answer).ioctl) is None


def test_a_machine_without_a_board_has_no_value(tmp_path: Path) -> None:
    assert measured_watts(str(tmp_path / "ipmi0")) is None


def test_the_board_is_asked_if_no_other_meter_measures_the_machine(tmp_path: Path) -> None:
    assert sensors(str(tmp_path), lambda: 347.0) == {"node_power_watts:power_meter/dcmi": 347.0}
    chip = tmp_path / "class" / "hwmon" / "hwmon0"
    chip.mkdir(parents=True)
    (chip / "name").write_text("power_meter\n")
    (chip / "power1_average").write_text("65000000\n")
    assert sensors(str(tmp_path), lambda: 347.0) == {"node_power_watts:power_meter/power1": 65.0}


def test_a_board_that_fails_costs_no_other_value(tmp_path: Path) -> None:
    def fails() -> float:
        raise OSError("the board is busy")

    assert sensors(str(tmp_path), fails) == {}
