"""Loops: calls over many batches."""
