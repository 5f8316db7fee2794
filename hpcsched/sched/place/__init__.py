"""Where a job fits: requests, free resources of nodes over time, gangs of nodes."""
