"""Skeletons: operations on rows that communicate while they run, scan and pairs."""
