"""Settings of nbgrader for these exercises: `python exercises/build.py --instructor FOLDER` copies them."""

import os

c = get_config()  # noqa: F821 - nbgrader defines it

c.CourseDirectory.course_id = "shards-and-bubbles"

# Seconds for one cell; nbgrader's own limit is 30. A check of a right solution takes a few, and one of a
# solution that hangs or never ends is ended by the check itself, which says so: its limit is 30 for all it
# does, and a graded cell may run three checks. Other cells that never end cost these seconds; whatever
# happens, the cells after it are graded.
c.Execute.timeout = 120
c.Execute.interrupt_on_timeout = True

# What students' notebooks reach is not the progress of whoever grades them.
os.environ["LESSONS_PROGRESS"] = "off"

# What stands in place of a solution. All functions have a docstring, so a comment is enough to be a body.
c.ClearSolutions.code_stub = {"python": "# your code here"}

# The banner of an instructor's copy stands in such a region of its first cell, which is no task.
c.ClearMarkScheme.enforce_metadata = False
