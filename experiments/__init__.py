"""Experiments: flags -> frozen config -> runner -> files -> figures."""
