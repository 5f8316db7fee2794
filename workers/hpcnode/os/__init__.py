"""Processes, accounts, files and limits as Linux has them."""
