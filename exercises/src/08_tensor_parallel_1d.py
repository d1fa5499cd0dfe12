# %% [markdown] minutes=1 core=true
# # Exercise: cut a layer, cut an MLP
#
# To lesson 08, [Tensor parallel in 1D](../notebooks/08_tensor_parallel_1d.ipynb). A linear layer cut by columns, one cut by
# rows, the pair of functions that tells autograd about the communication, and the MLP they make. **Guess:** how many of
# these seven functions communicate?
#
# `tp` is the group of ranks: `tp.all_reduce(x)` returns the sum of every rank's `x`. Capitals are whole, small letters are
# what this rank holds.

# %% tags=["setup"]
import torch
from torch.nn.functional import gelu

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal

B, D, F = 3, 8, 12  # rows, model width, feed-forward width
torch.manual_seed(8)
X, dY = torch.randn(B, D).double(), torch.randn(B, F).double()
W1, W2 = torch.randn(D, F).double(), torch.randn(F, D).double()

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=4 core=true
# ## Column: W lies as `D F@tp`
#
# Forward and backward, by hand. Which of the three, Y, dX and dW, is a sum to which every rank has a term?

# %% nbgrader={"grade_id": "column"}
def column_forward(x, w, tp):
    """Return this rank's columns of Y = X W.

    ``x`` is all of X, B x D; ``w`` this rank's columns of W, D x F/p: layout
    ``D F@tp``.
    """
    ### BEGIN SOLUTION
    return x @ w
    ### END SOLUTION

def column_backward(dy, x, w, tp):
    """Return dX, whole on every rank, and this rank's columns of dW.

    ``dy`` is this rank's columns of dY, B x F/p; ``x`` and ``w`` are as in
    the forward.
    """
    ### BEGIN SOLUTION
    term = dy @ w.T
    dw = x.T @ dy
    return tp.all_reduce(term), dw
    ### END SOLUTION

# %% [markdown] core=true
# Try it on three ranks, beside the serial layer.

# %% name="try-column"
def try_column():
    mesh = Mesh(tp=3)
    w, dy = Layout("D F@tp").shard(W1, mesh), Layout("B F@tp").shard(dY, mesh)
    return column_forward(X, w, mesh["tp"]), column_backward(dy, X, w, mesh["tp"])

y, gradients = run(try_column, ranks=3).values[0]
if gradients:
    print("Y", error(y, (X @ W1)[:, :4]), "  dX", error(gradients[0], dY @ W1.T))

# %% name="stuck-column"
# hint("08-column")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "08-column", "grade": true}
from lessons_lib.grading import check

reports = [check("08-column", column_forward, column_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("08-column", column_forward, column_backward, seed=2083))
    reports.append(check("08-column", column_forward, column_backward, seed=4091))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=3 core=true
# ## Row: W lies as `D@tp F`
#
# The mirror image. Now x is cut, too: `B D@tp`, as the column-cut layer leaves it.

# %% nbgrader={"grade_id": "row"}
def row_forward(x, w, tp):
    """Return Y = X W, whole on every rank.

    ``x`` is this rank's columns of X, B x D/p; ``w`` this rank's rows of W,
    D/p x F: layout ``D@tp F``.
    """
    ### BEGIN SOLUTION
    term = x @ w
    return tp.all_reduce(term)
    ### END SOLUTION

def row_backward(dy, x, w, tp):
    """Return this rank's columns of dX and this rank's rows of dW.

    ``dy`` is all of dY, B x F; ``x`` and ``w`` are as in the forward.
    """
    ### BEGIN SOLUTION
    dx = dy @ w.T
    dw = x.T @ dy
    return dx, dw
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks.

# %% name="try-row"
def try_row():
    mesh = Mesh(tp=4)
    x, w = Layout("B D@tp").shard(X, mesh), Layout("D@tp F").shard(W1, mesh)
    return row_forward(x, w, mesh["tp"]), row_backward(dY, x, w, mesh["tp"])

y, gradients = run(try_row, ranks=4).values[0]
if gradients:
    print("Y", error(y, X @ W1), "  dX", error(gradients[0], (dY @ W1.T)[:, :2]))

# %% name="stuck-row"
# hint("08-row")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "08-row", "grade": true}
from lessons_lib.grading import check

reports = [check("08-row", row_forward, row_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("08-row", row_forward, row_backward, seed=2087))
    reports.append(check("08-row", row_forward, row_backward, seed=4093))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=4 core=true
# ## The pair f and g
#
# The same communication, written so that autograd finds it. A `torch.autograd.Function` says what is done forward and
# what is done to the gradient. In `backward`, `ctx` brings what `forward` left there.
#
# Write two of them, and let `copy_sum` and `sum_copy` apply them.

# %% nbgrader={"grade_id": "pair"}
### BEGIN SOLUTION
class CopySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.tp.all_reduce(dy), None

class SumCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None
### END SOLUTION

def copy_sum(x, tp):
    """Return x as it is; backward, the gradients of all ranks of ``tp`` are
    added up. Megatron's f."""
    ### BEGIN SOLUTION
    return CopySum.apply(x, tp)
    ### END SOLUTION

def sum_copy(x, tp):
    """Return the sum of x over ``tp``; backward, every rank gets the gradient
    as it is. Megatron's g."""
    ### BEGIN SOLUTION
    return SumCopy.apply(x, tp)
    ### END SOLUTION

# %% [markdown] core=true
# Try both on four ranks, with x = 1 and a gradient of 1. *f* gives 1, and backward 4; *g* gives 4, and backward 1.

# %% name="try-pair"
def try_pair(function):
    x = torch.ones(1, requires_grad=True)
    y = function(x, Mesh(tp=4)["tp"])
    if y is None:
        return None
    y.backward(torch.ones(1))
    return y.item(), x.grad.item()

print("f", run(try_pair, copy_sum, ranks=4).values)
print("g", run(try_pair, sum_copy, ranks=4).values)

# %% name="stuck-pair"
# hint("08-pair")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "08-pair", "grade": true}
from lessons_lib.grading import check

reports = [check("08-pair", copy_sum, sum_copy)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("08-pair", copy_sum, sum_copy, seed=2089))
    reports.append(check("08-pair", copy_sum, sum_copy, seed=4099))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=3 more=true
# ## More: the MLP
#
# Everything together: one sum forward, one backward, and autograd does the rest.

# %% nbgrader={"grade_id": "mlp"} more=true
def mlp(x, w1, w2, tp):
    """Return Y = gelu(X W1) W2, whole on every rank, so that autograd finds
    dX, dW1 and dW2.

    ``x`` is all of X, B x D, on every rank; ``w1`` is cut ``D F@tp`` and
    ``w2`` ``F@tp D``.
    """
    ### BEGIN SOLUTION
    h = gelu(copy_sum(x, tp) @ w1)
    return sum_copy(h @ w2, tp)
    ### END SOLUTION

# %% [markdown] more=true
# Try it on four ranks: one upright line through all lanes, for the one sum forward.

# %% name="try-mlp" more=true
def try_mlp():
    mesh = Mesh(tp=4)
    w1, w2 = Layout("D F@tp").shard(W1, mesh), Layout("F@tp D").shard(W2, mesh)
    y = mlp(X, w1, w2, mesh["tp"])
    return None if y is None else error(y, gelu(X @ W1) @ W2)

run(try_mlp, ranks=4)

# %% name="stuck-mlp" more=true
# hint("08-mlp")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "08-mlp", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("08-mlp", mlp)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("08-mlp", mlp, seed=2099))
    reports.append(check("08-mlp", mlp, seed=4111))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=4 more=true
# ## More: the bias
#
# A row-cut layer with a bias, which is whole on every rank. Where does it belong, and what is its gradient?

# %% nbgrader={"grade_id": "bias"} more=true
def bias_forward(x, w, bias, tp):
    """Return Y = X W + bias, whole on every rank.

    ``x`` and ``w`` are cut as for the row-parallel layer; ``bias`` is whole,
    F elements, on every rank.
    """
    ### BEGIN SOLUTION
    return row_forward(x, w, tp) + bias
    ### END SOLUTION

def bias_backward(dy, x, w, tp):
    """Return this rank's columns of dX, its rows of dW, and dbias, whole on
    every rank.

    ``dy`` is all of dY, B x F; ``x`` and ``w`` are as in the forward.
    """
    ### BEGIN SOLUTION
    dx, dw = row_backward(dy, x, w, tp)
    return dx, dw, dy.sum(dim=0)
    ### END SOLUTION

# %% [markdown] more=true
# Try it: with a weight of zeros and a bias of ones, every number of Y is 1 on any number of ranks.

# %% name="try-bias" more=true
def try_bias(ranks):
    x, w, bias = torch.ones(1, 2), torch.zeros(2, 3), torch.ones(3)
    return bias_forward(x, w, bias, Mesh(tp=ranks)["tp"])

for ranks in (1, 2, 4):
    print(ranks, "ranks:", run(try_bias, ranks, ranks=ranks).values[0])

# %% name="stuck-bias" more=true
# hint("08-bias")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "08-bias", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("08-bias", bias_forward, bias_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("08-bias", bias_forward, bias_backward, seed=2111))
    reports.append(check("08-bias", bias_forward, bias_backward, seed=4127))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Five of the seven communicate: column backward, row forward, *f* (only backward), *g* (only forward), and the MLP
# through these two. The library's versions are [`column.py`](../lessons_lib/tensor_parallel/column.py) and
# [`row.py`](../lessons_lib/tensor_parallel/row.py): no longer than yours.
