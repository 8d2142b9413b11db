"""Policies to compare with, and the registry of all policies by name."""
