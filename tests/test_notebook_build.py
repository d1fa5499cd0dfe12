"""The notebook tooling catches what it is there to catch: every wrong lesson below must be named."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from build import build, main
from nbformat.v4 import new_code_cell, new_notebook, new_output
from tooling.check import check, few_pictures, wrong_as_run, wrong_as_saved, wrong_as_written
from tooling.execute import CellFailedError, execute
from tooling.saved import PROJECT, WIDGET, clean, png_twin, width
from tooling.source import cell_ids, notebook_path, read

SOUND = """\
# %% [markdown] minutes=1
# # A sound lesson

# %% tags=["setup"]
from IPython.display import SVG, display

# %% [markdown]
# ## See it

# %% name="picture"
two = 2
SVG(f'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><circle r="{two}"/></svg>')

# %% [markdown]
# ## Break it

# %% tags=["raises-exception"]
print("two" if "two" in dir() else "alone")
raise ValueError("as promised")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sound lesson that is not built yet."""
    (tmp_path / "src").mkdir()
    return write(tmp_path / "src" / "00_sound.py", SOUND)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The notebook of the sound lesson."""
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "src").mkdir()
    source = write(folder / "src" / "00_sound.py", SOUND)
    build(source)
    return notebook_path(source).read_text()


@pytest.fixture
def built(source: Path, notebook: str) -> Path:
    """A sound lesson beside its notebook."""
    write(notebook_path(source), notebook)
    return source


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_sound_lesson_is_built_once_and_passes(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parents[1]
    assert main([], folder) == 0
    assert "00_sound: built" in capsys.readouterr().out
    assert main([], folder) == 0
    assert "00_sound: up to date" in capsys.readouterr().out
    assert main(["--check"], folder) == 0, capsys.readouterr().out

    saved = nbformat.read(notebook_path(source), as_version=4)
    title, setup, _, picture, _, broken = saved.cells
    assert title.metadata == {"minutes": 1}
    assert (setup.id, picture.id, broken.id) == ("start-code-1", "picture", "break-it-code-1")
    assert picture.outputs[0].data["image/png"] == png_twin(picture.outputs[0].data["image/svg+xml"])
    assert [output.output_type for output in broken.outputs] == ["stream", "error"]
    assert "execution" not in broken.metadata
    assert saved.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize(
    "before, after, complaint",
    [
        ("two = 2", "two = 2 / 0", "cell picture: raised ZeroDivisionError: division by zero"),
        ("two = 2", "import os; os._exit(1)", "cell picture: ended its kernel"),
        ('raise ValueError("as promised")', "pass", "code-1: is tagged raises-exception, and did not raise"),
    ],
)
def test_a_failing_cell_is_not_built(source: Path, before: str, after: str, complaint: str, capsys) -> None:
    write(source, SOUND.replace(before, after))
    assert main([], source.parents[1]) == 1
    assert complaint in capsys.readouterr().err
    assert not notebook_path(source).exists()


def test_a_failing_cell_is_named_by_the_check(source: Path) -> None:
    write(source, SOUND.replace("two = 2", "two = 2 / 0"))
    (sentence,) = wrong_as_run(read(source), source.parents[1])
    assert sentence.startswith("cell picture: raised ZeroDivisionError: division by zero\n    two = 2 / 0\n")


def test_a_cell_that_never_ends_is_stopped(source: Path) -> None:
    write(source, "# %%\nwhile True: pass\n")
    with pytest.raises(CellFailedError, match="cell start-code-1: was not done after 1 s"):
        execute(read(source).cells, source.parent, timeout_s=1)


NEEDS_AN_EARLIER_SECTION = """\
# %% tags=["setup"]
one = 1

# %% [markdown]
# ## First

# %%
two = one + 1

# %% [markdown]
# ## Second

# %%
print(two)
"""


def test_a_section_that_needs_an_earlier_one_is_named(source: Path) -> None:
    build(write(source, NEEDS_AN_EARLIER_SECTION))
    assert list(check(source)) == [
        'section "Second" alone after the setup cell: has no two',
        'section "Second" alone after the setup cell: '
        "cell second-code-1: raised NameError: name 'two' is not defined\n    print(two)"
    ]


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda text: text.replace("two = 2", "two = 3"), "stale: cell picture is not what the source says"),
        (lambda text: text.replace("A sound", "A new"), "stale: cell start-text-1 is not what"),
        (lambda text: text.replace("minutes=1", "minutes=2"), "stale: cell start-text-1"),
        (lambda text: text + "\n# %%\nnew = True\n", "stale: cell break-it-code-2"),
        (lambda text: text[: text.index("# %% [markdown]\n# ## Break")], "stale: cell break-it-text-1"),
    ],
)
def test_a_stale_notebook_names_the_cell(built: Path, change, complaint: str) -> None:
    write(built, change(SOUND))
    (sentence,) = wrong_as_saved(read(built), notebook_path(built))
    assert complaint in sentence


def test_a_missing_notebook_is_stale(source: Path) -> None:
    (sentence,) = wrong_as_saved(read(source), notebook_path(source))
    assert "stale: 00_sound.ipynb does not exist" in sentence


def keep_old_outputs(saved) -> None:
    saved.metadata.lessons.source_sha256 = "of another source"


def keep_widget_state(saved) -> None:
    saved.metadata["widgets"] = {}


def keep_live_widget(saved) -> None:
    saved.cells[3].outputs[0].data[WIDGET] = {"model_id": "1"}


def keep_svg_alone(saved) -> None:
    del saved.cells[3].outputs[0].data["image/png"]


def keep_machine_path(saved) -> None:
    saved.cells[5].outputs[0].text = f"{PROJECT}/lessons_lib/mesh.py"


def keep_time(saved) -> None:
    saved.cells[3].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def forget_to_run(saved) -> None:
    saved.cells[3].execution_count = None


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (keep_old_outputs, "stale: its outputs come from another version"),
        (keep_widget_state, "widget state is saved"),
        (keep_live_widget, "cell picture: a live widget is saved"),
        (keep_svg_alone, "cell picture: holds traces of a machine, or an SVG without a PNG"),
        (keep_machine_path, "cell break-it-code-1: holds traces of a machine"),
        (keep_time, "stale: cell picture is not what the source says"),
        (forget_to_run, "cell picture: was not executed"),
    ],
)
def test_a_spoilt_notebook_is_found(built: Path, spoil, complaint: str) -> None:
    saved = nbformat.read(notebook_path(built), as_version=4)
    spoil(saved)
    nbformat.write(saved, notebook_path(built))
    assert any(complaint in sentence for sentence in wrong_as_saved(read(built), notebook_path(built)))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("# %%\n" + "x = 1\n" * 21, "cell start-code-1: 21 lines; a cell has at most 20"),
        ("# %%\n" + "x = 1\n" * 7, "the median of its code cells is 7 lines; at most 6"),
        ("# %%\nx = 1\n", "no code cell is tagged as the setup cell"),
    ],
)
def test_the_shape_of_a_lesson(source: Path, text: str, complaint: str) -> None:
    assert complaint in "\n".join(wrong_as_written(read(write(source, text))))


def test_a_notebook_without_a_source_is_found(built: Path, capsys) -> None:
    nbformat.write(new_notebook(), built.parents[1] / "01_orphan.ipynb")
    assert main(["--check"], built.parents[1]) == 1
    assert "WRONG in 01_orphan.ipynb: has no source in src" in capsys.readouterr().out


def test_no_lesson_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--check"], tmp_path)


def test_six_cells_without_a_picture() -> None:
    plain = new_code_cell()
    picture = new_code_cell(outputs=[new_output("display_data", data={"image/png": ""})])
    assert len(list(few_pictures([plain] * 6 + [picture]))) == 1
    assert len(list(few_pictures([*[plain] * 5, picture] * 2))) == 0


def test_cell_ids_stay_when_other_cells_change(source: Path) -> None:
    cells = read(source).cells
    before = [cell.id for cell in cells]
    for cell in cells:
        if not cell.source.startswith("## "):
            cell.source += "\nchanged"
    assert cell_ids(cells) == before
    cells.insert(2, new_code_cell("added = 1"))
    assert [id for id in cell_ids(cells) if id != "start-code-2"] == before


def test_two_cells_of_one_name_are_refused(source: Path) -> None:
    write(source, '# %% name="a"\n1\n# %% name="a"\n2\n')
    with pytest.raises(ValueError, match="2 cells are called 'a'"):
        read(source)


def test_widgets_leave_their_picture_and_nothing_else(source: Path) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    data = {WIDGET: {"model_id": "1"}, "image/svg+xml": svg}
    lesson = read(source)
    lesson.metadata["widgets"] = {"state": {}}
    lesson.cells[3].outputs = [new_output("display_data", data=data)]
    cleaned = clean(lesson)
    (output,) = cleaned.cells[3].outputs
    assert output.data == {"image/svg+xml": svg, "image/png": png_twin(svg)}
    assert output.metadata == {"image/png": {"width": 9}}
    assert "widgets" not in cleaned.metadata and "widgets" in lesson.metadata
    assert clean(cleaned) == cleaned


def test_the_twin_of_a_picture_shows_its_text() -> None:
    page = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="20"><text y="15">{}</text></svg>'
    assert width(png_twin(page.format("F"))) == 200
    assert len({png_twin(page.format(text)) for text in ("", "F", "B")}) == 3
