"""The shepherd of a step on a node: starts its tasks, carries their streams, collects their ends."""
