"""Facts about the installation, and what is wrong according to them.

`security` is pure: facts in, findings out. `security_facts` collects the facts.
"""
