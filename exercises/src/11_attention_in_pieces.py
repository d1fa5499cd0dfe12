# %% [markdown] minutes=1 core=true
# # Exercise: ring attention
#
# To lesson 11, [Attention in pieces](../notebooks/11_attention_in_pieces.ipynb). First the merge, on one rank; then the ring,
# in both directions, with tokens that lie anywhere. **Guess:** on four ranks, how many messages does each send, forward
# and backward?
#
# `cp.shift(x, 1)` sends x to the right neighbour and returns what came from the left one.

# %% tags=["setup"]
import torch

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal

H, S, WIDTH, P = 2, 24, 4, 4  # heads, tokens, numbers per head, ranks
torch.manual_seed(11)
Q, K, V, dO = (torch.randn(H, S, WIDTH).double() for _ in range(4))
AT = torch.randperm(S).view(P, S // P)  # AT[r]: the places in the text of the tokens of rank r

def causal(q, k, v, places):
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(places[:, None] < places, -torch.inf)
    return scores.softmax(-1) @ v

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=4 core=true
# ## In blocks
#
# Keep the answer so far and, for every row, the logarithm of the sum of exp(score) so far. It begins with 0 and -inf. A
# block may hide all its keys from a query, the first block, too; and scores may be thousands.

# %% nbgrader={"grade_id": "merge"}
def attend_in_blocks(q, ks, vs, visible):
    """Return the attention of the queries to the keys of all blocks.

    ``q`` is H s K; block n has the keys ``ks[n]`` and the values ``vs[n]``,
    H t K, and ``visible[n]``, s t, is True where a query sees a key. Every
    query sees a key of some block, and may see none of another. Scores are
    q k / sqrt(K), and those of one block at a time are all that is held.
    """
    ### BEGIN SOLUTION
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for k, v, seen in zip(ks, vs, visible):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        finite = more.masked_fill(more == -torch.inf, 0)
        o, lse = (lse - finite).exp() * o + (scores - finite).exp() @ v, more
    return o
    ### END SOLUTION

# %% [markdown] core=true
# Try it with three blocks of the keys, the last one first: some queries see nothing in it.

# %% name="try-merge"
places = torch.arange(S)
blocks = [slice(16, 24), slice(0, 8), slice(8, 16)]
visible = [places[:, None] >= places[block] for block in blocks]
tried = attend_in_blocks(Q, [K[:, block] for block in blocks], [V[:, block] for block in blocks], visible)
if tried is not None:
    print("error", error(tried, causal(Q, K, V, places)))

# %% name="stuck-merge"
# hint("11-merge")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "11-merge", "grade": true}
from lessons_lib.grading import check

reports = [check("11-merge", attend_in_blocks)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("11-merge", attend_in_blocks, seed=1117))
    reports.append(check("11-merge", attend_in_blocks, seed=3119))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=9 core=true
# ## Round the ring
#
# Forward: your loop over blocks, whose keys come from the left. Backward, for the block that is here:
#
# $$A = e^{Z - lse} \qquad dZ = A \circ (dO\, V^T - \delta) \qquad dQ \mathrel{+}= dZ\, K \qquad dK \mathrel{+}= dZ^T Q \qquad dV \mathrel{+}= A^T dO$$
#
# with the scores Z = Q Kᵀ, scaled, hidden ones -inf, and δ the sum of dO O of each row. dZ is scaled once more, as the
# scores were. dK and dV so far came along with their keys.

# %% nbgrader={"grade_id": "ring-forward"}
def ring_forward(q, k, v, at, cp):
    """Return this rank's part of the causal attention, H s K, and the lse of
    each of its rows, H s 1.

    ``q``, ``k`` and ``v`` are this rank's, H s K. ``at[r]`` holds the places
    in the text of the s tokens of rank r of ``cp``; a token sees itself and
    those whose place is before its own. Keys and values go to the right
    neighbour, P - 1 times, and the scores of one block at a time are all that
    is held.
    """
    ### BEGIN SOLUTION
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for hop in range(cp.size):
        seen = at[cp.rank][:, None] >= at[(cp.rank - hop) % cp.size]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        finite = more.masked_fill(more == -torch.inf, 0)
        o, lse = (lse - finite).exp() * o + (scores - finite).exp() @ v, more
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
    return o, lse
    ### END SOLUTION

# %% nbgrader={"grade_id": "ring-backward"}
def ring_backward(do, q, k, v, o, lse, at, cp):
    """Return this rank's parts of dQ, dK and dV, each H s K.

    ``do`` is this rank's part of dO; ``o`` and ``lse`` are what ring_forward
    returned, the rest is as there. Keys and values go to the right neighbour
    P - 1 times, and their gradients go with them, P times.
    """
    ### BEGIN SOLUTION
    delta, scale = (do * o).sum(-1, keepdim=True), q.shape[-1] ** 0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(cp.size):
        seen = at[cp.rank][:, None] >= at[(cp.rank - hop) % cp.size]
        weights = ((q @ k.mT / scale).masked_fill(~seen, -torch.inf) - lse).exp()
        dz = weights * (do @ v.mT - delta) / scale
        dq += dz @ k
        dk, dv = cp.shift(torch.stack([dk + dz.mT @ q, dv + weights.mT @ do]), 1)
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
    return dq, dk, dv
    ### END SOLUTION

# %% [markdown] core=true
# Try them on four ranks. Rank 0 should send 3 messages forward and 7 backward.

# %% name="try-ring"
def try_ring():
    cp = Mesh(cp=P)["cp"]
    mine = AT[cp.rank]
    do, q, k, v = (whole[:, mine] for whole in (dO, Q, K, V))
    o, lse = ring_forward(q, k, v, AT, cp) or (None, None)
    return o, ring_backward(do, q, k, v, o, lse, AT, cp)

places = AT.flatten()
leaves = [whole[:, places].requires_grad_() for whole in (Q, K, V)]
O = causal(*leaves, places)
truths = torch.autograd.grad(O, leaves, dO[:, places])

# %% name="try-ring-run"
tried = run(try_ring, ranks=P)
outputs, gradients = zip(*tried.values)
if outputs[0] is not None:
    print("O", error(torch.cat(outputs, 1), O.detach()))
if gradients[0]:
    for name, blocks, truth in zip(("dQ", "dK", "dV"), zip(*gradients), truths):
        print(name, error(torch.cat(blocks, 1), truth))
    print("messages of rank 0:", sum(event.rank == 0 and event.kind == "send" for event in tried.trace.events))

# %% name="stuck-ring"
# hint("11-ring")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "11-ring", "grade": true}
from lessons_lib.grading import check

reports = [check("11-ring", ring_forward, ring_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("11-ring", ring_forward, ring_backward, seed=1123))
    reports.append(check("11-ring", ring_forward, ring_backward, seed=3121))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# One of the seven messages of the backward is the last hop home. A rank could keep the term of its own keys and begin the
# sums at its neighbour: then they are home after P - 1 hops. The check takes that, too. The library does as you did:
# [`ring.py`](../lessons_lib/sequence_parallel/ring.py).
