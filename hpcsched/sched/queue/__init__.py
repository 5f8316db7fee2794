"""Which jobs may start, and in which order: eligibility, priority, fair share, usage, reservations."""
