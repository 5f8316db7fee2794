"""Jobs as columns and rows: what the commands print, and what the controller renders for clients that poll.

A job is the JSON object of the API, on either side. Knows neither sockets nor options; imports little, because commands
start with it.
"""
