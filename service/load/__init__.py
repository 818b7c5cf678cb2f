"""The load test: how fast and how right a service answers requests that arrive as they were planned."""
