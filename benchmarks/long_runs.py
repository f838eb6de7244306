"""What 5,000 steps, 2,000 agreements and 1,000 iterators leave behind: nothing, as curves.

`python benchmarks/long_runs.py` takes some minutes: two processes sample their memory, file
descriptors, threads, and the keys in the coordination service as they go. The ratios that are kept
are of the last sample over the one after a third, by when pools and caches are full: 1 where
nothing grows. With `--picture FILE` the curves are drawn too, as in the docs.
"""

import argparse
import sys
from pathlib import Path

import picture
from ratios import headed, keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import flat

TIMES = {"steps": 5_000, "agreements": 2_000, "iterators": 1_000}
SETTLED = 4  # of eleven samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="an SVG of the curves")
    options = parser.parse_args()
    curves = flat.measure(**TIMES, timeout_s=1_800)
    for process, found in enumerate(curves):
        headed(f"Process {process}")
        for name, times in TIMES.items():
            settled, last = found[name][SETTLED], found[name][-1]
            for what in ("MiB", "descriptors", "threads"):
                print(f"  {times:>5,} {name:<12}{what:<12}{settled[what]:>8} {last[what]:>8}")
                keep(f"{what} after {times:,} {name}", last[what] / settled[what])
            print(f"  {'':>5} {name:<12}{'keys':<12}{settled['keys']:>8} {last['keys']:>8}")
    if options.picture:
        picture.save_curves(options.picture, curves, TIMES)
    for found in curves:
        flat.check_flat(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
