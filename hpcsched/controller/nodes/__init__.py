"""Track nodes: their links, silence, spools, and launches of earlier incarnations."""
