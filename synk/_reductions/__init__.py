"""Reductions: how the parts of an output become the whole."""
