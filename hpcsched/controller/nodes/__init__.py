"""What the controller knows of nodes: their links, silence, spools, and what they still run of former lives."""
