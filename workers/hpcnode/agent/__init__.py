"""The agent of a node: connections, launches, and the facts of the node."""
