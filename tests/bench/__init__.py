"""Measurements: `make bench`. Each module has `run(quick) -> list[Figure]`; nothing here passes or fails."""
