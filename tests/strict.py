"""A program whose warnings are errors, but for one that tells of the tests and not of the program.

JAX writes an entry of its cache of compiled programs in place. Whoever reads it meanwhile, or after
the writer was killed, finds a part of it: JAX warns, and compiles.
"""

import sys
import warnings

MESSAGE = "Error reading persistent compilation cache entry"
TORN_ENTRY = f"ignore:{MESSAGE}:UserWarning"
STRICT = [sys.executable, "-W", "error", "-W", TORN_ENTRY]


def be_strict() -> None:
    """From here on this process treats warnings as one that `STRICT` has started."""
    sys.warnoptions[:] = ["error", TORN_ENTRY]
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", MESSAGE, UserWarning)
