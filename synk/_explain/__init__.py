"""Explain: reports of the programs, memory and communication of a call."""
