"""The commands: python -m lessons_lib COMMAND."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {  # name: (module with main(), what it takes, what it does)
    "selfcheck": ("lessons_lib.selfcheck", "", "say what works here, and what to do about the rest"),
    "train": ("lessons_lib.train.__main__", "[OPTION ...]", "train a small GPT across ranks (try --help)"),
}


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name, or list the commands; return the exit status."""
    name, *rest = arguments or [""]
    module, takes, _ = COMMANDS.get(name, ("", "", ""))
    if module and (takes or not rest):
        run = import_module(module).main
        status: int = run(rest) if takes else run()
        return status
    if arguments:
        print(f"There is no command {' '.join(arguments)!r}.", file=sys.stderr)
    print("python -m lessons_lib COMMAND, where COMMAND is")
    for name, (_, takes, purpose) in COMMANDS.items():
        print(f"  {f'{name} {takes}':<20} {purpose}")
    return 2 if arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
