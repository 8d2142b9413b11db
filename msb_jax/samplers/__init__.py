"""Samplers: parts that propose sets to the master."""
