"""Where a job fits: what it asks for, what nodes have free and when, gangs of nodes."""
