"""Build the notebooks: notebooks/src/NN_name.py -> an executed notebooks/NN_name.ipynb.

python notebooks/build.py             build what is stale
python notebooks/build.py 00 03       ... of these lessons only
python notebooks/build.py --force     build all
python notebooks/build.py --check     build nothing; say what is wrong, and fail if anything is
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from tooling.check import check, is_stale
from tooling.execute import CellFailedError, execute
from tooling.saved import clean
from tooling.side_by_side import check_side_by_side
from tooling.source import notebook_path, read, sources

FOLDER = Path(__file__).parent


def build(source: Path) -> None:
    """Execute the lesson written in ``source`` and save its notebook."""
    lesson = read(source)
    execute([cell for cell in lesson.cells if cell.cell_type == "code"], notebook_path(source).parent)
    lesson = clean(lesson)
    nbformat.validate(lesson)
    nbformat.write(lesson, notebook_path(source))


def build_all(lessons: list[Path], force: bool) -> int:
    for source in lessons:
        if not force and not is_stale(read(source), notebook_path(source)):
            print(f"{source.stem}: up to date")
            continue
        start = time.perf_counter()
        try:
            build(source)
        except CellFailedError as error:
            print(f"{source.stem}: not built, {error}", file=sys.stderr)
            return 1
        print(f"{source.stem}: built in {time.perf_counter() - start:.1f} s")
    return 0


def check_all(lessons: list[Path], orphans: list[Path]) -> int:
    wrong = [f"{path.name}: has no source in src" for path in orphans]
    wrong += check_side_by_side(check, lessons)
    for sentence in wrong:
        print(f"WRONG in {sentence}")
    print(f"{len(lessons)} lessons checked, {len(wrong)} problems")
    return int(bool(wrong))


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description="Build the notebooks from notebooks/src.")
    parser.add_argument("lesson", nargs="*", help="first letters of a lesson's name; without any, all")
    parser.add_argument("--force", action="store_true", help="build also what is up to date")
    parser.add_argument("--check", action="store_true", help="build nothing, say what is wrong")
    options = parser.parse_args(arguments)

    lessons = [path for path in sources(folder) if path.name.startswith(tuple(options.lesson or [""]))]
    if not lessons:
        parser.error(f"no lesson in {folder / 'src'} is called {' or '.join(options.lesson) or 'anything'}")
    if options.check:
        built = {notebook_path(source) for source in sources(folder)}
        return check_all(lessons, [path for path in sorted(folder.glob("*.ipynb")) if path not in built])
    return build_all(lessons, options.force)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
