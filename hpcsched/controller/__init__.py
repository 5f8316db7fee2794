"""Run the core: requests and reports in, one tick at a time, commits, then effects."""
