"""Distributed: groups as a user asks for them, over other processes too."""
