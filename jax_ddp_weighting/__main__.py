"""`python -m jax_ddp_weighting` and the console script `jax-ddp-weighting`."""

import signal
import sys


def main() -> int:
    """Runs the command line; the exit status: 0 right, 1 found wrong, 2 bad input."""
    try:
        from jax_ddp_weighting.cli import app, supervision
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"jax-ddp-weighting: the command line needs {error.name}, which is not installed."
            " Install the extra: pip install 'jax-ddp-weighting[cli]'",
            file=sys.stderr,
        )
        return 2
    if hasattr(signal, "SIGPIPE"):  # end without complaint where the reader has gone, as head does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    arguments = sys.argv[1:]
    # those run code of the user's own, unless they are asked what they do
    if arguments[:1] in (["parity"], ["diagnose"]) and "--help" not in arguments:
        name = f"jax-ddp-weighting {arguments[0]}"
        return supervision.run_apart(name, lambda: app.run(arguments))
    return app.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
