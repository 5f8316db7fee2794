"""The power of the whole machine, as its management board (BMC) measures it.

It is DCMI's power reading by /dev/ipmi0. Use it in a child: a board may take seconds. Only root may open the device. A machine
without a board, or with one that does not measure, has no value.

Sources: linux/ipmi.h; Data Center Management Interface (DCMI) 1.5, Get Power Reading.
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from typing import Any, Callable, Optional, Tuple

DEVICE = "/dev/ipmi0"
ANSWER_S = 3.0
SYSTEM_INTERFACE, BMC_CHANNEL = 0x0C, 0x0F
GROUP_EXTENSION, GET_POWER_READING, DCMI = 0x2C, 0x02, 0xDC
IS_MEASURING = 0x40  # a bit of the last byte
MAX_ANSWER = 64
MAX_WATTS = 60_000
_SEND, _RECEIVE = (2, 13), (3, 11)  # direction and number of the ioctls, of the letter i

Ioctl = Callable[[int, int, Any], int]


def measured_watts(device: str = DEVICE, ioctl: Ioctl = fcntl.ioctl) -> Optional[float]:
    """Return the present power of the machine, None if it is not measured. Raises OSError."""
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        return _watts(_asked(fd, ioctl, bytes((DCMI, 1, 0, 0))))
    finally:
        os.close(fd)


def _watts(answer: bytes) -> Optional[float]:
    """Return the watts of an answer: status, DCMI, four powers of two bytes, and more."""
    if len(answer) < 19 or answer[0] != 0 or answer[1] != DCMI or not answer[18] & IS_MEASURING:
        return None
    watts = answer[2] | answer[3] << 8
    return float(watts) if 0 < watts <= MAX_WATTS else None


def _asked(fd: int, ioctl: Ioctl, data: bytes) -> bytes:
    """Return the board's answer to a request, b"" if there is none in time. Raises OSError."""
    import ctypes as c  # in a child; see `agent` on the cost of imports

    address_kind, message_kind, request_kind, reply_kind = _structures()
    address = address_kind(SYSTEM_INTERFACE, BMC_CHANNEL, 0)
    sent = (c.c_ubyte * len(data))(*data)
    message = message_kind(GROUP_EXTENSION, GET_POWER_READING, len(data), c.cast(sent, c.c_void_p))
    request = request_kind(c.cast(c.byref(address), c.c_void_p), c.sizeof(address), 1, message)
    ioctl(fd, _number(_SEND, c.sizeof(request)), request)
    until_s = time.monotonic() + ANSWER_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
        room = (c.c_ubyte * MAX_ANSWER)()
        sender = (c.c_ubyte * 64)()
        reply = reply_kind(
            0, c.cast(sender, c.c_void_p), 64, 0, message_kind(0, 0, MAX_ANSWER, c.cast(room, c.c_void_p))
        )
        ioctl(fd, _number(_RECEIVE, c.sizeof(reply)), reply)
        if reply.msgid == 1 and reply.msg.cmd == GET_POWER_READING:
            return bytes(room[: min(MAX_ANSWER, reply.msg.data_len)])
        if time.monotonic() >= until_s:
            break
    return b""


def _number(call: Tuple[int, int], size: int) -> int:
    direction, number = call
    return direction << 30 | size << 16 | ord("i") << 8 | number


def _structures() -> Tuple[Any, Any, Any, Any]:
    """Return ipmi_system_interface_addr, ipmi_msg, ipmi_req and ipmi_recv of linux/ipmi.h."""
    import ctypes as c

    class BoardAddress(c.Structure):
        _fields_ = [("addr_type", c.c_int), ("channel", c.c_short), ("lun", c.c_ubyte)]

    class BoardMessage(c.Structure):
        _fields_ = [("netfn", c.c_ubyte), ("cmd", c.c_ubyte), ("data_len", c.c_ushort), ("data", c.c_void_p)]

    class BoardRequest(c.Structure):
        _fields_ = [("addr", c.c_void_p), ("addr_len", c.c_uint), ("msgid", c.c_long), ("msg", BoardMessage)]

    class BoardReply(c.Structure):
        _fields_ = [
            ("recv_type", c.c_int),
            ("addr", c.c_void_p),
            ("addr_len", c.c_uint),
            ("msgid", c.c_long),
            ("msg", BoardMessage),
        ]

    return BoardAddress, BoardMessage, BoardRequest, BoardReply
