"""The fresh process of the determinism self-test: a target in its arguments, every step on its standard output."""

from __future__ import annotations

import sys

import msgspec

from scripted.replay.rerun import rerun


def main() -> None:
    target, until, mutant = sys.argv[1:]
    again = rerun(target, until=int(until) if until else None, mutant=mutant or None)
    sys.stdout.buffer.write(msgspec.msgpack.encode(again))


if __name__ == "__main__":
    main()
