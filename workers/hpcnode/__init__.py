"""What runs on a node: agent, shepherd and the step commands. Standard library only, Python 3.9 or newer."""
