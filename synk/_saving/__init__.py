"""Saving: checkpoints, and loops that continue where the last run stopped."""
