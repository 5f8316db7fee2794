"""Hold the controller's state in memory, and change it in transactions.

Knows neither the database nor the controller.
"""
