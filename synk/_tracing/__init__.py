"""Tracing: a user's function as a jaxpr, with what it reads, writes, returns and communicates."""
