"""The errors of hpcserve; each message says what is wrong and what to do."""

from __future__ import annotations


class ServeError(Exception):
    """The model cannot be served as asked."""


class ModelFileError(ServeError):
    """A file of the model is missing, damaged or not supported."""


class InvalidRequest(ServeError):
    """A request cannot be carried out as asked; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(ServeError):
    """The queue of requests is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GroupLost(ServeError):
    """A rank is lost, frozen or cut off; the next generation computes its requests again."""
