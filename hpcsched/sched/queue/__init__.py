"""Who stands in line, and in which order: eligibility, priority, fair share, usage, reservations."""
