# %% [markdown] minutes=1 core=true
# # Exercise: what depth is owed
#
# To lesson 14, [Tensor parallel in 2.5D](../notebooks/14_tensor_parallel_25d.ipynb). Several square grids, each with rows of
# its own; what is a sum over rows has to be added up across them. **Guess:** of dX, dW, the gradient of a bias, and those of
# a norm, how many need the sum over depth?

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import Summa

SIZES = {"depth": 3, "row": 2, "col": 2}
B, D, F = 36, 8, 12  # rows, model width, outputs
torch.manual_seed(14)
X, W, dY = torch.randn(B, D).double(), torch.randn(D, F).double(), torch.randn(B, F).double()
LAYOUTS = {"X": Layout("B@depth@row D@col"), "W": Layout("D@row F@col"), "Y": Layout("B@depth@row F@col")}

def error(blocks, truth, layout):
    wholes = [layout.cut(truth, SIZES, place) for place in coordinates(SIZES)]
    return f"{max(((x - whole).norm() / whole.norm()).item() for x, whole in zip(blocks, wholes)):.0e}"

# %% [markdown] minutes=6 core=true
# ## Weight and bias
#
# Inside a layer SUMMA does it all: `Summa().backward(dy, x, w, mesh)` returns the layer's dx and dw. What is left is
# between the layers, and the bias.

# %% nbgrader={"grade_id": "linear"}
def tesseract_backward(dy, x, w, mesh):
    """Return this rank's blocks of dX, dW and dbias of Y = X W + bias, on a
    mesh of depth, row and col.

    ``dy`` is this rank's block of dY, layout ``B@depth@row F@col``; ``x`` that
    of X, ``B@depth@row D@col``; ``w`` that of W, ``D@row F@col``. The bias
    lies as ``F@col``. ``Summa().backward(dy, x, w, mesh)`` does what happens
    inside a layer, and returns two blocks.
    """
    ### BEGIN SOLUTION
    dx, dw = Summa().backward(dy, x, w, mesh)
    dbias = over_rows(dy.sum(0), mesh)
    return dx, mesh["depth"].all_reduce(dw), dbias

def over_rows(term, mesh):
    """The sum over both axes that cut the rows."""
    return mesh["depth"].all_reduce(mesh["row"].all_reduce(term))
    ### END SOLUTION

# %% [markdown] core=true
# Try it on three layers of four ranks.

# %% name="try-linear"
def try_linear():
    mesh = Mesh(**SIZES)
    x, w, dy = (LAYOUTS[name].shard(whole, mesh) for name, whole in (("X", X), ("W", W), ("Y", dY)))
    return tesseract_backward(dy, x, w, mesh)

gradients = run(try_linear, ranks=12).values
if gradients[0]:
    dxs, dws, dbiases = zip(*gradients)
    print("dX", error(dxs, dY @ W.T, LAYOUTS["X"]), "  dW", error(dws, X.T @ dY, LAYOUTS["W"]),
          "  dbias", error(dbiases, dY.sum(0), Layout("F@col")))

# %% name="stuck-linear"
# hint("14-linear")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "14-linear", "grade": true}
from lessons_lib.grading import check

reports = [check("14-linear", tesseract_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("14-linear", tesseract_backward, seed=2129))
    reports.append(check("14-linear", tesseract_backward, seed=4139))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=5 core=true
# ## The norm
#
# The end of a LayerNorm: Y = normed * gain + bias, with one gain and one bias per column. On one rank their gradients are
# `(dy * normed).sum(0)` and `dy.sum(0)`.

# %% nbgrader={"grade_id": "norm"}
def norm_backward(dy, normed, mesh):
    """Return this rank's parts of dgain and dbias of Y = normed * gain + bias,
    the end of a LayerNorm.

    ``dy`` and ``normed`` are this rank's blocks, layout ``B@depth@row D@col``;
    gain and bias have one number per column and lie as ``D@col``.
    """
    ### BEGIN SOLUTION
    dgain = (dy * normed).sum(0)
    for axis in ("row", "depth"):
        dgain = mesh[axis].all_reduce(dgain)
    return dgain, mesh["depth"].all_reduce(mesh["row"].all_reduce(dy.sum(0)))
    ### END SOLUTION

# %% [markdown] core=true
# Try it with ones: dY and normed are 1 everywhere. Then every number of dgain and of dbias is the number of rows, 36.

# %% name="try-norm"
def try_norm():
    mesh = Mesh(**SIZES)
    ones = Layout("B@depth@row D@col").shard(torch.ones(B, D), mesh)
    return norm_backward(ones, ones, mesh)

print(run(try_norm, ranks=12).values[0])

# %% name="stuck-norm"
# hint("14-norm")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "14-norm", "grade": true}
from lessons_lib.grading import check

reports = [check("14-norm", norm_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("14-norm", norm_backward, seed=2131))
    reports.append(check("14-norm", norm_backward, seed=4153))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# All but dX, which has the rows of X. A parameter's gradient is added up over every axis that cuts the data and not the
# parameter: for W that was left to depth, since SUMMA had added up over row; for bias and norm it is row and depth. The
# library's version is [`tesseract.py`](../lessons_lib/tensor_parallel/tesseract.py).
