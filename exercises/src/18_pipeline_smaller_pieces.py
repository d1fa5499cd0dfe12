# %% [markdown] minutes=1 core=true
# # Exercise: smaller pieces
#
# To lesson 18, [Pipeline III: smaller pieces](../notebooks/18_pipeline_smaller_pieces.ipynb). First the order in which a
# rank with several chunks works, then the question how many chunks it should have.
#
# An action is a tuple `(kind, stage, micro-batch)`, such as `("F", 5, 0)`. **Guess:** how many forwards does rank 0 of 4 do
# before its first backward, with v = 2?

# %% tags=["setup"]
from fractions import Fraction

from lessons_lib.grading import hint, reveal
from lessons_lib.pipeline_parallel import Schedule, Times, first_fault, interleaved, simulate

# %% [markdown] minutes=7 core=true
# ## Interleaved 1F1B
#
# Forwards go in groups of p micro-batches, each group through chunk 0, then through chunk 1, and so on; backwards in the
# same groups, the last chunk first. Warm up with 2(p−1−r) + (v−1)p forwards (no more than there are); then a forward and
# a backward in turn, as long as there are forwards; then the backwards that are left.

# %% nbgrader={"grade_id": "interleaved-row"}
def interleaved_row(p, m, v, r):
    """Return what rank ``r`` of ``p`` does in interleaved 1F1B, as a list of (kind, stage, micro-batch).

    Every rank has ``v`` chunks: chunk c of rank r is stage c p + r. Kinds are
    "F" and "B". There are ``m`` micro-batches, a multiple of p.
    """
    ### BEGIN SOLUTION
    groups = [range(first, first + p) for first in range(0, m, p)]
    F = [("F", c * p + r, k) for group in groups for c in range(v) for k in group]
    B = [("B", (v - 1 - c) * p + r, k) for group in groups for c in range(v) for k in group]
    warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
    row = F[:warm]
    for f, b in zip(F[warm:], B):
        row += [f, b]
    return row + B[len(F) - warm :]
    ### END SOLUTION

# %% [markdown] core=true
# Try it on 2 ranks, with 4 micro-batches and 2 chunks. Rank 1 should begin with 1F0 1F1 3F0 3B0, and rank 0 end with
# 2B3 0B2 0B3.

# %% name="try-row" tags=["raises-exception"]
tried = Schedule.of("mine", [interleaved_row(2, 4, 2, r) for r in range(2)])
print(tried)
first_fault(tried)

# %% name="stuck-interleaved"
# hint("18-interleaved")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "18-interleaved", "grade": true}
from lessons_lib.grading import check

reports = [check("18-interleaved", interleaved_row)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("18-interleaved", interleaved_row, seed=2111))
    reports.append(check("18-interleaved", interleaved_row, seed=4127))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=3 core=true
# ## How finely?
#
# A smaller bubble, or fewer messages on the way? Let the simulation decide. (`interleaved` of the library makes the
# schedules, if your own are not ready.)

# %% nbgrader={"grade_id": "chunks-for"}
def chunks_for(p, m, latency):
    """Return the v, of 1, 2, 4 and 8, with which interleaved 1F1B ends first.

    A rank's whole share takes 1 for F, for I and for W, so a chunk takes 1/v.
    A message arrives ``latency`` after it was sent.
    """
    ### BEGIN SOLUTION
    ends = {}
    for v in (1, 2, 4, 8):
        times = Times(F=Fraction(1, v), I=Fraction(1, v), W=Fraction(1, v), send=latency)
        ends[v] = simulate(interleaved(p, m, v), times).makespan
    return min(ends, key=ends.get)
    ### END SOLUTION

# %% [markdown] core=true
# On 4 ranks with 8 micro-batches: 8, 4, 2, 2 and 1 for these latencies.

# %% name="try-chunks"
for latency in ("0", "1/10", "1/4", "1/2", "1"):
    print(latency, chunks_for(4, 8, Fraction(latency)))

# %% name="stuck-chunks"
# hint("18-chunks")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "18-chunks", "grade": true}
from lessons_lib.grading import check

reports = [check("18-chunks", chunks_for)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("18-chunks", chunks_for, seed=2113))
    reports.append(check("18-chunks", chunks_for, seed=4129))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Rank 0 of 4 does eleven forwards before its first backward: ten to warm up, and the first in turn.
