# %% [markdown] minutes=1 core=true
# # Exercise: place W under a memory cap
#
# To lesson 19, [Pipeline IV: split the backward](../notebooks/19_pipeline_split_the_backward.ipynb). Each rank has its
# forwards and its I in order, and a limit on the micro-batches it may keep. Where do its W go? **Guess:** what is worse
# for the time: each W at once, right behind its I, or all W at the very end?

# %% tags=["setup"]
from lessons_lib.grading import hint, reveal
from lessons_lib.pipeline_parallel import Schedule, Times, draw, simulate, zb_h1

# %% [markdown] minutes=9 core=true
# ## Place W
#
# There are two good reasons to do a W *now*: the rank would stand still for at least as long as a W takes, or the next
# action is a forward and there is no room for one more micro-batch. Without a reason, what others wait for goes first.
# What is left at the end comes at the end.

# %% nbgrader={"grade_id": "place-w"}
def place_w(row, pauses, W, cap):
    """Return ``row`` with a ("W", stage, micro-batch) for each of its I, the oldest first.

    ``row`` has what a rank does in order, as (kind, stage, micro-batch), and
    only kinds "F" and "I". ``pauses[n]`` is how long the rank stands still
    before ``row[n]`` if no W is done before; a W takes ``W``. From its F to
    its W the rank keeps a micro-batch, and never more than ``cap`` of them.
    """
    ### BEGIN SOLUTION
    placed, waiting, kept = [], [], 0
    for (kind, stage, k), pause in zip(row, pauses):
        while waiting and (pause >= W or (kind == "F" and kept == cap)):
            placed.append(waiting.pop(0))
            pause -= W
            kept -= 1
        placed.append((kind, stage, k))
        kept += kind == "F"
        if kind == "I":
            waiting.append(("W", stage, k))
    return placed + waiting
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks and eight micro-batches, with room for four. Here are the rows and their pauses, made from ZB-H1 by
# leaving its W out.

# %% name="rows"
rows = [[action for action in row if action.kind != "W"] for row in zb_h1(4, 8).rows]

def pauses_of(rows, times):
    timeline = simulate(Schedule.of("without W", rows), times)
    return [[s - e for s, e in zip(starts, [0, *ends])] for starts, ends in zip(timeline.starts, timeline.ends)]

times = Times(F=1, I=1, W=1)
print("rank 2:", *rows[2])
print("pauses:", *pauses_of(rows, times)[2])

# %% [markdown] core=true
# It should end at 27 and keep four micro-batches on every rank.

# %% name="try-place" tags=["raises-exception"]
mine = [place_w(row, pauses, times.W, cap=4) for row, pauses in zip(rows, pauses_of(rows, times))]
tried = Schedule.of("mine", mine)
print(simulate(tried).makespan, simulate(tried).peak_in_flight())
draw(tried)

# %% name="stuck-place"
# hint("19-place")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "19-place", "grade": true}
from lessons_lib.grading import check

reports = [check("19-place", place_w)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("19-place", place_w, seed=2129))
    reports.append(check("19-place", place_w, seed=4133))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Neither is worse: both end at 30, for opposite reasons. Each at once, and others wait for what comes behind; all at the
# end, and there is nothing to fill the pauses with. Only one of them also needs room for all eight micro-batches.
