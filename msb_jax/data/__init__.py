"""Logs of clicks: raw files, their preparation, the file format, a generated log."""
