"""Keep a job from GPUs that it was not given.

A BPF program of its cgroup does it, or the devices controller of version 1.

A GPU is a character device such as /dev/nvidia0. Every GPU of the node that is not the job's is denied; other devices are
left alone. Which file is which GPU is told by the configuration (`gpu_files`), or for NVIDIA by the driver.

Sources: bpf(2), cgroup-v2.rst "Device controller", linux/bpf.h (bpf_cgroup_dev_ctx), cgroup-v1/devices.rst.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from typing import Iterable, List, Sequence, Tuple

NVIDIA = "/proc/driver/nvidia/gpus"
SYS_BPF = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
PROG_LOAD, PROG_ATTACH, PROG_QUERY = 5, 8, 16
PROG_TYPE_CGROUP_DEVICE, ATTACH_DEVICE = 15, 6
ALLOW_MULTI = 2
CHARACTER = 2
_LOAD, _AND, _JUMP_UNLESS, _SET, _EXIT = 0x61, 0x54, 0x55, 0xB7, 0x95
ATTR_BYTES = 128

Device = Tuple[int, int]  # major, minor


def gpu_files(configured: Sequence[str]) -> List[str]:
    """Return the device file of each GPU by index; [] if they are not known."""
    if configured:
        return list(configured)
    try:
        folders = sorted(os.listdir(NVIDIA))  # by PCI address, as nvidia-smi numbers them
    except OSError:
        return []
    return ["/dev/nvidia%s" % _minor(os.path.join(NVIDIA, folder, "information")) for folder in folders]


def _minor(path: str) -> str:
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "Device Minor":
                return value.strip()
    raise OSError("cannot read the device minor in %s" % path)


def denied(files: Sequence[str], given: Iterable[int]) -> List[Device]:
    """Return the devices of the GPUs that are not given. Raises OSError."""
    allowed = set(given)
    mine = {_device(path) for index, path in enumerate(files) if index in allowed}
    others = [_device(path) for index, path in enumerate(files) if index not in allowed]
    return [device for device in dict.fromkeys(others) if device not in mine]


def _device(path: str) -> Device:
    info = os.stat(path)
    if not stat.S_ISCHR(info.st_mode):
        raise OSError("cannot keep jobs from the GPU %s: it is not a character device" % path)
    return os.major(info.st_rdev), os.minor(info.st_rdev)


# ----- BPF


def program(devices: Iterable[Device]) -> bytes:
    """Return a BPF program that denies these character devices, and allows everything else."""
    code = [_instruction(_LOAD, 2, 1, 0, 0), _instruction(_AND, 2, 0, 0, 0xFFFF)]
    code += [_instruction(_LOAD, 3, 1, 4, 0), _instruction(_LOAD, 4, 1, 8, 0)]
    for major, minor in devices:
        code += [_instruction(_JUMP_UNLESS, 2, 0, 4, CHARACTER), _instruction(_JUMP_UNLESS, 3, 0, 3, major)]
        code += [_instruction(_JUMP_UNLESS, 4, 0, 2, minor), _instruction(_SET, 0, 0, 0, 0), _instruction(_EXIT)]
    code += [_instruction(_SET, 0, 0, 0, 1), _instruction(_EXIT)]
    return b"".join(code)


def _instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | to, offset, value)


def _bpf(command: int, attr: bytes) -> Tuple[int, bytes]:
    number = SYS_BPF.get(os.uname().machine)
    if number is None:
        raise OSError("bpf is not known on %s" % os.uname().machine)
    buffer = ctypes.create_string_buffer(attr.ljust(ATTR_BYTES, b"\0"), ATTR_BYTES)
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, ATTR_BYTES)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "bpf: %s" % os.strerror(code))
    return result, buffer.raw


def _load(code: bytes) -> int:
    words = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "=IIQQ", PROG_TYPE_CGROUP_DEVICE, len(code) // 8, ctypes.addressof(words), ctypes.addressof(licence)
    )
    return _bpf(PROG_LOAD, attr)[0]


def why_no_bpf() -> str:
    """Return why this process cannot load such a program, "" if it can."""
    try:
        os.close(_load(program([])))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def deny_by_bpf(group: str, devices: Sequence[Device]) -> None:
    """Deny the devices to a group of version 2, once. Raises OSError."""
    fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        answer = _bpf(PROG_QUERY, struct.pack("=IIIIQI", fd, ATTACH_DEVICE, 0, 0, 0, 0))[1]
        if struct.unpack_from("=I", answer, 24)[0] > 0:
            return  # by an earlier step of the job
        loaded = _load(program(devices))
        try:
            _bpf(PROG_ATTACH, struct.pack("=IIII", fd, loaded, ATTACH_DEVICE, ALLOW_MULTI))
        finally:
            os.close(loaded)
    finally:
        os.close(fd)


# ----- version 1


def deny_by_controller(group: str, devices: Iterable[Device]) -> None:
    """Deny the devices to a group of the devices controller. Raises OSError."""
    for major, minor in devices:
        fd = os.open(group + "/devices.deny", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"c %d:%d rwm" % (major, minor))
        finally:
            os.close(fd)
