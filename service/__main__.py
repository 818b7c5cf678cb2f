"""``python -m service`` is the command ``attn``."""

from service.cli import run

if __name__ == "__main__":
    run()
