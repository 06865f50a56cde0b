#!/usr/bin/env python3
"""Set up NemoLocal with the tools of its test suite and a browser, then run every check of the project:
python3 installer/test.py [PYTEST ARGUMENTS]

Formatting, lint, types, architecture and tests all run, whatever fails before; the exit code is 0 when all
passed. The syntax of this file must parse on Python 3.8, so that an old Python gets a sentence.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    import interpreter

    interpreter.check()
    import checks
    import environment

    place = environment.Place(ROOT)
    found = {"browser": ""}

    def prepare() -> None:
        environment.set_up(place, with_tests=True)
        found["browser"] = checks.get_browser(place)

    return environment.guard(prepare, place) or checks.run_all(
        place, sys.argv[1:], browser=found["browser"], is_ci=os.environ.get("CI") == "true"
    )


if __name__ == "__main__":
    sys.exit(main())
