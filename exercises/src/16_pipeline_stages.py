# %% [markdown] minutes=1 core=true
# # Exercise: GPipe on real stages
#
# To lesson 16, [Pipeline I: stages](../notebooks/16_pipeline_stages.ipynb). Every rank has one matrix of a deep model, of a size
# of its own, and talks to its two neighbours only. **Guess:** which rank needs to know the loss?

# %% tags=["setup"]
from itertools import pairwise

import torch

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.machines import Machine

SIZES = (4, 7, 5, 6)  # of rows and columns: w is 4 x 7 on rank 0, 7 x 5 on rank 1, 5 x 6 on rank 2
ROWS = (3, 1, 4, 2)  # of four micro-batches
torch.manual_seed(16)
WS = [torch.randn(d, f).double() for d, f in pairwise(SIZES)]
XS = [torch.randn(n, SIZES[0]).double() for n in ROWS]
TARGETS = [torch.randn(n, SIZES[-1]).double() for n in ROWS]

# %% [markdown] minutes=8 core=true
# ## One step
#
# First all forwards, then all backwards. Send what a neighbour needs as soon as there is one: stages shall work at the same
# time, and the check looks at a clock. `pp.send(x, rank)` sends to a rank of the group, and `pp.recv(like, rank)` returns
# what it sends, in a new tensor of the shape of `like`. What arrives belongs to no graph: it needs `.requires_grad_()`. The
# loss is divided once, by the rows of *all* micro-batches, which are not of one size.

# %% nbgrader={"grade_id": "gpipe"}
def gpipe_step(w, xs, targets, rows, pp):
    """Return the gradient of this stage's ``w`` after one step of GPipe.

    A stage is y = tanh(x @ w); ``w`` has other sizes on every rank of ``pp``.
    There are ``len(rows)`` micro-batches, the k-th of ``rows[k]`` rows. Rank 0
    has their inputs in ``xs``, the last rank what should come out in
    ``targets``; on all others these lists are empty. The loss is the sum of
    all squares of y - target, divided by the number of all rows of all
    micro-batches.
    """
    ### BEGIN SOLUTION
    r, last = pp.rank, pp.size - 1
    w = w.detach().clone().requires_grad_()
    ins, outs = [], []
    for k, n in enumerate(rows):
        x = xs[k] if r == 0 else pp.recv(w.new_empty(n, len(w)), r - 1)
        ins.append(x.detach().requires_grad_(r > 0))
        outs.append(torch.tanh(ins[k] @ w))
        if r < last:
            pp.send(outs[k].detach(), r + 1)
    for k, y in enumerate(outs):
        if r == last:
            ((y - targets[k]) ** 2 / sum(rows)).sum().backward()
        else:
            y.backward(pp.recv(y.detach(), r + 1))
        if r > 0:
            pp.send(ins[k].grad, r - 1)
    return w.grad
    ### END SOLUTION

# %% [markdown] core=true
# Try it: three ranks, beside the serial gradients.

# %% name="try-gpipe"
def try_gpipe():
    pp = Mesh(pp=3)["pp"]
    xs, targets = XS if pp.rank == 0 else [], TARGETS if pp.rank == 2 else []
    return gpipe_step(WS[pp.rank], xs, targets, list(ROWS), pp)

ws = [w.clone().requires_grad_() for w in WS]
y = torch.cat(XS)
for w in ws:
    y = torch.tanh(y @ w)
((y - torch.cat(TARGETS)) ** 2 / sum(ROWS)).sum().backward()
tried = run(try_gpipe, ranks=3, machine=Machine("free"))
for rank, found in enumerate(tried.values):
    if found is not None:
        print(f"rank {rank}: error {(found - ws[rank].grad).norm() / ws[rank].grad.norm():.0e}")

# %% name="stuck-gpipe"
# hint("16-gpipe")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "16-gpipe", "grade": true}
from lessons_lib.grading import check

reports = [check("16-gpipe", gpipe_step)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("16-gpipe", gpipe_step, seed=2161))
    reports.append(check("16-gpipe", gpipe_step, seed=4161))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Only the last rank could say what the loss is; the others had a gradient without ever seeing one. With four micro-batches and
# three ranks, 8 messages went over each border.
