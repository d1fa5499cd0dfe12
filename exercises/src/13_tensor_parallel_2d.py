# %% [markdown] minutes=1 core=true
# # Exercise: SUMMA
#
# To lesson 13, [Tensor parallel in 2D](../notebooks/13_tensor_parallel_2d.ipynb). Three products on a square grid of
# ranks, on which nothing is ever whole. **Guess:** how many lines does the forward take?
#
# `mesh["col"]` holds the ranks that differ in col: it runs along a grid *row*. `group.broadcast(x, root)` returns the root's
# x on every rank of the group; `group.reduce(x, root)` returns the sum on the root, and None on the others.

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.layout import coordinates

B, D, F = 18, 12, 24  # rows, model width, feed-forward width
torch.manual_seed(13)
X, W, dY = torch.randn(B, D).double(), torch.randn(D, F).double(), torch.randn(B, F).double()
LAYOUTS = {"X": Layout("B@row D@col"), "W": Layout("D@row F@col"), "Y": Layout("B@row F@col")}

def error(blocks, truth, layout, sizes):
    wholes = [layout.cut(truth, sizes, place) for place in coordinates(sizes)]
    return max(f"{(x - whole).norm() / whole.norm():.0e}" for x, whole in zip(blocks, wholes))

# %% [markdown] minutes=5 core=true
# ## Forward
#
# q steps. In each a block of X comes along the grid row and a block of W along the grid column, and their product is added to
# Y. A rank may hold two panels of each, one product and its Y; a whole row of blocks is too much.

# %% nbgrader={"grade_id": "summa"}
def summa(x, w, mesh):
    """Return this rank's block of Y = X W, on a square grid with the axes row
    and col.

    ``x`` is this rank's block of X, layout ``B@row D@col``; ``w`` that of W,
    ``D@row F@col``; Y lies as ``B@row F@col``. A rank holds two panels of X
    and two of W at most, and never a whole row of blocks.
    """
    ### BEGIN SOLUTION
    row, col = mesh["row"], mesh["col"]
    y = x.new_zeros(x.shape[0], w.shape[1])
    for step in range(col.size):
        x_panel = col.broadcast(x, step)
        y += x_panel @ row.broadcast(w, step)
    return y
    ### END SOLUTION

# %% [markdown] core=true
# Try it on a grid of nine. Rank 0 should send 112 elements: two blocks of X and two of W.

# %% name="try-summa"
GRID = {"row": 3, "col": 3}

def try_summa():
    mesh = Mesh(**GRID)
    return summa(LAYOUTS["X"].shard(X, mesh), LAYOUTS["W"].shard(W, mesh), mesh)

tried = run(try_summa, ranks=9)
if tried.values[0] is not None:
    print("Y", error(tried.values, X @ W, LAYOUTS["Y"], GRID), "  elements sent", tried.trace.bytes_sent(0) // 8)

# %% name="stuck-summa"
# hint("13-summa")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "13-summa", "grade": true}
from lessons_lib.grading import check

reports = [check("13-summa", summa)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("13-summa", summa, seed=2111))
    reports.append(check("13-summa", summa, seed=4129))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=8 core=true
# ## Backward
#
# $$dX_{il} = \sum_j dY_{ij} W_{lj}^T \qquad\qquad dW_{lj} = \sum_i X_{il}^T dY_{ij}$$
#
# Two loops. One matrix comes as it did forward; the terms go as a sum to the rank that owns the block. No rank is sent
# what it does not own.

# %% nbgrader={"grade_id": "backward"}
def summa_backward(dy, x, w, mesh):
    """Return this rank's blocks of dX and dW.

    ``dy`` is this rank's block of dY, layout ``B@row F@col``; ``x`` and ``w``
    are as in the forward, and dX and dW lie as X and W do.
    """
    ### BEGIN SOLUTION
    row, col = mesh["row"], mesh["col"]
    for step in range(col.size):
        total = col.reduce(dy @ row.broadcast(w, step).T, step)
        if col.rank == step:
            dx = total
    for step in range(row.size):
        total = row.reduce(col.broadcast(x, step).T @ dy, step)
        if row.rank == step:
            dw = total
    return dx, dw
    ### END SOLUTION

# %% [markdown] core=true
# Try it. Rank 0 should send twice what it sent forward, 224.

# %% name="try-backward"
def try_backward():
    mesh = Mesh(**GRID)
    x, w, dy = (LAYOUTS[name].shard(whole, mesh) for name, whole in (("X", X), ("W", W), ("Y", dY)))
    return summa_backward(dy, x, w, mesh)

tried = run(try_backward, ranks=9)
if tried.values[0]:
    dxs, dws = zip(*tried.values)
    print("dX", error(dxs, dY @ W.T, LAYOUTS["X"], GRID), "  dW", error(dws, X.T @ dY, LAYOUTS["W"], GRID),
          "  elements sent", tried.trace.bytes_sent(0) // 8)

# %% name="stuck-backward"
# hint("13-backward")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "13-backward", "grade": true}
from lessons_lib.grading import check

reports = [check("13-backward", summa_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("13-backward", summa_backward, seed=2113))
    reports.append(check("13-backward", summa_backward, seed=4133))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# The forward needs four lines. The library's, [`summa.py`](../lessons_lib/tensor_parallel/summa.py), are no longer; what it
# adds is in [`panels.py`](../lessons_lib/tensor_parallel/panels.py): the next panel travels while this one is multiplied.
