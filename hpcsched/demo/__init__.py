"""Machines that are not there: nodes on loopback, for the demo and for the tests, and the demo's story.

`nodes` starts and stops them, `supervise` is the power supply of one of them, `embedded` stands in for OpenSSH's sshd
where that is not installed. None of them knows what hpcsched runs on its nodes.
"""
