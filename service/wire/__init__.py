"""Bytes to problems and results to bytes, one file a format; nothing here waits."""
