"""What an exit code or a signal means, in words for people.

Sources: signal(7), the shell's 128 + N (bash(1), EXIT STATUS), sysexits.h.
"""

from __future__ import annotations

import signal

FROM_SIGNAL = 128  # a shell, srun and Open MPI's mpirun add this to the signal that ended a program
EX_TEMPFAIL = 75

_HINTS = {
    signal.SIGKILL: "perhaps memory ran out: see MaxRSS in hacct and --mem",
    signal.SIGSEGV: "it used memory that is not its own",
    signal.SIGBUS: "it used memory that is not there; perhaps a file system is full",
    signal.SIGABRT: "the program or a library gave up",
    signal.SIGILL: "the program was built for another processor",
}
_CODES = {
    EX_TEMPFAIL: "it asks to be queued again; that needs --requeue",
    126: "a command in it could not be executed",
    127: "a command in it was not found",
}


def signal_of(code: int, signum: int) -> int:
    """Return the signal that ended a program which left this exit status; 0: none did."""
    if signum:
        return signum
    return code - FROM_SIGNAL if FROM_SIGNAL < code < FROM_SIGNAL + signal.NSIG else 0


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def exit_words(code: int, signum: int) -> str:
    """Return what an exit status means: ``killed by SIGKILL; perhaps memory ran out ...``; "" if its number says it all."""
    if not (ended_by := signal_of(code, signum)):
        return _CODES.get(code, "")
    hint = next((text for number, text in _HINTS.items() if number == ended_by), "")
    return f"killed by {signal_name(ended_by)}" + (f"; {hint}" if hint else "")
