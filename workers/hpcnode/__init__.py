"""hpcsched on a node: agent, shepherds and step commands.

Standard library only, Python 3.9 or newer.
"""

__version__ = "0.1.0"  # of hpcsched, which a node does not have
