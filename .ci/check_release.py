"""Whether a tag may be released: the version, the changelog and the citation say the same.

`python .ci/check_release.py v0.1.0` prints the release's part of the changelog, or what differs.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def find_faults(tag: str, root: Path = ROOT) -> list[str]:
    """What keeps a tag from being released; empty where nothing does."""
    version = re.search(r'__version__ = "(.+)"', _read(root, "jax_ddp_weighting/_version.py"))[1]
    parts = split_changelog(_read(root, "CHANGELOG.md"))
    unreleased, latest, *_ = [*parts, "", ""]
    faults = []
    if tag != f"v{version}":
        faults.append(f"the tag must be v{version}, the version in _version.py, got {tag}.")
    if unreleased != "Unreleased" or parts[unreleased]:
        faults.append(
            'CHANGELOG.md must begin with an empty "Unreleased". Move it under the release.'
        )
    dated = re.fullmatch(rf"{re.escape(version)} - (\d{{4}}-\d\d-\d\d)", latest)
    if not dated:
        faults.append(f'CHANGELOG.md must have "{version} - YYYY-MM-DD" next, got "{latest}".')
    citation = _read(root, "CITATION.cff")
    for key, value in (("version", version), ("date-released", dated[1] if dated else None)):
        found = re.search(rf"^{key}: (.+)$", citation, re.MULTILINE)
        if value and (found is None or found[1] != value):
            faults.append(f"CITATION.cff must have {key}: {value}.")
    return faults


def split_changelog(text: str) -> dict[str, str]:
    """The parts of a changelog by their headings, in its order."""
    _, *pieces = HEADING.split(text)
    return {pieces[i]: pieces[i + 1].strip() for i in range(0, len(pieces), 2)}


def _read(root: Path, name: str) -> str:
    return (root / name).read_text()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = find_faults(sys.argv[1])
    if faults:
        sys.exit("\n".join(faults))
    print(list(split_changelog(_read(ROOT, "CHANGELOG.md")).values())[1])
