"""Explanations of why a job waits, and of smaller requests that would start."""
