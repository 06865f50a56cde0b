#!/usr/bin/env python3
"""Set NemoLocal up where that is still to be done, then start it: python3 installer/run.py [ARGUMENTS]

The arguments go on to the command line; without any, the app opens. Needs nothing but Python.
The syntax of this file must parse on Python 3.8, so that an old Python gets a sentence, not a traceback.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> int:
    import interpreter

    interpreter.check()
    import environment

    place = environment.Place(Path(__file__).resolve().parent.parent)
    code = environment.guard(lambda: environment.set_up(place), place)
    return code or environment.start(place, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
