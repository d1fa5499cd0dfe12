# %% [markdown] minutes=1 core=true
# # Exercise: sharded Adam
#
# To lesson 05, [ZeRO 1](../notebooks/05_zero_1.ipynb): the all-reduce stopped halfway, with Adam between its halves.
# **Guess:** of the five vectors that Adam works with, weights, gradient, two moments and what is sent, which are whole?
#
# `dp.reduce_scatter(x, 0)` returns this rank's piece of the sum of every rank's `x`, `dp.all_gather(x, 0)` all ranks' `x`
# one after the other, and `dp.piece(x, 0)` this rank's piece of its own `x`. The three need a length that p divides.

# %% tags=["setup"]
import torch
from torch import nn
from torch.optim import Adam

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal

torch.manual_seed(5)
N = 601
W, X, Y = torch.randn(N).double(), torch.randn(24, N).double(), torch.randn(24).double()

# %% [markdown] minutes=9 core=true
# ## A model of one row of weights
#
# Its loss is |X W - Y|² / 2, a sum over all rows, and `x.T @ (x @ W - y)` this rank's term of the gradient. A check of
# numbers passes plain data parallel training, too, and so does one of bytes: here what a rank *holds* is measured.

# %% nbgrader={"grade_id": "adam"}
def sharded_adam(W, x, y, n_steps, dp):
    """Return all N weights after ``n_steps`` steps of ``Adam(lr=0.1, eps=0.1)``
    on the loss |X W - Y|² / 2.

    ``W`` has one dim, N weights, and is the same on every rank. ``x`` and
    ``y`` are this rank's rows of X, B x N, and of Y, so ``x.T @ (x @ W - y)``
    is its term of the gradient. A rank keeps the moments of N/p weights,
    rounded up: p need not divide N.
    """
    ### BEGIN SOLUTION
    n = len(W)
    padding = (0, -n % dp.size)
    piece = nn.Parameter(dp.piece(nn.functional.pad(W, padding), 0))
    optimizer = Adam([piece], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        term = x.T @ (x @ W - y)
        piece.grad = dp.reduce_scatter(nn.functional.pad(term, padding), 0)
        optimizer.step()
        W = dp.all_gather(piece.detach(), 0)[:n]
    return W
    ### END SOLUTION

# %% [markdown] core=true
# Try it, with 601 weights, beside one Adam that has all rows. On 8 ranks the peak should stay well below five vectors;
# plain data parallel training takes six.

# %% name="try-adam"
def serially(n_steps):
    w = nn.Parameter(W.clone())
    optimizer = Adam([w], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        w.grad = X.T @ (X @ w.detach() - Y)
        optimizer.step()
    return w.detach()

def try_adam(w, x, y):
    dp = Mesh(dp=8)["dp"]
    return sharded_adam(w, x[dp.rank], y[dp.rank], 3, dp)

tried = run(try_adam, W, X.split(3), Y.split(3), ranks=8, record=("memory",))
if tried.values[0] is not None:
    print(f"error {max((w - serially(3)).norm() / serially(3).norm() for w in tried.values):.0e},",
          f"peak {(tried.trace.peak_bytes(0) - W.nbytes - X.nbytes - Y.nbytes) / W.nbytes:.1f} vectors")

# %% name="stuck-adam"
# hint("05-adam")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "05-adam", "grade": true}
from lessons_lib.grading import check

reports = [check("05-adam", sharded_adam)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("05-adam", sharded_adam, seed=2153))
    reports.append(check("05-adam", sharded_adam, seed=4201))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## Afterwards
#
# Weights are whole, because every rank computes with them, and so is the term of the gradient as backward makes it. Its
# sum, and the two moments, are pieces. The library's [`Unit`](../lessons_lib/data_parallel/unit.py) does this for one
# layer after the other.
