"""The token that names one launch, as the node reads it: ``incarnation.job.attempt.step.node.nonce``.

The controller's twin is `hpcsched.model.ids.Token`; both take the same texts.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

_TOKEN = re.compile(
    r"([0-9a-f]{8,32})\.(\d{1,18})\.(\d{1,9})\.(batch|alloc|\d{1,9})\.([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.([0-9a-f]{32})\Z"
)


class Token(NamedTuple):
    """One launch of one step of one attempt on one node."""

    incarnation: str
    job_id: int
    attempt: int
    step: str
    node: str
    nonce: str

    @property
    def job(self) -> Tuple[str, int]:
        """The job, whichever attempt."""
        return self.incarnation, self.job_id


def read_token(text: str) -> Optional[Token]:
    """Return the token that `text` spells, None if it is none: then it must not become a file name."""
    match = _TOKEN.match(text)
    if match is None:
        return None
    incarnation, job, attempt, step, node, nonce = match.groups()
    return Token(incarnation, int(job), int(attempt), step, node, nonce)
