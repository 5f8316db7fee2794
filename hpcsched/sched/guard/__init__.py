"""The default policy: short jobs first by prediction, with a bound on everybody's wait."""
