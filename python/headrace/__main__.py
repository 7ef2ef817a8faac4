"""python -m headrace: the program `headrace`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "headrace")
    try:
        os.execv(program, ["headrace", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"headrace: cannot start {program}: {error.strerror}")


if __name__ == "__main__":
    main()
