# %% [markdown] minutes=1 core=true
# # Who works, who talks
#
# Lesson 11 cut a text into equal pieces, one for each rank. In a GPT every token looks at itself and at what comes
# before it. Sixteen tokens, four ranks, four tokens each. **Which rank works most?**

# %% tags=["setup"]
import torch
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib import Mesh, compute, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.machines import Machine

B, H, S, WIDTH = 1, 8, 16, 8  # sequences, heads, tokens, numbers per head
torch.manual_seed(0)
Q, K, V, dO = (torch.randn(B, H, S, WIDTH, dtype=torch.float64) for _ in range(4))

def contiguous(S, P, rank):
    return torch.arange(S).chunk(P)[rank]

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

most = predict("16 tokens on 4 ranks, with a causal mask: which rank works most?",
    A="none, all have four tokens", B="rank 0, everybody needs its keys", C="rank 3, its tokens see the most")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("12")

# %% [markdown] minutes=3 core=true
# ## Count the pairs
#
# The work of attention is pairs: a query and a key that it sees. The token at place i sees i + 1 keys, itself included.

# %% name="pairs"
def pairs(at):
    return int((at + 1).sum())

work = [pairs(contiguous(S, 4, rank)) for rank in range(4)]
print("pairs", work, "  in all", sum(work))

# %% name="most-seen"
most.reveal(
    f"pairs of ranks 0 to 3: {work}",
    answer="C",
    A="equal tokens are not equal work: the last token looks at 16 keys, the first at one",
    B="its keys travel to all, but the work is done where the queries are",
)

# %% [markdown] minutes=2 core=true
# All ranks wait for the slowest: the layer is done when rank 3 is done. **Guess:** what share of their time do the four
# work, on average?

# %% name="busy-guess"
busy = predict(
    "What share of the ranks' time is work?",
    A="100 %: whoever has less to do starts the next layer early",
    B="about 59 %",
    C="25 %: only rank 3 works all the time",
)

# %% name="busy-run"
def on_the_clock(deal, P=4):
    cp = Mesh(cp=P)["cp"]
    mine = deal(S, P, cp.rank)
    for hop in range(P):
        theirs = deal(S, P, (cp.rank - hop) % P)
        compute(1e-6 * int((mine[:, None] >= theirs).sum()))  # one microsecond a pair
        if hop < P - 1:
            cp.shift(torch.zeros(1), 1)

waiting = run(on_the_clock, contiguous, ranks=4, machine=Machine("ideal links"))  # that take no time
waiting

# %% name="busy-seen"
makespan = waiting.trace.timeline.makespan * 1e6
busy.reveal(
    f"done after {makespan:.0f} µs; {sum(work)} / (4 x {makespan:.0f}) = {sum(work) / (4 * makespan):.1%}",
    answer="B",
    A="the next layer needs the keys of all ranks, those of rank 3 too",
    C="rank 3 has 58 of 136 pairs, and in the first steps the others work, too",
)

# %% [markdown] core=true
# All pairs at once. A row is a query, in the colour of its rank; a column is a key; the number says in which step of the ring
# the two meet:

# %% name="mask-picture"
from lessons_lib.widgets import attention_explorer

attention_explorer("ring", "4", "causal").figure

# %% [markdown] minutes=1 core=true
# More tokens make it worse: towards P / (2P - 1), that is 57 % on 4 ranks and 53 % on 8. Nearly half of the machine
# idles, and in no number of the result does it show.

# %% [markdown] minutes=2 core=true
# ### Zigzag
#
# Cut the text into eight pieces instead of four. **Guess:** which two of them should one rank have, so that all work alike?

# %% name="zigzag"
def zigzag(S, P, rank):
    pieces = torch.arange(S).chunk(2 * P)
    return torch.cat([pieces[rank], pieces[2 * P - 1 - rank]])

for rank in range(4):
    at = zigzag(S, 4, rank)
    print(f"rank {rank}: tokens {at.tolist()}, {sum((at + 1).tolist())} pairs")

# %% [markdown] minutes=1 core=true
# One from the front and the one as far from the back: little work and much, 34 pairs for everyone. But the ranks go
# step by step, a block of keys in each. **Guess:** are the *steps* balanced, too?

# %% name="steps"
def by_step(deal, P=4):
    held = [deal(S, P, rank) for rank in range(P)]
    return [[int((held[r][:, None] >= held[(r - hop) % P]).sum()) for r in range(P)] for hop in range(P)]

for name, deal in (("contiguous", contiguous), ("zigzag", zigzag)):
    steps = by_step(deal)
    print(f"{name:10}", steps, "  slowest of each:", [max(step) for step in steps])

# %% name="zigzag-picture"
run(on_the_clock, zigzag, ranks=4, machine=Machine("ideal links"))

# %% [markdown] minutes=3 core=true
# In every step, too. From 58.6 % to 100 % busy, with as many messages and bytes as before.
#
# Now you. The list has two ways more, which come below; try them all the same. Which of the four let no rank wait on 8
# ranks? And without a mask?

# %% name="explorer"
from lessons_lib.widgets import attention_explorer

attention_explorer("zigzag", "4", "causal")

# %% [markdown] core=true
# Zigzag and Ulysses; without a mask all four. (Heads are 16 numbers wide there and 8 in this lesson, so it sends twice as
# much.)

# %% [markdown] minutes=3 core=true
# ## What travels with the tokens
#
# Now a rank's tokens are no neighbours any more. Whatever belongs to a token has to come along: its place in the text,
# for the mask and the position embedding, and its *label*, which is the next token. **Guess:** each rank takes its tokens and
# then shifts them by one to get the labels. How many of the 16 are wrong?

# %% name="labels"
from lessons_lib.sequence_parallel.assignment import Contiguous, Zigzag

text = torch.arange(S + 1)  # so that a token shows where it stands
tokens, labels = text[:-1], text[1:]

def wrong_labels(deal):
    at = deal.positions(S, 4, Mesh(cp=4)["cp"].rank)
    shifted_after_the_cut = tokens[at].roll(-1)
    return int((shifted_after_the_cut != labels[at]).sum())

for deal in (Contiguous(), Zigzag()):
    print(f"{type(deal).__name__:10} wrong labels by rank", run(wrong_labels, deal, ranks=4).values)

# %% [markdown] minutes=2 core=true
# Seven of them, and four where the pieces are contiguous: one at the end of every run of neighbours, and only rank 3's two
# pieces touch. In a text of 100,000 tokens nobody sees it in
# the loss. Shift first, then cut: `labels[at]`.
#
# And the number of tokens? Zigzag wants a multiple of 2P. The library says so before anything is sent, and names the next
# one:

# %% name="indivisible" tags=["raises-exception"]
Zigzag().positions(32769, 8, rank=0)

# %% [markdown] minutes=1 core=true
# So a text is padded at its end. With a causal mask no true token looks at the padding; its labels are left out of the
# loss. 13 tokens, padded to 16, beside the 13 alone:

# %% name="padded"
from torch.nn.functional import pad

from lessons_lib.sequence_parallel import ATTENTIONS, gather_tokens, shard_tokens

def padded():
    cp = Mesh(cp=4)["cp"]
    q, k, v = (shard_tokens(pad(x[:, :, :13], (0, 0, 0, 3)), Zigzag(), cp, dim=2) for x in (Q, K, V))
    return gather_tokens(ATTENTIONS["zigzag"].attend(q, k, v, cp), Zigzag(), cp, dim=2)[:, :, :13]

alone = scaled_dot_product_attention(*(x[:, :, :13] for x in (Q, K, V)), is_causal=True)
print("error", error(run(padded, ranks=4).values[0], alone))

# %% [markdown] minutes=3 core=true
# ## Ulysses: cut something else for a while
#
# Attention treats each head alone. So, instead of passing keys round: exchange, so that each rank has *all* tokens of
# *some* heads; let it work alone; exchange back. Q as heads by tokens, before and after:

# %% name="before-picture"
from lessons_lib import Layout
from lessons_lib.views import layout_picture

layout_picture(Layout("H S@cp"), (H, S), {"cp": 4}, name="Q")

# %% name="after-picture"
layout_picture(Layout("H@cp S"), (H, S), {"cp": 4}, name="Q")

# %% [markdown] core=true
# From a cut to another cut: that is an all-to-all. Three on the way in, one on the way out:

# %% name="ulysses"
SEQUENCE = Layout("B H S@cp K")

def ulysses(q, k, v, cp):
    q, k, v = (cp.all_to_all(x, split_dim=1, concat_dim=2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    return cp.all_to_all(o, split_dim=2, concat_dim=1)

def on_ranks(method):
    mesh = Mesh(cp=4)
    return method(*(SEQUENCE.shard(whole, mesh) for whole in (Q, K, V)), mesh["cp"])

# %% [markdown] core=true
# **Guess:** the tokens lie contiguous again. Do the ranks work alike?

# %% name="ulysses-run"
result = run(on_ranks, ulysses, ranks=4, machine="4xH100")
truth = scaled_dot_product_attention(Q, K, V, is_causal=True)
print("error", error(torch.cat(result.values, 2), truth), "  elements sent", result.trace.bytes_sent(0) // 8)

# %% name="ulysses-picture"
result

# %% [markdown] minutes=2 core=true
# Alike: each has as many heads, and every head has the whole triangle. No zigzag, no merging, and any attention kernel
# does. Backward is the same four exchanges the other way round. The pair `exchange_exchange` knows that:

# %% name="ulysses-backward"
from lessons_lib.mesh import exchange_exchange

def ulysses_with_gradients(q, k, v, cp):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with region("forward"):
        whole = [exchange_exchange(x, cp, 1, 2) for x in leaves]
        o = exchange_exchange(scaled_dot_product_attention(*whole, is_causal=True), cp, 2, 1)
    with region("backward"):
        return torch.autograd.grad(o, leaves, cp.piece(dO, 2))

both = run(on_ranks, ulysses_with_gradients, ranks=4)
leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
truths = torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, dO)
for name, blocks, truth in zip(("dQ", "dK", "dV"), zip(*both.values), truths):
    print(name, error(torch.cat(blocks, 2), truth))
print({way: both.trace.bytes_sent(0, way) // 8 for way in ("forward", "backward")}, "elements sent")

# %% [markdown] minutes=4 core=true
# ## Who sends less?
#
# The ring, zigzag or not, passes keys and values on P - 1 times, and their gradients P times (lesson 11); Ulysses exchanges
# Q, K, V and O once each way. In blocks of Q, sent by each rank:
#
# | | forward | backward | on 4 ranks |
# |---|---|---|---|
# | ring | 2 (P-1) | 2 (P-1) + 2 P | 6 + 14 |
# | Ulysses | 4 (P-1)/P | 4 (P-1)/P | 3 + 3 |
#
# Many models have fewer heads of keys than of queries: several query heads share one (*grouped-query attention*). With
# 32 heads of queries and 4 of keys, K and V are an eighth of Q.

# %% name="less-guess"
less = predict(
    "32 heads of queries, 4 of keys, on 4 ranks, forward and backward: who sends less?",
    A="Ulysses, always: it sends each block once, the ring sends it P - 1 times",
    B="the ring",
    C="both the same: they move the same keys",
)

# %% name="less-run"
from lessons_lib.sequence_parallel import ATTENTIONS

def step(name, heads, kv_heads, n=4):
    cp = Mesh(cp=4)["cp"]
    q, k, v = (torch.randn(1, h, n, WIDTH, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    ATTENTIONS[name].attend(q, k, v, cp).sum().backward()
    return q.nbytes

sent = {}
for kv_heads in (32, 16, 8, 4):
    for name in ("zigzag", "ulysses"):
        result = run(step, name, 32, kv_heads, ranks=4)
        sent[name, kv_heads] = result.trace.bytes_sent(rank=0) / result.values[0]
    print(f"32 query heads, {kv_heads:2} of keys:", {name: sent[name, kv_heads] for name in ("zigzag", "ulysses")})

# %% name="less-seen"
less.reveal(
    f"in blocks of Q: ring {sent['zigzag', 4]}, Ulysses {sent['ulysses', 4]}",
    answer="B",
    A="Ulysses has to exchange the large Q and O, too; the ring moves only what is small here",
    C="Ulysses moves queries and outputs, the ring keys, values and their gradients",
)

# %% [markdown] minutes=2 core=true
# With as many key heads as query heads the ring sends 3.3 times as much as Ulysses. With an eighth of them it sends
# less. With more ranks it takes fewer key heads still: on 8 ranks an eighth is too many.
#
# And bytes are not all. The ring's next block travels while this one is worked on. Ulysses' exchanges stand before and behind
# the work, with nothing to hide behind.

# %% [markdown] minutes=2 core=true
# ### Heads do limit
#
# Fewer heads of keys than ranks: Ulysses copies them, and they count as one for each rank.

# %% name="copied-heads"
for name in ("zigzag", "ulysses"):
    result = run(step, name, 32, 2, ranks=4)
    print(f"{name:8} with 2 heads of keys:", result.trace.bytes_sent(rank=0) / result.values[0])

# %% [markdown] core=true
# And heads of queries? The ring never asks how many there are. **Guess:** Ulysses, with 6 heads on 4 ranks?

# %% name="too-few-heads" tags=["raises-exception"]
run(step, "ulysses", 6, 6, ranks=4)

# %% [markdown] minutes=2 core=true
# Ulysses hands out whole heads, so they limit the ranks. The ring cuts tokens, of which there are more.
#
# Large systems do both: Ulysses inside a box, where links are fast and ranks no more than heads, and a ring between the
# boxes.

# %% [markdown] minutes=3 core=true
# ## In the library
#
# `ring`, `zigzag`, `striped` and `ulysses` are called alike; an
# [assignment](../lessons_lib/sequence_parallel/assignment.py) says which tokens a rank holds.

# %% name="library"
from lessons_lib.sequence_parallel import ATTENTIONS
from lessons_lib.sequence_parallel.assignment import busy as busy_share, pairs as pairs_by_step

for name in ("ring", "striped", "zigzag", "ulysses"):
    print(f"{name:8} elements sent:", ATTENTIONS[name].traffic(B, S, H, WIDTH, 4))

# %% name="library-busy"
for name in ("ring", "striped", "zigzag"):
    deal = ATTENTIONS[name].assignment
    print(f"{name:8}", deal.positions(S, 4, rank=1), f" busy {float(busy_share(pairs_by_step(deal, S, 4))):.1%}")

# %% [markdown] minutes=1 more=true
# ## The model, and what was measured
#
# *Striped* gives rank r every P-th token. For long texts the count says that it is as good as zigzag. The share of the
# ideal speed, counted for 8 ranks and 8,192 tokens, beside what the authors of
# [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention) measured on eight H800, forward and backward:

# %% name="measured" more=true
from lessons_lib.sequence_parallel import ATTENTIONS
from lessons_lib.sequence_parallel.assignment import busy as busy_share, pairs as pairs_by_step

for name, measured in (("ring", 53.9), ("striped", 82.9), ("zigzag", 90.2)):
    share = float(busy_share(pairs_by_step(ATTENTIONS[name].assignment, 8192, 8)))
    print(f"{name:8} counted {share:6.1%}   measured {measured} %")

# %% [markdown] minutes=1 more=true
# The contiguous ring is where the count says. The others are below: messages, merging and small kernels take time, too,
# which no count of pairs knows. Striped has a triangle in every block, which kernels skip only in part.

# %% [markdown] minutes=3 core=true
# ## The same in production
#
# DeepSpeed's Ulysses is four calls of `torch.distributed.all_to_all_single` around any attention. By hand: the pieces to
# be sent come first in memory.

# %% name="production"
import torch.distributed as dist

def exchange(x, split_dim, concat_dim):
    sent = torch.stack(x.chunk(4, split_dim)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.unbind(), concat_dim)

def with_torch(q, k, v, cp):
    whole = [exchange(x, 1, 2) for x in (q, k, v)]
    return exchange(scaled_dot_product_attention(*whole, is_causal=True), 2, 1)

# %% name="production-compared"
from lessons_lib.sequence_parallel import ATTENTIONS

def shards(method):
    cp = Mesh(cp=4)["cp"]
    return method(*(cp.piece(whole, 2) for whole in (Q, K, V)), cp)

ours, theirs = (run(shards, method, ranks=4) for method in (ATTENTIONS["ulysses"].attend, with_torch))
print("differs by", error(torch.cat(ours.values, 2), torch.cat(theirs.values, 2)))
print("bytes", ours.trace.bytes_sent(0), "and", theirs.trace.bytes_sent(0))

# %% [markdown] minutes=1 core=true
# And zigzag? PyTorch's `context_parallel` deals it by itself. On CPUs it has no attention (lesson 11), but it cuts:

# %% name="production-zigzag"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

def dealt_by_torch():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    places = torch.arange(S)
    with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
        return places.tolist()

for rank, places in enumerate(run(dealt_by_torch, ranks=4).values):
    print(f"rank {rank}: torch {places}, the library {ATTENTIONS['zigzag'].assignment.positions(S, 4, rank)}")

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. With a causal mask equal tokens are not equal work: contiguous pieces leave about half of the machine idle.
# 2. Zigzag: of 2P pieces rank r has r and 2P - 1 - r. All work alike, in every step.
# 3. What belongs to a token travels with it: place, label, mask. Labels are shifted before the text is cut.
# 4. Ulysses: exchange heads for tokens, attend alone, exchange back. Balanced by itself, and limited by the heads.
# 5. Ulysses sends less with as many key heads as query heads; with few key heads the ring does.
#
# **Where next:** deal and exchange yourself in the exercise; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Jacobs et al. 2023, [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509); zigzag:
# [ring-flash-attention, issue 2](https://github.com/zhuzilin/ring-flash-attention/issues/2); Brandon et al. 2023,
# [Striped Attention](https://arxiv.org/abs/2311.09431).
