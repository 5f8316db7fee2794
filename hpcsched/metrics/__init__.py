"""Metrics: the table of series, samples of nodes, and the text that Prometheus reads.

All of it is pure: values in, values out. Where the values come from is the business of the
controller (`hpcsched.controller.metrics`) and of the agents (`hpcnode.agent.sampler`).
"""
