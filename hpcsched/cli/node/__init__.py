"""hpcsched node: adds, lists, probes and removes nodes, one file each in nodes.d/."""
