"""The errors that hpcsched raises, classified by the person to act on them.

Every message reads *cannot X: why*, with the values and, if possible, what to do.
"""

from __future__ import annotations

import os
from collections import OrderedDict

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from types import TracebackType


class HpcschedError(Exception):
    """An error whose text is for users: shown without a traceback."""

    by_controller = False  # it is the controller's answer to a command
    at: int | None = None  # index (from 0) of the job concerned, in a request for several jobs


class RequestError(HpcschedError):
    """The request is impossible: the user must change it."""


class ConflictError(RequestError):
    """The request contradicts an earlier one: the same idempotency key with another content."""


class UsageError(RequestError):
    """A command line cannot be parsed: exit status 2. `getopt`: getopt_long(3)'s text for it."""

    def __init__(self, text: str, *, getopt: str = "") -> None:
        super().__init__(text)
        self.getopt = getopt


class UnauthenticatedError(RequestError):
    """The request has no valid credential."""


class PermissionDeniedError(RequestError):
    """The user has no permission for this action."""


class UnsignedError(PermissionDeniedError):
    """The job must be signed by its user; the whole command does that."""


class NotFoundError(RequestError):
    """The named job, node or partition does not exist."""


class ConfigError(HpcschedError):
    """The admin must change the configuration or the installation."""


class UnavailableError(HpcschedError):
    """Something is temporarily unavailable: try again later."""


class RateLimitError(UnavailableError):
    """The user has asked for too much in a short time. `wait_s`: until it may ask for more."""

    def __init__(self, text: str, wait_s: float = 1.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class InternalError(HpcschedError):
    """A bug of hpcsched: only this request has failed.

    `reference` finds the traceback in the controller's log.
    """

    def __init__(self, text: str, reference: str = "") -> None:
        super().__init__(text)
        self.reference = reference


class ProtocolError(HpcschedError):
    """The peer violated the protocol: its message is dropped and the connection closed."""


class JobFailedError(HpcschedError):
    """A job ended without a result, or its function raised an exception.

    `state`: of the job. `traceback`: of the function's exception, "" if there is none. The exception itself, if it could be
    sent back, is the `__cause__`.
    """

    def __init__(self, text: str, *, state: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.state = state
        self.traceback = traceback


class WaitTimeoutError(HpcschedError, TimeoutError):
    """A job did not end within the time that the caller allowed. The job continues."""


class InvariantError(Exception):
    """The controller's own state is inconsistent: the controller stops."""


def error_of(answer: object) -> HpcschedError:
    """Return the error of an API answer: a JSON object with class ``kind``, text, and ``at``."""
    if not isinstance(answer, dict):
        return ProtocolError("cannot read the controller's answer: it is not a JSON object")
    kind = globals().get(str(answer.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, HpcschedError)):
        kind = RequestError
    error = kind(str(answer.get("error")))
    error.by_controller = True
    error.at = answer.get("at")
    return error


# ----- internal faults of the controller: logged once with their traceback, reported by number
# A caller that catches an unexpected exception passes it to `report_fault`, and answers with the result. A fault is the type of
# the exception and the place where it was raised. Later occurrences are counted, so that a client that repeats a request cannot
# fill the log. `InvariantError` is never reported here: the controller stops on it.


MAX_FAULTS = 256  # kept; the least recent one is removed first


class _Fault:
    """One kind of fault: its reference number, and its number of occurrences."""

    def __init__(self) -> None:
        self.reference = os.urandom(4).hex()
        self.count = 0


_total = 0
_faults: OrderedDict[tuple[str, str, int], _Fault] = OrderedDict()


CONTROLLERS_LOG = "the controller's log (hpcschedd.log in its state_dir, or journalctl -u hpcschedd)"


def report_fault(error: Exception, what: str, where: str = CONTROLLERS_LOG) -> InternalError:
    """Log `error`, raised while doing `what`, and return the error for the client.

    `where`: this process's log. `what` completes "cannot ...": values from an untrusted source in it must be quoted with `repr`.
    """
    import logging  # commands do not need it

    global _total
    log = logging.getLogger(__name__)
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
        f"cannot {what}: hpcsched failed ({type(error).__name__}). This is a bug; {where} has it under fault {fault.reference}",
        fault.reference,
    )


def reported_faults() -> int:
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
