# %% [markdown] minutes=1 core=true
# # Attention in pieces
#
# A text of 100,000 tokens has 10,000,000,000 scores in every head, 20 GB in bf16. So we cut the *sequence*: each rank has
# some of the tokens. But every token looks at all the others, and a softmax is over *all* of them. **Two ranks each took
# the softmax over their own half of the keys. Can you merge the two answers?**

# %% tags=["setup"]
import math

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.views import layout_picture

B, H, S, WIDTH = 1, 2, 16, 8  # sequences, heads, tokens, numbers per head
torch.manual_seed(0)
Q, K, V, dO = (torch.randn(B, H, S, WIDTH, dtype=torch.float64) for _ in range(4))
SEQUENCE = Layout("B H S@cp K")  # cp: context parallel

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("11")

# %% [markdown] minutes=2 core=true
# ## Two halves
#
# The smallest case: one query, two ranks, one key each. Rank 0's key has the score 0 and the value 1. Rank 1's key has
# the score ln 3 and the value 5. A softmax over a single key is 1, so rank 0 answers 1 and rank 1 answers 5.

# %% name="merged-guess"
merged = predict(
    "What does attention over both keys answer?",
    A="3, the mean of 1 and 5", B="4",
    C="5, the answer of the key with the higher score",
    D="nobody can say: a softmax needs all scores in one place",
)

# %% name="merged-value"
scores, values = torch.tensor([0.0, math.log(3)]), torch.tensor([1.0, 5.0])
weights = scores.softmax(0)
print("weights", weights, "  answer", weights @ values)

# %% name="merged-seen"
merged.reveal(
    round((weights @ values).item(), 6),
    answer="B",
    A="the mean gives both keys the same weight, and exp(ln 3) is three times exp(0)",
    C="a softmax is no maximum: the lower score still has a quarter of the weight",
    D="it takes one more number from each rank: how much weight it has seen",
)

# %% [markdown] minutes=2 core=true
# Each half answers wrong, but its weights have the right *proportions*. What it lacks is how heavy the whole half is.
# That is one number per row, the sum of exp(score). We keep its logarithm, `lse`, as exp(1000) is infinite:

# %% name="attend-and-merge"
def attend(q, k, v):
    scores = q @ k.mT / WIDTH**0.5
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse

def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return (lse1 - lse).exp() * o1 + (lse2 - lse).exp() * o2, lse

# %% [markdown] core=true
# `exp(lse1 - lse)` is the share of the first half in all the weight. Now 16 keys, in two halves:

# %% name="two-halves"
truth = scaled_dot_product_attention(Q, K, V)
first, second = (attend(Q, K[:, :, part], V[:, :, part]) for part in (slice(0, 8), slice(8, 16)))

print("first half alone ", error(first[0], truth))
print("mean of the two  ", error((first[0] + second[0]) / 2, truth))
print("merged           ", error(merge(*first, *second)[0], truth))

# %% name="two-halves-picture"
row = (Q @ K.mT / WIDTH**0.5)[0, 1, 4]  # the scores of one query
apart = torch.cat([half.softmax(0) for half in row.chunk(2)])
figure, both = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharey=True)
for axes, weights, title in zip(both, (apart, row.softmax(0)), ("Each half adds up to 1", "Merged: together they add up to 1")):
    for rank, colour in enumerate(("#0072b2", "#e69f00")):
        axes.bar(range(8 * rank, 8 * rank + 8), weights.chunk(2)[rank].tolist(), color=colour, label=f"rank {rank}'s keys")
    axes.set(title=title, xlabel="key", ylabel="weight")
both[0].legend()
plt.show()

# %% [markdown] minutes=1 core=true
# Two wrong halves plus two numbers a row make the exact answer. Within a half nothing changes but the scale; of this row the
# first half has 13 % of the weight.

# %% [markdown] minutes=2 core=true
# ### Any number, any order, and nothing
#
# A merge is again an answer with its `lse`, so it can be merged on: keys may come in any pieces and in any order. **Guess:**
# with four pieces, does the order change the answer? And scores of 1000 and -1000, do they overflow?

# %% name="any-order"
from functools import reduce

pieces = [attend(Q, k, v) for k, v in zip(K.chunk(4, 2), V.chunk(4, 2))]
for order in ((0, 1, 2, 3), (3, 0, 2, 1), (2, 3, 1, 0)):
    o, lse = reduce(lambda a, b: merge(*a, *b), (pieces[n] for n in order))
    print(order, error(o, truth))

# %% name="large-scores"
large = [attend(1000 * Q, k, v) for k, v in zip(K.chunk(2, 2), V.chunk(2, 2))]
print("large scores", error(merge(*large[0], *large[1])[0], scaled_dot_product_attention(1000 * Q, K, V)))

# %% [markdown] minutes=1 core=true
# Neither. And a piece in which a query may see *nothing*, because all its keys come later in the text? All its scores
# are -inf, and so is their `lse`:

# %% name="nothing-to-see"
nothing = torch.tensor([-torch.inf, -torch.inf])
lse = nothing.logsumexp(0)
print("weights", (nothing - lse).exp().tolist(), "  where the score is", nothing.tolist())

# %% [markdown] minutes=1 core=true
# -inf minus -inf is no number, and one NaN spoils the row for good. Where nothing was seen, the answer is to be 0 and its
# share 0. A guard does it: subtract 0 where `lse` is -inf. Below, `finite` is this guard.

# %% [markdown] minutes=3 core=true
# ## Around the ring
#
# Four ranks, each with its rows of Q, K and V. **Guess:** what does a rank need from the others, and what not?

# %% name="sequence-picture"
layout_picture(Layout("S@cp K"), (S, WIDTH), {"cp": 4}, name="K")

# %% [markdown] core=true
# All keys and values, and no query. The keys travel, from each rank to the next. `attend` and `merge` are those from
# above, now with a mask and the guard. `around` yields a rank's own x first, then the one of the rank before it, and so
# on: on P ranks, P - 1 hops.

# %% name="tools"
def finite(lse):
    return lse.masked_fill(lse == -torch.inf, 0)

def attend(q, k, v, visible=None):
    scores = q @ k.mT / WIDTH**0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - finite(lse)).exp() @ v, lse

def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return (lse1 - finite(lse)).exp() * o1 + (lse2 - finite(lse)).exp() * o2, lse

def around(x, cp):
    yield x
    for _ in range(cp.size - 1):
        x = cp.shift(x, 1)
        yield x

# %% [markdown] minutes=2 core=true
# ### Two passes
#
# The first method, *ring self-attention*, of 2021: let the keys go round and keep all scores; take the softmax; let the
# values go round. Blocks of scores and values come in the same order, so nobody has to sort them.

# %% name="two-passes"
def two_passes(q, k, v, cp):
    scores = torch.cat([q @ each.mT / WIDTH**0.5 for each in around(k, cp)], dim=-1)
    weights = scores.softmax(-1).chunk(cp.size, -1)
    return sum(w @ each for w, each in zip(weights, around(v, cp)))

def on_ring(method):
    mesh = Mesh(cp=4)
    q, k, v = (SEQUENCE.shard(whole, mesh) for whole in (Q, K, V))
    return method(q, k, v, mesh["cp"])

rsa = run(on_ring, two_passes, ranks=4)
print("error", error(torch.cat(rsa.values, 2), scaled_dot_product_attention(Q, K, V)))
print("elements sent", rsa.trace.bytes_sent(rank=0) // 8, "= 6 blocks of", Q.numel() // 4)

# %% [markdown] minutes=1 core=true
# Exact, with 2 (P - 1) blocks sent. No rank has S x S scores. But each has S/P x S of them, whole rows.

# %% [markdown] minutes=2 core=true
# ### One pass
#
# With `merge` no row has to be whole. Keys and values go round together, and each block is forgotten when it is
# merged. This is *ring attention*, of 2023:

# %% name="one-pass"
def ring_attention(q, k, v, cp):
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)  # nothing seen yet
    for kv in around(torch.stack([k, v]), cp):
        o, lse = merge(o, lse, *attend(q, *kv))
    return o

# %% name="exact-guess"
exact = predict(
    "Ring attention never has a whole row of scores. How far is it from full attention?",
    A="a few percent: like most methods for long texts it is an approximation",
    B="as far as rounding",
    C="exact for the rank's own keys, approximate for those of others",
)

# %% name="one-pass-run"
ring = run(on_ring, ring_attention, ranks=4, machine="4xH100")
truth = scaled_dot_product_attention(Q, K, V)
print("elements sent", ring.trace.bytes_sent(rank=0) // 8)
exact.reveal(
    f"relative error {error(torch.cat(ring.values, 2), truth)}",
    answer="B",
    A="merging leaves nothing out: every score has its weight, and the sum is only taken in another order",
    C="all keys come by, and a merge does not ask whose they were",
)

# %% name="ring-picture"
ring

# %% [markdown] minutes=2 core=true
# Blocks are tiny here, so that a hop is nothing but latency, 3 µs. The same bytes as two passes. And the memory? Let the text grow with the ranks, so that each always has 128 tokens.
# **Guess:** from 2 ranks to 8, what becomes of a rank's peak, with each of the two?

# %% name="memory"
def long_text(method, n=128):
    mesh = Mesh(cp=dist.get_world_size())
    q, k, v = (torch.randn(1, 1, n, WIDTH) for _ in range(3))
    return method(q, k, v, mesh["cp"]).shape

# %% name="memory-run"
peaks = {"two passes": [], "one pass": []}
for (name, peak), method in zip(peaks.items(), (two_passes, ring_attention)):
    for ranks in (2, 4, 8):
        result = run(long_text, method, ranks=ranks, record=("memory",))
        peak.append(result.trace.peak_bytes(rank=0) / 1e3)
    print(f"{name:10}", *(f"{kB:6.0f} kB" for kB in peak), "  on 2, 4, 8 ranks")

# %% name="memory-curve"
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for (name, peak), colour in zip(peaks.items(), ("#d55e00", "#0072b2")):
    axes.plot([256, 512, 1024], peak, "o-", color=colour, label=name)
axes.set(title="Peak of a rank with 128 tokens of the text", xlabel="tokens of the whole text", ylabel="kB", ylim=0)
axes.legend()
plt.show()

# %% [markdown] minutes=1 core=true
# Whole rows of scores grow with the text; blocks do not. On real GPUs a fused kernel (*flash attention*) even holds no
# S/P x S/P block: it uses the same merge inside, piece by piece.

# %% [markdown] minutes=2 core=true
# ### Who comes before whom
#
# In a GPT a token sees itself and what comes before it. Of a block that came round, a rank must know *where in the text*
# its keys stand. Here every rank counts from its own place, or, as it is easily written, from 0:

# %% name="causal"
def causal_ring(q, k, v, cp, positions):
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    mine = positions(cp.rank)
    for hop, kv in enumerate(around(torch.stack([k, v]), cp)):
        theirs = positions((cp.rank - hop) % cp.size)  # the rank it comes from
        o, lse = merge(o, lse, *attend(q, *kv, mine[:, None] >= theirs))
    return o

# %% name="positions"
def global_positions(rank, n=S // 4):
    return n * rank + torch.arange(n)

def restarted(rank, n=S // 4):
    return torch.arange(n)

# %% [markdown] core=true
# **Guess:** if positions restart on every rank: an error, a NaN, or numbers that look right? And are those of rank 0 right?

# %% name="causal-run"
from functools import partial

truths = scaled_dot_product_attention(Q, K, V, is_causal=True).chunk(4, 2)
for positions in (global_positions, restarted):
    result = run(on_ring, partial(causal_ring, positions=positions), ranks=4)
    print(f"{positions.__name__:17}", *map(error, result.values, truths), "  on ranks 0 to 3")

# %% [markdown] minutes=1 core=true
# Plausible numbers, all wrong, rank 0's too: it looks into the future. Nothing is raised. So positions do not restart
# per rank: they belong to the tokens.
#
# And rank 0 got three blocks in which it may see nothing. With the guard they change nothing; a good implementation
# does not even compute them. Who then has less to do than others? That is lesson 12.

# %% [markdown] minutes=4 core=true
# ## Backward
#
# No scores were kept. A rank makes the weights A of a block again, from its queries, the keys and the *final* `lse` of
# each row. With the scores Z = c Q Kᵀ, c their scale, and δ, one number per row:
#
# $$A = e^{Z - lse} \qquad \delta = \textstyle\sum dO \circ O \qquad dZ = A \circ (dO\, V^T - \delta)$$
# $$dV = A^T dO \qquad dQ = c\, dZ\, K \qquad dK = c\, dZ^T Q$$
#
# The keys and values go round again. dQ stays at home with its queries. But of dK and dV each rank makes only a *term*,
# for keys that are passing through. So these sums travel on with their keys.

# %% name="hops-guess"
hops = predict(
    "Keys and values are passed on P - 1 times. How often are dK and dV passed on?",
    A="never: the owner of the keys works its gradient out alone",
    B="P - 1 times, like the keys",
    C="P times",
)

# %% name="ring-backward"
def ring_backward(do, q, k, v, o, lse, cp):
    delta = (do * o).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for kv in around(torch.stack([k, v]), cp):
        k, v = kv
        weights = (q @ k.mT / WIDTH**0.5 - lse).exp()
        dz = weights * (do @ v.mT - delta) / WIDTH**0.5
        dq = dq + dz @ k
        dk, dv = dk + dz.mT @ q, dv + weights.mT @ do
        dk, dv = cp.shift(torch.stack([dk, dv]), 1)  # on, with the keys they belong to
    return dq, dk, dv

# %% [markdown] core=true
# `around` is the one from above. O and `lse` come from the forward, here from a serial one.

# %% name="around"
def around(x, cp):
    yield x
    for _ in range(cp.size - 1):
        x = cp.shift(x, 1)
        yield x

# %% name="ring-backward-run"
LSE = (Q @ K.mT / WIDTH**0.5).logsumexp(-1, keepdim=True)
O = scaled_dot_product_attention(Q, K, V)

def backward(method=ring_backward):
    mesh = Mesh(cp=4)
    gradients = method(*(SEQUENCE.shard(whole, mesh) for whole in (dO, Q, K, V, O, LSE)), mesh["cp"])
    return torch.stack(gradients)

result = run(backward, ranks=4, machine="4xH100")

# %% name="autograd"
leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
truths = torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, dO)

def errors(values):
    joined = [torch.cat(blocks, 2) for blocks in zip(*values)]
    return "  ".join(f"{name} {error(*both)}" for name, *both in zip(("dQ", "dK", "dV"), joined, truths))

print(errors(result.values))

# %% name="hops-seen"
sent = [event for event in result.trace.events if event.rank == 0 and event.kind == "send"]
hops.reveal(
    f"rank 0 sent {len(sent)} messages: 3 with keys and values, {len(sent) - 3} with dK and dV",
    answer="C",
    A="every query that looked at a key has a say in its gradient, and the queries lie on all ranks",
    B="after P - 1 hops the keys are at the rank behind their owner, and so is the sum: it takes one more to come home",
)

# %% name="backward-picture"
result

# %% [markdown] minutes=1 core=true
# Both directions together: 2 (P - 1) blocks forward, 2 (P - 1) + 2 P backward. (Keep your own term at home, let the sums
# begin at your neighbour, and P - 1 hops do for them, too; the usual code does not bother.)
#
# **Break it:** leave out the last hop. What has rank 0 then?

# %% name="one-hop-short"
def one_hop_short(*args):
    dq, dk, dv = ring_backward(*args)
    return dq, args[-1].shift(dk, -1), args[-1].shift(dv, -1)  # as it was before the last hop

short = run(backward, one_hop_short, ranks=4).values
print(errors(short))
print("dK on rank 0, beside that of ranks 0 to 3:", *(error(short[0][1], dk) for dk in truths[1].chunk(4, 2)))

# %% [markdown] minutes=1 core=true
# The right numbers, on the wrong rank: the gradient of rank 1's keys. The shapes are right, and the norm over all ranks
# is, too.

# %% [markdown] minutes=2 core=true
# ## Break it: divide by P
#
# Colossal-AI's code divides dQ, dK and dV by the number of ranks, and its test passes. **Guess:** how can a test pass on
# gradients that are four times too small?

# %% name="vacuous-test"
leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
scaled_dot_product_attention(*leaves).mean().backward()
dq = leaves[0].grad
print("largest element", f"{dq.abs().max():.1e}")
for name, wrong in (("divided by 4", dq / 4), ("all zeros", 0 * dq)):
    print(f"{name:12}  allclose(atol=1e-2): {torch.allclose(wrong, dq, atol=1e-2)}   relative error {error(wrong, dq)}")

# %% [markdown] minutes=1 core=true
# The gradient of a *mean* is tiny, and the tolerance was absolute: zeros pass. Compare gradients by relative error, with
# a random gradient from above. The true gradient has no 1/P in it: dK is a sum over all queries, wherever they are.

# %% [markdown] minutes=1 core=true
# ## In the library
#
# [`ring.py`](../lessons_lib/sequence_parallel/ring.py) holds ring attention,
# [`online_softmax.py`](../lessons_lib/sequence_parallel/online_softmax.py) the merge, and
# [`ring_self_attention.py`](../lessons_lib/sequence_parallel/ring_self_attention.py) the two passes. All are called alike,
# and autograd knows their backward:

# %% name="library"
from lessons_lib.sequence_parallel import ATTENTIONS

def with_library(name):
    mesh = Mesh(cp=4)
    q, k, v = (SEQUENCE.shard(whole, mesh).requires_grad_() for whole in (Q, K, V))
    with region("forward"):
        o = ATTENTIONS[name].attend(q, k, v, mesh["cp"])
    with region("backward"):
        o.backward(SEQUENCE.shard(dO, mesh))
    return o.detach(), q.grad, k.grad, v.grad

# %% name="library-truth"
leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
truth = scaled_dot_product_attention(*leaves, is_causal=True)
truths = truth.detach(), *torch.autograd.grad(truth, leaves, dO)

# %% name="library-run"
by_library = {name: run(with_library, name, ranks=4) for name in ("rsa", "ring")}
for name, result in by_library.items():
    joined = [torch.cat(blocks, 2) for blocks in zip(*result.values)]
    print(f"{name:5} errors of O, dQ, dK, dV", *map(error, joined, truths))
    print("      formula", ATTENTIONS[name].traffic(B, S, H, WIDTH, 4), " counted",
          {way: result.trace.bytes_sent(0, way) // 8 for way in ("forward", "backward")})

# %% [markdown] minutes=1 core=true
# `rsa` has terms of all dK and dV on every rank, and adds them up by all-reduces: 18 blocks, where the ring sends 14. Both
# are causal by default, with true positions. What the mask hides wholly `ring` does not compute, and its next keys set out before
# the work on those that are here.

# %% [markdown] minutes=2 core=true
# ## The same in production
#
# PyTorch's is called `context_parallel`: inside it, an ordinary attention is that of the whole sequence, and q, k and v are
# cut in place. It is made for GPUs. **Guess:** what does it do on CPUs?

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

def with_torch():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    q, k, v = Q.clone(), K.clone(), V.clone()
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        return q.clone(), scaled_dot_product_attention(q, k, v, is_causal=True)

# %% name="production-run"
on_cpus = run(with_torch, ranks=4)
print("elements sent", on_cpus.trace.bytes_sent(0), "  shape on a rank", tuple(on_cpus.values[0][1].shape))

# %% [markdown] minutes=1 core=true
# It cuts the sequence, sends nothing, and says nothing: every rank looks at its own tokens alone. For kernels of CPUs it
# has no rule, so the plain one runs.
#
# Its ring is there all the same, below a name with an underscore, which may change any day. Give it the kernel for CPUs,
# and it does what ours does:

# %% name="production-ring"
from torch.distributed.tensor.experimental._context_parallel import _attention as inside

def cpu_kernel(query, key, value, is_causal, **_):
    return inside.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)

def torch_ring(q, k, v, cp):
    return inside._templated_ring_attention(cp.process_group, 2, cpu_kernel, q, k, v, is_causal=True)[0]

def on_shards(method):
    mesh = Mesh(cp=4)
    return method(*(SEQUENCE.shard(whole, mesh) for whole in (Q, K, V)), mesh["cp"])

# %% name="production-compared"
from unittest.mock import patch

from lessons_lib.sequence_parallel import ATTENTIONS

as_ours = dict(enable_load_balance=False, convert_to_f32=False, rotate_method=inside._RotateMethod.ALL_TO_ALL)
with patch.multiple(inside._cp_options, **as_ours):
    by_torch = run(on_shards, torch_ring, ranks=4)

ours = run(on_shards, ATTENTIONS["ring"].attend, ranks=4)
print("differs by", error(torch.cat(by_torch.values, 2), torch.cat(ours.values, 2)))
print("bytes", by_torch.trace.bytes_sent(0), "and", ours.trace.bytes_sent(0))

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. An answer from some of the keys, and the `lse` of each row: two such merge to the exact answer, in any order.
# 2. Ring attention: keys and values go round, P - 1 hops; no scores of S x S, nor of S x S/P, are ever held.
# 3. A block in which a row sees nothing has `lse` = -inf; without a guard it is NaN for good.
# 4. Positions belong to tokens, and never restart on a rank.
# 5. Backward uses the final `lse`; dK and dV travel with their keys and need P hops to come home. Nobody divides by P.
#
# **Where next:** build both directions yourself in the exercise. Then lesson 12: with a causal mask, who works?
#
# *Sources:* Milakov and Gimelshein 2018, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867);
# Li et al. 2021, [Sequence Parallelism](https://arxiv.org/abs/2105.13120), with ring self-attention; Liu et al. 2023,
# [Ring Attention](https://arxiv.org/abs/2310.01889). Division by P: [Colossal-AI, issue
# 3044](https://github.com/hpcaitech/ColossalAI/issues/3044).
