"""Internal faults of hpcsched: logged once with their traceback, reported by number.

A caller that catches an unexpected exception passes it to `report`, and answers with the result. A
fault is the type of the exception and the place where it was raised. Its first occurrence is logged
with its traceback. Later ones are counted, so that a client that repeats a request cannot fill the
log. This module does not know what failed or what must be undone: the caller does. `InvariantError`
is never reported here: the controller stops on it.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from types import TracebackType

from hpcsched.errors import InternalError

log = logging.getLogger("hpcsched.mishap")

MAX_FAULTS = 256  # kept; the least recent one is removed first


class _Fault:
    """One kind of fault: its reference number, and its number of occurrences."""

    def __init__(self) -> None:
        self.reference = secrets.token_hex(4)
        self.count = 0


_total = 0
_faults: OrderedDict[tuple[str, str, int], _Fault] = OrderedDict()


def report(error: Exception, what: str) -> InternalError:
    """Log `error`, raised while doing `what`, and return the error for the client.

    `what` completes "cannot ...": values from an untrusted source in it must be quoted with `repr`.
    """
    global _total
    _total += 1
    key = type(error).__name__, *_place(error.__traceback__)
    fault = _faults.setdefault(key, _Fault())
    _faults.move_to_end(key)
    if len(_faults) > MAX_FAULTS:
        _faults.popitem(last=False)
    fault.count += 1
    if fault.count == 1:
        log.error("fault %s: cannot %s", fault.reference, what, exc_info=error)
    elif _is_power_of_ten(fault.count):
        log.error("fault %s: cannot %s (%d times so far)", fault.reference, what, fault.count)
    return InternalError(
        f"cannot {what}: hpcsched failed ({type(error).__name__}). This is a bug; the controller's log "
        f"(hpcschedd.log in its state_dir, or journalctl -u hpcschedd) has it under fault {fault.reference}",
        fault.reference,
    )


def total() -> int:
    """Return how many faults this process has reported so far."""
    return _total


def _place(traceback: TracebackType | None) -> tuple[str, int]:
    """Return file and line where the exception was raised."""
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
