"""`python -m tests.fuzz.covered TARGET [libFuzzer's arguments]`: one target under atheris."""

import sys

import atheris

with atheris.instrument_imports(include=["batonmq"]):
    from tests.fuzz.targets import TARGETS, quiet


def main() -> None:
    quiet()
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name].read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
