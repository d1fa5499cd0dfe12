# %% [markdown] minutes=1 core=true
# # Exercise: make an order, and check others'
#
# To lesson 17, [Pipeline II: 1F1B](../notebooks/17_pipeline_1f1b.ipynb). First the order of 1F1B for any rank; then a checker
# for schedules that somebody drew. **Guess:** with 8 ranks and 3 micro-batches, how many forwards does rank 0 do before its
# first backward?

# %% tags=["setup"]
from lessons_lib.grading import hint, reveal
from lessons_lib.pipeline_parallel import Schedule, draw, gpipe

# %% [markdown] minutes=4 core=true
# ## The order
#
# Rank r does p − r forwards, then one backward and one forward in turn. What if there are fewer micro-batches than that?

# %% nbgrader={"grade_id": "one-f-one-b"}
def one_f_one_b_row(p, m, r):
    """Return what rank ``r`` of ``p`` does in 1F1B, as a list of (kind, stage,
    micro-batch).

    Rank r has stage r. Kinds are "F" and "B". There are ``m`` micro-batches,
    any number from 1 on.
    """
    ### BEGIN SOLUTION
    row, begun = [], 0
    for k in range(m):
        while begun < min(p - r + k, m):
            row.append(("F", r, begun))
            begun += 1
        row.append(("B", r, k))
    return row
    ### END SOLUTION

# %% [markdown] core=true
# Try it: below GPipe, done at the same time, 33, with peaks of 4, 3, 2 and 1.

# %% name="try-order"
rows = [one_f_one_b_row(4, 8, r) for r in range(4)]
if None not in rows:
    display(draw(gpipe(4, 8), Schedule.of("yours", rows)))

# %% name="stuck-order"
# hint("17-1f1b")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "17-1f1b", "grade": true}
from lessons_lib.grading import check

reports = [check("17-1f1b", one_f_one_b_row)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("17-1f1b", one_f_one_b_row, seed=2171))
    reports.append(check("17-1f1b", one_f_one_b_row, seed=4171))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=6 core=true
# ## The checker
#
# A drawn schedule has a slot for each unit of time, and every action takes one. The check draws 200 of them, half with a
# mistake: an action too early, two exchanged, one forgotten, one done twice. Ranks may have several stages.

# %% nbgrader={"grade_id": "checker"}
def first_illegal(slots):
    """Return (rank, slot) of the first action that cannot be where it is, or ()
    if all can.

    ``slots[r][t]`` is what rank r does in slot t: (kind, stage, micro-batch),
    or None where it waits. An action can be where it is if all it needs was
    made in *earlier* slots, and if it has not been done before. F needs the F
    of the stage before; B needs its own F and, unless its stage is the last,
    the B of the stage after. First is the earliest slot, and in it the lowest
    rank. Stages are numbered from 0, and a rank may have several; the last is
    the largest number that there is.
    """
    ### BEGIN SOLUTION
    everything = [action for row in slots for action in row if action]
    last, done = max(stage for _, stage, _ in everything), set()
    for t in range(max(len(row) for row in slots)):
        now = {r: row[t] for r, row in enumerate(slots) if row[t:] and row[t]}
        for r, (kind, stage, k) in now.items():
            needs = [("F", stage - 1, k)] if kind == "F" and stage else []
            if kind == "B":
                needs = [("F", stage, k), ("B", stage + 1, k)][: 1 + (stage < last)]
            if now[r] in done or any(need not in done for need in needs):
                return r, t
        done.update(now.values())
    return ()
    ### END SOLUTION

# %% [markdown] core=true
# Try it. The first is legal; in the second rank 0 goes back too early, in slot 2.

# %% name="try-checker"
legal = [
    [("F", 0, 0), ("F", 0, 1), None, ("B", 0, 0), None, ("B", 0, 1)],
    [None, ("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), None],
]
early = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), None, None, ("B", 0, 1)], legal[1]]
print(first_illegal(legal), first_illegal(early))

# %% name="stuck-checker"
# hint("17-check")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "17-check", "grade": true}
from lessons_lib.grading import check

reports = [check("17-check", first_illegal)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("17-check", first_illegal, seed=2173))
    reports.append(check("17-check", first_illegal, seed=4173))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# With 8 ranks and 3 micro-batches rank 0 does 3 forwards: there are no more. Your checker is fifteen lines. Run it on the next
# schedule that you see on a slide.
