"""The shepherd of a step on a node: starts tasks, carries their streams, ends them."""
