"""Jobs as columns and rows, for commands and for the texts that the controller renders.

A job is the JSON object of the API, on either side. Knows neither sockets nor options; imports little, because commands
start with it.
"""
