"""Smaller models of a model: quantized matrices, fewer FFN columns; and what that costs."""
