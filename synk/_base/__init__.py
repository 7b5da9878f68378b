"""Base: errors, trees and arithmetic that know Python, NumPy and JAX, and no group."""
