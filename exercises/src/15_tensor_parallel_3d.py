# %% [markdown] minutes=1 core=true
# # Exercise: two linears on a cube
#
# To lesson 15, [Tensor parallel in 3D](../notebooks/15_tensor_parallel_3d.ipynb). One linear on a cube of ranks, forward
# and backward, and then two in a row. **Guess:** how many collectives do forward and backward of one linear take?
#
# Each block is shared by the ranks along the axis that it does not depend on; each has a part of its rows.

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.layout import coordinates

SIZES = {"i": 2, "j": 2, "k": 2}
B, D, F = 8, 12, 16  # rows, model width, feed-forward width
torch.manual_seed(15)
X, dY = torch.randn(B, D).double(), torch.randn(B, F).double()
W1, W2 = torch.randn(D, F).double(), torch.randn(F, D).double()

def error(blocks, truth, layout):
    layout = Layout(layout)
    wholes = [layout.cut(truth, SIZES, place) for place in coordinates(SIZES)]
    return f"{max(((x - whole).norm() / whole.norm()).item() for x, whole in zip(blocks, wholes)):.0e}"

# %% [markdown] minutes=6 core=true
# ## One linear
#
# Rank (i, j, k) multiplies X[i,k] by W[k,j]. What has to be gathered, along which axis, and along which are the terms of
# Y, of dX, of dW?

# %% nbgrader={"grade_id": "cube"}
def cube_forward(x, w, mesh):
    """Return this rank's share of Y = X W, on a mesh of i, j and k.

    ``x`` is this rank's share of X, layout ``B@i@j D@k``; ``w`` that of W,
    ``D@k@i F@j``; Y lies as ``B@i@k F@j``.
    """
    ### BEGIN SOLUTION
    x_ik = mesh["j"].all_gather(x, dim=0)
    w_kj = mesh["i"].all_gather(w, dim=0)
    return mesh["k"].reduce_scatter(x_ik @ w_kj, dim=0)
    ### END SOLUTION

def cube_backward(dy, x, w, mesh):
    """Return this rank's shares of dX and dW.

    ``dy`` is this rank's share of dY, layout ``B@i@k F@j``; ``x`` and ``w``
    are as in the forward, and dX and dW lie as X and W do.
    """
    ### BEGIN SOLUTION
    dy_ij = mesh["k"].all_gather(dy, dim=0)
    w_kj = mesh["i"].all_gather(w, dim=0)
    dx = mesh["j"].reduce_scatter(dy_ij @ w_kj.T, dim=0)
    x_ik = mesh["j"].all_gather(x, dim=0)
    return dx, mesh["i"].reduce_scatter(x_ik.T @ dy_ij, dim=0)
    ### END SOLUTION

# %% [markdown] core=true
# Try it on a cube of eight. In a cube every mix-up of axes fits in shape, so look at the numbers.

# %% name="try-cube"
def try_cube():
    mesh = Mesh(**SIZES)
    x, w, dy = (Layout(layout).shard(whole, mesh) for layout, whole in (
        ("B@i@j D@k", X), ("D@k@i F@j", W1), ("B@i@k F@j", dY)))
    return cube_forward(x, w, mesh), cube_backward(dy, x, w, mesh)

ys, gradients = zip(*run(try_cube, ranks=8).values)
if ys[0] is not None:
    print("Y", error(ys, X @ W1, "B@i@k F@j"))
if gradients[0]:
    dxs, dws = zip(*gradients)
    print("dX", error(dxs, dY @ W1.T, "B@i@j D@k"), "  dW", error(dws, X.T @ dY, "D@k@i F@j"))

# %% name="stuck-cube"
# hint("15-cube")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "15-cube", "grade": true}
from lessons_lib.grading import check

reports = [check("15-cube", cube_forward, cube_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("15-cube", cube_forward, cube_backward, seed=2137))
    reports.append(check("15-cube", cube_forward, cube_backward, seed=4157))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=4 core=true
# ## Two in a row
#
# H does not lie as X does. So the second linear has other axes, and in the end Z lies as X did. Nothing is sent to bring
# H into another layout.

# %% nbgrader={"grade_id": "pair"}
def two_linears(x, w1, w2, mesh):
    """Return this rank's shares of H = X W1, in the layout ``B@i@k F@j``, and
    Z = H W2, in ``B@i@j D@k``.

    ``x`` lies as ``B@i@j D@k``, ``w1`` as ``D@k@i F@j``, and ``w2`` as
    ``F@j@i D@k``.
    """
    ### BEGIN SOLUTION
    i, j, k = mesh["i"], mesh["j"], mesh["k"]
    h = k.reduce_scatter(j.all_gather(x, 0) @ i.all_gather(w1, 0), 0)
    z = j.reduce_scatter(k.all_gather(h, 0) @ i.all_gather(w2, 0), 0)
    return h, z
    ### END SOLUTION

# %% [markdown] core=true
# Try it: both are right, and each rank has an eighth of each: 16 of the 128 elements of H, 12 of the 96 of Z.

# %% name="try-pair"
def try_pair():
    mesh = Mesh(**SIZES)
    x, w1, w2 = (Layout(layout).shard(whole, mesh) for layout, whole in (
        ("B@i@j D@k", X), ("D@k@i F@j", W1), ("F@j@i D@k", W2)))
    return two_linears(x, w1, w2, mesh)

both = run(try_pair, ranks=8).values
if both[0]:
    hs, zs = zip(*both)
    print("H", error(hs, X @ W1, "B@i@k F@j"), hs[0].numel(), "  Z", error(zs, X @ W1 @ W2, "B@i@j D@k"), zs[0].numel())

# %% name="stuck-pair"
# hint("15-pair")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "15-pair", "grade": true}
from lessons_lib.grading import check

reports = [check("15-pair", two_linears)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("15-pair", two_linears, seed=2141))
    reports.append(check("15-pair", two_linears, seed=4159))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Three collectives forward and five backward. The library's [`cube.py`](../lessons_lib/tensor_parallel/cube.py) has the
# axes in the object instead of in the lines: `Cube().exchanged()` is the same code with j and k exchanged.
