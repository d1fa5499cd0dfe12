# %% [markdown] minutes=1 core=true
# # Exercise: one layer ahead
#
# To lesson 06, [ZeRO 2 and 3](../notebooks/06_zero_2_and_3.ipynb): a rank runs layers that it does not hold. **Guess:** of
# six layers on four ranks, how many are in the memory of a rank at most, its own pieces included?
#
# `start(w, dp)` begins to gather a layer. It returns `W`, which has memory and not yet its numbers, and the work
# that brings them: after `.wait()` they are there. `W` and the work each keep that memory alive.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.machines import Link, Machine

def start(w, dp):
    W = w.new_empty(dp.size * w.shape[0], w.shape[1])
    return W, dist.all_gather_single(W, w, group=dp.process_group, async_op=True)

L, D, B = 6, 64, 16
GPUS = Machine("small GPUs", flops_per_s=3.3e9, in_node=Link(bandwidth_bytes_per_s=3.5e9))
torch.manual_seed(6)
X, WS = torch.randn(B, D).double(), [torch.randn(D, D).double() / D**0.5 for _ in range(L)]

# %% [markdown] minutes=9 core=true
# ## Gather, free, one ahead
#
# Numbers and bytes are the same whether you gather in time, early, or everything at once. The check also looks at the
# memory, and at the clock of a machine on which gathering a layer takes 7 µs and computing it 10.

# %% nbgrader={"grade_id": "forward"}
def forward_ahead(x, ws, dp):
    """Return this rank's rows after all layers: each makes ``tanh(x @ W)`` of x.

    ``x`` is this rank's rows, B x D, and ``ws`` its piece of each layer's W,
    layout ``D@dp D``. While a layer computes the next one is on its way, and
    no more than these two are ever whole.
    """
    ### BEGIN SOLUTION
    coming = start(ws[0], dp)
    for following in [*ws[1:], None]:
        W, arrives = coming
        arrives.wait()
        if following is not None:
            coming = start(following, dp)
        x = torch.tanh(x @ W)
    return x
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks: about 67 µs. One gap at the beginning, then lanes without gaps; in memory the pieces, two layers
# and some rows.

# %% name="try-forward"
def try_forward():
    dp = Mesh(dp=4)["dp"]
    ws = [dp.piece(W, 0).clone() for W in WS]
    return forward_ahead(dp.piece(X, 0), ws, dp)

tried = run(try_forward, ranks=4, machine=GPUS, record=("memory",))
if tried.values[0] is not None:
    Y = X
    for W in WS:
        Y = torch.tanh(Y @ W)
    print(f"error {(torch.cat(tried.values) - Y).norm() / Y.norm():.0e}, {tried.trace.timeline.makespan * 1e6:.1f} µs,",
          f"peak {(tried.trace.peak_bytes(0) - X.nbytes) / WS[0].nbytes - L:.1f} layers, beside X and WS")
tried

# %% name="stuck-forward"
# hint("06-forward")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "06-forward", "grade": true}
from lessons_lib.grading import check

reports = [check("06-forward", forward_ahead)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("06-forward", forward_ahead, seed=2161))
    reports.append(check("06-forward", forward_ahead, seed=4211))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## Afterwards
#
# Six quarters of its own and two whole layers: three and a half. With sixty layers there would be fifteen and two. In the
# library's [`zero.py`](../lessons_lib/data_parallel/zero.py) hooks around each layer do the same, and once more backward.
