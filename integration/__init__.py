"""Adapters of other frameworks, each a package of its own."""
