"""The commands: python -m lessons_lib COMMAND."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {  # name: (module and function, what it takes, what it does)
    "selfcheck": ("lessons_lib.selfcheck:main", "", "say what works here, and what to do about the rest"),
    "start": ("lessons_lib.grading.work:start", "NN", "copy the exercise of lesson NN to my_work/"),
    "reset": ("lessons_lib.grading.work:reset", "NN", "copy it anew, and keep the old copy under its date"),
    "train": (
        "lessons_lib.train.__main__:main",
        "[OPTION ...]",
        "train a small GPT across ranks (try --help)",
    ),
}


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name, or list the commands; return the exit status."""
    name, *rest = arguments or [""]
    where, takes, _ = COMMANDS.get(name, ("", "", ""))
    if where and (takes or not rest):
        module, function = where.split(":")
        run = getattr(import_module(module), function)
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
