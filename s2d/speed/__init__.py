"""Passes of a few rows, made faster on a CPU and on a GPU; several processes."""
