#!/bin/bash
# title: Shell
# description: Nodes to work on by hand: a terminal in the browser, or hsh JOB on the head.
# opens: terminal
#HSUB --job-name=shell --time=2:00:00

exec sleep infinity
