"""Calls over many batches."""
