"""The service around the core: everything that waits, listens, times or remembers."""
