"""The order of waiting jobs: eligibility, priority, fair share, usage, reservations."""
