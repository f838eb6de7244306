"""A program whose warnings are errors, but for one that tells of the tests and not of the program.

JAX writes an entry of its cache of compiled programs in place. Whoever reads it meanwhile, or after
the writer was killed, finds a part of it: JAX warns, and compiles.
"""

import sys

TORN_ENTRY = "ignore:Error reading persistent compilation cache entry:UserWarning"
STRICT = [sys.executable, "-W", "error", "-W", TORN_ENTRY]
