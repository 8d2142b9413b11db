"""Environments: instances, rewards and ground truths."""
