"""The agent of a node: launches what it is told, remembers it on disk, reports it."""
