# %% [markdown] minutes=1 core=true
# # Exercise: tokens in zigzag, and Ulysses
#
# To lesson 12, [Who works, who talks](../notebooks/12_who_works_who_talks.ipynb). First deal out a text so that all ranks
# work alike. Then the other way: exchange heads for tokens. **Guess:** in which of the two do you need the places of the
# tokens?

# %% tags=["setup"]
import torch
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.mesh import exchange_exchange

TEXT = torch.arange(100, 117)[None]  # one sequence of 16 tokens, and the label of the last one

B, H, S, WIDTH, P = 1, 8, 12, 4, 4  # sequences, heads of queries, tokens, numbers per head, ranks
torch.manual_seed(12)
Q, dO = (torch.randn(B, H, S, WIDTH).double() for _ in range(2))
K, V = (torch.randn(B, 4, S, WIDTH).double() for _ in range(2))  # four heads of keys

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=5 core=true
# ## Deal the tokens
#
# Of 2 P pieces rank r gets piece r and piece 2 P - 1 - r. With every token go its label, which is the next token of the
# *text*, and its place.

# %% nbgrader={"grade_id": "deal"}
def deal(text, cp):
    """Return this rank's tokens, their labels and their places in the text,
    dealt out in zigzag.

    ``text`` is whole on every rank, B x (S+1): the token at place i, of S
    places, has the next one for a label. Of 2 P equal pieces rank r gets piece
    r, and behind it piece 2 P - 1 - r. Tokens and labels are B x S/P, places
    S/P. Nothing is sent.
    """
    ### BEGIN SOLUTION
    pieces = torch.arange(text.shape[1] - 1).chunk(2 * cp.size)
    at = torch.cat([pieces[cp.rank], pieces[2 * cp.size - 1 - cp.rank]])
    return text[:, at], text[:, at + 1], at
    ### END SOLUTION

# %% nbgrader={"grade_id": "pairs"}
def pairs(at):
    """Return how many pairs of a query and a key a rank works on, under a
    causal mask.

    ``at`` holds the places of its tokens in the text; each sees itself and all
    before it, on whichever rank.
    """
    ### BEGIN SOLUTION
    return (at + 1).sum()
    ### END SOLUTION

# %% [markdown] core=true
# Try it: the token at place i is 100 + i here. Every rank should have 34 pairs.

# %% name="try-deal"
def try_deal():
    return deal(TEXT, Mesh(cp=P)["cp"])

for rank, value in enumerate(run(try_deal, ranks=P).values):
    if value is not None:
        tokens, labels, at = value
        print(f"rank {rank}: tokens {tokens[0].tolist()}, labels {labels[0].tolist()}, pairs {pairs(at)}")

# %% name="stuck-deal"
# hint("12-zigzag")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "12-zigzag", "grade": true}
from lessons_lib.grading import check

reports = [check("12-zigzag", deal, pairs)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("12-zigzag", deal, pairs, seed=1213))
    reports.append(check("12-zigzag", deal, pairs, seed=3217))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=5 core=true
# ## Exchange
#
# Tokens are cut; heads are whole. Exchange, so that it is the other way round; attend, with any kernel that knows a
# causal mask; exchange back. There may be fewer heads of keys than of queries: `enable_gqa=True` shares them out.

# %% nbgrader={"grade_id": "ulysses"}
def ulysses(q, k, v, cp):
    """Return this rank's part of the causal attention, B x H x S/P x K, so
    that autograd finds dQ, dK and dV.

    ``q`` is B x H x S/P x K; ``k`` and ``v`` have the same shape or fewer
    heads, each for several neighbouring heads of q. P divides the heads of all
    three. Tokens lie contiguous, in the order of the ranks. Heads are
    exchanged for tokens and back: exchange_exchange(x, group, split_dim,
    concat_dim) of lessons_lib.mesh.
    """
    ### BEGIN SOLUTION
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return exchange_exchange(o, cp, 2, 1)
    ### END SOLUTION

# %% [markdown] core=true
# Try it: four exchanges forward, four backward.

# %% name="try-ulysses"
def try_ulysses():
    cp = Mesh(cp=P)["cp"]
    leaves = [cp.piece(whole, 2).requires_grad_() for whole in (Q, K, V)]
    o = ulysses(*leaves, cp)
    if o is None:
        return None
    o.backward(cp.piece(dO, 2))
    return [o.detach(), *(x.grad for x in leaves)]

leaves = [whole.clone().requires_grad_() for whole in (Q, K, V)]
O = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
truths = O.detach(), *torch.autograd.grad(O, leaves, dO)

# %% name="try-ulysses-run"
tried = run(try_ulysses, ranks=P)
if tried.values[0]:
    for name, blocks, truth in zip(("O", "dQ", "dK", "dV"), zip(*tried.values), truths):
        print(name, error(torch.cat(blocks, 2), truth))
    print("exchanges of rank 0:", len(tried.trace.collectives(0)))

# %% name="stuck-ulysses"
# hint("12-ulysses")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "12-ulysses", "grade": true}
from lessons_lib.grading import check

reports = [check("12-ulysses", ulysses)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("12-ulysses", ulysses, seed=1217))
    reports.append(check("12-ulysses", ulysses, seed=3221))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Zigzag needs the places, for its mask and its positions; inside Ulysses the tokens are all there and in order. The library's:
# [`assignment.py`](../lessons_lib/sequence_parallel/assignment.py), [`tokens.py`](../lessons_lib/sequence_parallel/tokens.py) and
# [`ulysses.py`](../lessons_lib/sequence_parallel/ulysses.py).
