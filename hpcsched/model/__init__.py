"""Plain frozen values that every layer shares: jobs, nodes, resources, units, host lists.

Standard library only.
"""
