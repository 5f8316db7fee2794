"""Python processes that have imported torch already: each is a fork of one process that did so once.

Importing torch takes more than a second of a processor, for every rank of every launch. A launcher starts this file as it
would start Python (`command`); it passes its arguments, environment, directory and open files to the process that has
torch, and ends as the fork of that one ends.
Does not know what it runs.  Nothing of this project is imported before the fork.
Rules: a fork runs its script as `__main__`, as Python does, and its exit handlers at the end. It is killed if the process that
stands for it is; signals that Python programs handle are forwarded to it.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import functools
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
import weakref

# What ranks import of others; torch imports torch._dynamo when the first optimizer is made.
PACKAGES = (
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "numpy",
    "numpy.random",
    "blake3",
    "msgpack",
    "numcodecs",
    "tqdm",
)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
MOST_FILES = 253  # unix(7), SCM_MAX_FD
ABOVE = 4096  # descriptors from here on belong to nobody
HEADER = struct.Struct("!I")


@functools.cache
def command(*more: str) -> list[str]:
    """Return the command that stands for Python, after starting the process that it needs.

    `more`: modules that take long to import, too, of scripts that are run more than once.
    """
    import shutil
    import subprocess
    import tempfile

    directory = tempfile.mkdtemp(prefix="pre")
    path = os.path.join(directory, "socket")
    dropped = ("PYTHONPATH", "RANK", "WORLD_SIZE")
    server = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--serve", path, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in dropped}
        | {
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA begun before a fork is of no use after it
        },
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), path]


def stand_for(path: str, words: list[str]) -> None:
    """Have `words` run by a fork, and end as it ends; never returns."""
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if number > 2 and is_open(number) or number <= 2]
    held, alive = os.pipe()  # the fork is killed when `alive` is closed, however that comes
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    text = marshal.dumps((words, files, dict(os.environ), os.getcwd()))
    passed = array.array("i", [held, *files])
    line.sendmsg([HEADER.pack(len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    line.sendall(text)
    os.close(held)
    (pid,) = HEADER.unpack(received(line, HEADER.size))
    for number in FORWARDED:
        signal.signal(number, lambda got, _: os.kill(pid, got))
    status = struct.unpack("!i", received(line, 4))[0]
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_open(number: int) -> bool:
    """Return whether there is such a descriptor (of a directory that was listed through it, there is none any more)."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def received(line: socket.socket, size: int) -> bytes:
    """Return that many bytes."""
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def serve(path: str, more: list[str]) -> list[str]:
    """Fork for every request until stdin ends; return the words of a request in its fork."""
    for name in (*PACKAGES, *more):
        try:
            __import__(name)
        except ImportError:
            pass  # an extra that is not installed
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # what torch would undo at a process's end
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    lines: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a fork -> its pid, who waits for it
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([0, listener, *lines], [], [])
        for one in readable:
            if one == 0:
                os._exit(0)
            elif one is listener:
                line, _ = listener.accept()
                header, rights, _, _ = line.recvmsg(HEADER.size, socket.CMSG_SPACE(4 * MOST_FILES))
                text = received(line, HEADER.unpack(header)[0])
                passed = array.array("i", rights[0][2])
                pid = os.fork()
                if pid == 0:
                    for each in (listener, line, *(other for _, other in lines.values())):
                        each.detach()  # else closed when it is collected, when the number is another file's
                    return become(marshal.loads(text), list(passed))
                for number in passed:
                    os.close(number)
                lines[os.pidfd_open(pid)] = pid, line
                line.sendall(HEADER.pack(pid))
            else:
                pid, line = lines.pop(one)
                os.close(one)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                try:
                    line.sendall(struct.pack("!i", status))
                except OSError:
                    pass  # killed before
                line.close()


def become(request: tuple[list[str], list[int], dict[str, str], str], passed: list[int]) -> list[str]:
    """Take over the files, environment and directory of a request; return its words."""
    words, wanted, environ, directory = request
    held, *files = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in passed)
    os.closerange(0, ABOVE)
    for number, target in zip(files, wanted, strict=True):
        os.dup2(number, target)
        os.close(number)
    fcntl.fcntl(held, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(held, fcntl.F_SETFL, fcntl.fcntl(held, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(held)
    if poll.poll(0):
        os._exit(70)  # it is gone already
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    return words


def run(words: list[str]) -> None:
    """Do what Python does with its arguments: `-m MODULE`, `-c TEXT` or a file."""
    own = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [os.getcwd(), *own]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:1] = ["", *own]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = words
        sys.path[:1] = [os.path.dirname(os.path.abspath(words[0])), *own]
        main.__file__ = words[0]
        with open(words[0], "rb") as source:
            program = compile(source.read(), words[0], "exec")
        exec(program, main.__dict__)  # noqa: S102


def end(words: list[str]) -> None:
    """Run these and end the process as Python does; what it would destroy before, object by object, is left to the kernel."""
    status: object = None
    try:
        run(words)
    except SystemExit as asked:
        status = asked.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        mpi = sys.modules["mpi4py.MPI"]
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    libc, code = ctypes.CDLL(None), (status or 0) & 0xFF
    if "mpi4py.MPI" in sys.modules:
        libc.exit(code)  # with the handlers of libraries: MPICH's takes leave of its launcher
    libc.fflush(None)
    os._exit(code)  # those of torch alone would take longer than the start


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        end(serve(sys.argv[2], sys.argv[3:]))
    else:
        stand_for(sys.argv[1], sys.argv[2:])
