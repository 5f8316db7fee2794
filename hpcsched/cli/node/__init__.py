"""hpcsched node: machines are added, listed, probed and removed, one file each in nodes.d/."""
