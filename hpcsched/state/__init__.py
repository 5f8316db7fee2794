"""The controller's state in memory and the transaction that changes it. Knows neither the database nor the controller."""
