# %% [markdown] minutes=1 core=true
# # Exercise: a relay
#
# To lesson 00, [Start here](../notebooks/00_start_here.ipynb). Every rank has a number. At the end rank r shall have the
# sum of the numbers of ranks 0 to r, so the last rank has the sum of all. **Guess:** how many messages does that take?
#
# Write your code where it says so, try it, then run the check: as often as you like, and whatever your code does, it
# costs a few seconds and never the notebook.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import run
from lessons_lib.grading import hint, reveal

# %% [markdown] minutes=6 core=true
# ## The relay
#
# All ranks run the same function, so it has to ask which rank it is on. You need:
#
# | | |
# |---|---|
# | `dist.get_rank()` | which rank is this? |
# | `dist.get_world_size()` | how many are there? |
# | `dist.send(x, dst=3)` | send the tensor `x` to rank 3 |
# | `dist.recv(x, src=2)` | wait for a tensor from rank 2, and write it into `x` |

# %% nbgrader={"grade_id": "relay"}
def relay(x):
    """Return the sum of the numbers of ranks 0 to this one. ``x`` is this rank's,
    a tensor of one element.

    A number goes from rank to rank, and each adds its own: one message from every
    rank to the next.
    """
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    if rank > 0:
        before = torch.empty_like(x)
        dist.recv(before, src=rank - 1)
        x = before + x
    if rank + 1 < dist.get_world_size():
        dist.send(x, dst=rank + 1)
    return x
    ### END SOLUTION

# %% [markdown] core=true
# Try it. Ranks 0 to 3 bring 1, 2, 3 and 4, so the values should be 1, 3, 6 and 10, and three arrows lead downwards.

# %% name="try-relay"
run(lambda: relay(torch.tensor([dist.get_rank() + 1.0])), ranks=4)

# %% name="stuck"
# hint("00-relay")  # remove the first #, run up to three times

# %% [markdown] minutes=3 core=true
# ## Is it right?
#
# The check draws ranks and numbers anew, and looks at every rank: its value, what it sent, and whether anybody waits for
# ever. Parts that are right count.

# %% nbgrader={"grade_id": "00-relay", "grade": true}
from lessons_lib.grading import check

reports = [check("00-relay", relay)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("00-relay", relay, seed=2003))
    reports.append(check("00-relay", relay, seed=4007))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# All green? Rank 7 of eight could not begin before all the others had ended: a relay is a queue. Lesson 01 lets all
# ranks work at the same time. The library's own version: `reveal("00-relay")`.
