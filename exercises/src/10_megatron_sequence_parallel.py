# %% [markdown] minutes=1 core=true
# # Exercise: stop an all-reduce halfway
#
# To lesson 10, [Megatron sequence parallel](../notebooks/10_megatron_sequence_parallel.ipynb). First the two halves as
# autograd needs them, then ten steps of training in which no rank ever has all of the stream. **Guess:** which of its four
# parameters, gamma, bias, W1 and W2, have gradients that need a sum over ranks?
#
# `tp` is the group of ranks: `tp.all_gather(x, 0)` puts every rank's `x` one after the other, `tp.reduce_scatter(x, 0)` adds
# them up and leaves each rank its part of the rows.

# %% tags=["setup"]
import torch
from torch.nn.functional import gelu, layer_norm

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal

S, D, F = 8, 4, 12  # tokens, model width, feed-forward width
torch.manual_seed(10)
X, T, gamma, bias = (torch.randn(shape).double() for shape in ((S, D), (S, D), (D,), (D,)))
W1, W2 = torch.randn(D, F).double(), torch.randn(F, D).double()

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=4 core=true
# ## The pair
#
# As *f* and *g* in lesson 08: a `torch.autograd.Function` each, and what `forward` leaves in `ctx`, `backward` finds there.

# %% nbgrader={"grade_id": "pair"}
### BEGIN SOLUTION
class GatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.all_gather(x, 0)

    @staticmethod
    def backward(ctx, dy):
        return ctx.tp.reduce_scatter(dy, 0), None

class ReduceScatterGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.reduce_scatter(x, 0)

    @staticmethod
    def backward(ctx, dy):
        return ctx.tp.all_gather(dy, 0), None
### END SOLUTION

def gather_reduce_scatter(x, tp):
    """Return the tokens of all ranks of ``tp``, one after the other; ``x`` is
    this rank's, S/p x D.

    Before a column-parallel layer: every rank does other work with them, so
    the gradient comes in terms.
    """
    ### BEGIN SOLUTION
    return GatherReduceScatter.apply(x, tp)
    ### END SOLUTION

def reduce_scatter_gather(x, tp):
    """Return this rank's tokens of the sum over ``tp``; ``x`` is this rank's
    term, S x D.

    Behind a row-parallel layer.
    """
    ### BEGIN SOLUTION
    return ReduceScatterGather.apply(x, tp)
    ### END SOLUTION

# %% [markdown] core=true
# Try both on four ranks, with ones, and a gradient of ones. From one token on each rank the gather makes four ones, and the
# gradient of the one is 4; from four tokens the other one makes one, a 4, and the gradient is four ones.

# %% name="try-pair"
def try_pair(function, n_tokens):
    x = torch.ones(n_tokens, 1, requires_grad=True)
    y = function(x, Mesh(tp=4)["tp"])
    if y is None:
        return None
    y.backward(torch.ones_like(y))
    return y.flatten().tolist(), x.grad.flatten().tolist()

print("gather, then reduce-scatter:", run(try_pair, gather_reduce_scatter, 1, ranks=4).values[0])
print("reduce-scatter, then gather:", run(try_pair, reduce_scatter_gather, 4, ranks=4).values[0])

# %% name="stuck-pair"
# hint("10-pair")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "10-pair", "grade": true}
from lessons_lib.grading import check

reports = [check("10-pair", gather_reduce_scatter, reduce_scatter_gather)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("10-pair", gather_reduce_scatter, reduce_scatter_gather, seed=2113))
    reports.append(check("10-pair", gather_reduce_scatter, reduce_scatter_gather, seed=4129))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=6 core=true
# ## Ten steps
#
# The MLP branch of a block: a norm with the weight gamma, two matrices, and a bias behind the second. The norm and the
# addition to X work on this rank's tokens. After ten steps all ranks must have the same gamma and bias, to the last bit.
#
# `torch.autograd.grad(loss, parameters)` returns the gradients and leaves nothing behind. Is the pair above not right yet?
# `lessons_lib.mesh` has both by the same names.

# %% nbgrader={"grade_id": "train"}
def train(x, t, gamma, bias, w1, w2, n_steps, tp):
    """Return gamma, bias, w1 and w2 after ``n_steps`` steps of SGD, each
    ``w -= 0.001 * gradient``.

    The loss is |Y - T|² / 2, summed over all tokens, and
    Y = X + gelu((layer_norm(X) * gamma) W1) W2 + bias. ``x`` and ``t`` are
    this rank's tokens of X and T, S/p x D: layout ``S@tp D``. ``gamma`` and
    ``bias`` have D numbers, the same on every rank; ``w1`` is cut ``D F@tp``
    and ``w2`` ``F@tp D``.
    """
    ### BEGIN SOLUTION
    for _ in range(n_steps):
        leaves = [each.detach().requires_grad_() for each in (gamma, bias, w1, w2)]
        gamma, bias, w1, w2 = leaves
        normed = layer_norm(x, x.shape[-1:]) * gamma
        h = gelu(gather_reduce_scatter(normed, tp) @ w1)
        y = x + reduce_scatter_gather(h @ w2, tp) + bias
        dgamma, dbias, dw1, dw2 = torch.autograd.grad((y - t).square().sum() / 2, leaves)
        gradients = tp.all_reduce(dgamma), tp.all_reduce(dbias), dw1, dw2
        gamma, bias, w1, w2 = (each.detach() - 0.001 * gradient for each, gradient in zip(leaves, gradients))
    return gamma, bias, w1, w2
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks, beside the same training on one. Do all four have the same bits?

# %% name="try-train"
def try_train(n_steps=10):
    mesh = Mesh(tp=torch.distributed.get_world_size())
    cut = [Layout(layout).shard(whole, mesh) for layout, whole in
           (("S@tp D", X), ("S@tp D", T), ("D", gamma), ("D", bias), ("D F@tp", W1), ("F@tp D", W2))]
    return train(*cut, n_steps, mesh["tp"])

one, four = run(try_train, ranks=1).values, run(try_train, ranks=4).values
if one[0]:
    for at, name in enumerate(("gamma", "bias")):
        same = all(torch.equal(mine[at], four[0][at]) for mine in four)
        print(name, "beside one rank", error(four[0][at], one[0][at]), "  the same bits on all ranks:", same)

# %% name="stuck-train"
# hint("10-train")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "10-train", "grade": true}
from lessons_lib.grading import check

reports = [check("10-train", train)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("10-train", train, seed=2129))
    reports.append(check("10-train", train, seed=4133))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Two of the four: gamma and bias, which all ranks have. w1 and w2 are parts, and each saw all tokens. The library's pair is
# in [`mesh.py`](../lessons_lib/mesh.py), and a whole block in [`megatron.py`](../lessons_lib/sequence_parallel/megatron.py).
