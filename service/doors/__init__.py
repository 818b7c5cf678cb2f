"""Where requests come in: thin, each decodes, attends and encodes."""
