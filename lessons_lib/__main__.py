"""The commands: python -m lessons_lib COMMAND."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {  # name: (module with main(), what it does)
    "selfcheck": ("lessons_lib.selfcheck", "say what works on this machine, and what to do about the rest"),
}


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name, or list the commands; return the exit status."""
    if len(arguments) == 1 and arguments[0] in COMMANDS:
        module, _ = COMMANDS[arguments[0]]
        status: int = import_module(module).main()
        return status
    if arguments:
        print(f"There is no command {' '.join(arguments)!r}.", file=sys.stderr)
    print("python -m lessons_lib COMMAND, where COMMAND is")
    for name, (_, purpose) in COMMANDS.items():
        print(f"  {name:<11} {purpose}")
    return 2 if arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
