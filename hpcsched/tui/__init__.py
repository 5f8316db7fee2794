"""hmon: the cluster on a terminal, live, with keys for what users do to jobs and nodes.

`reading` asks the controller, as any command does. `views` turns answers into rows of text, and knows no terminal. `actions`
turns keys into the commands that they stand for. `app` shows rows with textual, and is the only module that imports it.
"""
