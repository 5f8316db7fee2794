"""The demo: a cluster on this machine trains a model in spite of failures.

It loses its controller and a node, and completes the training.

`show` runs the demo from start to end, `story` is what happens, `keeper` is the process that owns the cluster.
"""
