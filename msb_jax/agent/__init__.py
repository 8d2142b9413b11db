"""The master-slave agent."""
