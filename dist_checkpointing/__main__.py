"""``python -m dist_checkpointing`` is ``dckpt``."""

import sys


def main() -> None:
    """Run ``dckpt``."""
    try:
        from dist_checkpointing.tools import app  # noqa: PLC0415 - it takes a while
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    app.main()


if __name__ == "__main__":
    main()
