# %% [markdown] minutes=1 core=true
# # ZeRO 1
#
# In data parallel training every rank has its own rows of the batch. After the all-reduce all have the same gradients,
# and all take the same step, with the same two moments of Adam, the largest thing they store. **Who needs the copies?**

# %% tags=["setup"]
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import reduce_each, rows_of_rank
from lessons_lib.grading import predict, recap

torch.manual_seed(0)
X, Y = torch.randn(10, 6, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
MLP = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 73 parameters; each rank gets its own
ADAM = partial(Adam, lr=0.1, foreach=False)  # one tensor after the other

def backward(model, group, n_rows=10):
    model.zero_grad()
    x, y = rows_of_rank(X, group), rows_of_rank(Y, group)
    ((model(x) - y).square().sum() / n_rows).backward()  # a sum over my rows, over the number of all

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("05")

# %% [markdown] minutes=3 core=true
# ## Stored four times
#
# Four ranks, ten steps of plain data parallel training:

# %% name="replicated"
def replicated():
    group = Mesh(dp=4)["dp"]
    optimizer = ADAM(MLP.parameters())
    for _ in range(10):
        backward(MLP, group)
        reduce_each(MLP, group)
        optimizer.step()
    return [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]

# %% name="replicated-run"
plain = run(replicated, ranks=4)
moments = plain.values
print("elements of moments on each rank:", [sum(x.numel() for x in mine) for mine in moments])
print("rank 3 has what rank 0 has:", all(map(torch.equal, moments[0], moments[3])))
plain

# %% name="who-guess"
who = predict("Who needs all the moments?",
    A="every rank, to update its copy of the parameters",
    B="nobody, if each moment is with one rank, and that one updates its parameter for all",
    C="rank 0, to save them")

# %% [markdown] core=true
# Adam is `m`, `v` and a quotient, number by number. So cut 73 parameters into four pieces and let four Adams work, each
# on a piece:

# %% name="pieces"
def adam(parameters, gradients):
    parameters = nn.Parameter(parameters.clone())
    parameters.grad = gradients.clone()
    ADAM([parameters]).step()
    return parameters.detach()

w, g = torch.randn(2, 73, dtype=torch.float64)
by_pieces = torch.cat([adam(*piece) for piece in zip(w.tensor_split(4), g.tensor_split(4))])

# %% name="who-seen"
who.reveal(
    f"four Adams on four pieces do what one does on the whole: {torch.equal(by_pieces, adam(w, g))}",
    answer="B",
    A="what every rank needs is the updated parameter, and that can be sent; nobody else ever reads a moment",
    C="saving needs no whole either: each rank can write its piece",
)

# %% [markdown] minutes=2 core=true
# In mixed precision, with b for bytes:
#
# | of each parameter | |
# |---|---|
# | parameter and gradient, 16 bits each | 2 b + 2 b |
# | Adam's own copy of the parameter, and its two moments, 32 bits each | 4 b + 4 b + 4 b |
#
# 12 of 16 bytes are the optimizer's **state**, and the model never looks at them. ZeRO 1 cuts them: every rank keeps
# a piece. (An optimizer that needs the norm of a whole matrix, as LAMB and Muon do, cannot be cut without a thought.)

# %% [markdown] minutes=4 core=true
# ## The all-reduce, stopped halfway
#
# Gradients are born as partial sums. Lesson 01 brought them to a copy in two halves. Here are 8 gradients:

# %% name="partial-sum"
from lessons_lib import Layout
from lessons_lib.views import layout_picture

layout_picture(Layout("N +dp"), (8,), {"dp": 4}, name="gradients")

# %% [markdown] core=true
# After the first half, the reduce-scatter, each rank has the *complete* gradient of a quarter of the parameters:

# %% name="cut"
layout_picture(Layout("N@dp"), (8,), {"dp": 4}, name="gradients")

# %% [markdown] core=true
# That is all Adam needs for this quarter. So **stop here**, and let each rank update its quarter. Then the second half,
# the all-gather, of *updated parameters* in place of gradients.

# %% name="bytes-guess"
how_much = predict("What does a rank send now, beside the all-reduce of data parallel training?",
    A="half as much more: the parameters come on top of the gradients",
    B="the same",
    C="half: a reduce-scatter is half an all-reduce",
    D="a quarter: each rank has to do with a quarter of the parameters only")

# %% name="bytes"
def at_once():
    dist.all_reduce(torch.ones(1000))

def stopped_halfway():
    group = Mesh(dp=4)["dp"]
    piece = group.reduce_scatter(torch.ones(1000), dim=0)
    return group.all_gather(piece - 0.1, dim=0)  # whatever the optimizer does

sent = {step.__name__: run(step, ranks=4).trace.bytes_sent(0) for step in (at_once, stopped_halfway)}

# %% name="bytes-seen"
how_much.reveal(
    f"{sent} bytes", answer="B",
    A="nobody gathers gradients any more: parameters travel in their place. ZeRO 1 does not communicate more",
    C="the other half is still to come: every rank computes with all parameters",
    D="a term of each gradient is on each rank, and all must be added up",
)

# %% [markdown] minutes=2 core=true
# ## Flat, padded, cut
#
# 73 parameters in four tensors, and four ranks. Cut each tensor? Some have 3 or 7 elements. So all go into one **flat**
# vector, and that is cut, wherever the cut falls. **Guess:** into 18¼ each?

# %% name="not-even" tags=["raises-exception"]
def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])

run(lambda: Mesh(dp=4)["dp"].reduce_scatter(flat(MLP.parameters()), dim=0), ranks=4)

# %% [markdown] core=true
# The pieces have to be equal, so the vector is **padded** with zeros, to 76:

# %% name="padded"
from lessons_lib import Layout
from lessons_lib.views import layout_picture

names = [name for name, p in MLP.named_parameters() for _ in range(p.numel())] + ["padding"] * 3
for rank in range(4):
    piece = names[19 * rank : 19 * (rank + 1)]
    print(f"rank {rank}: 19 elements,", ", ".join(f"{piece.count(name)} of {name}" for name in dict.fromkeys(piece)))
layout_picture(Layout("N@dp"), (76,), {"dp": 4}, name="parameters")

# %% [markdown] minutes=1 core=true
# Rank 0 has not one whole tensor, rank 3 a bit of everything. Adam does not mind: it sees a vector.

# %% [markdown] minutes=5 core=true
# ## Your own sharded Adam
#
# Two vectors: `piece` are the parameters that this rank updates, `whole` all of them.

# %% name="sharded"
from torch.nn.utils import vector_to_parameters

class Sharded:
    def __init__(self, model, group, optimizer):
        self.parameters, self.group = list(model.parameters()), group
        self.piece = nn.Parameter(group.piece(self.flat(self.parameters), dim=0))
        self.optimizer = optimizer([self.piece])

    def flat(self, tensors):
        vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(vector, (0, -len(vector) % self.group.size))

    def step(self):
        gradients = self.flat(p.grad for p in self.parameters)
        piece = self.group.reduce_scatter(gradients, dim=0)
        self.piece.grad = piece * self.factor(piece)
        self.optimizer.step()  # on the piece
        whole = self.group.all_gather(self.piece.detach(), dim=0)
        vector_to_parameters(whole, self.parameters)

# %% [markdown] core=true
# (`factor` is for the clipping below; so far it is 1.) Ten steps with it:

# %% name="train"
Sharded.factor = lambda self, piece: 1.0

def train(kind, optimizer=ADAM):
    group = Mesh(dp=dist.get_world_size())["dp"]
    sharded = kind(MLP, group, optimizer)
    for _ in range(10):
        backward(MLP, group)
        with region("step"):
            sharded.step()
    state = [x for state in sharded.optimizer.state.values() for x in state.values() if x.dim()]
    return torch.cat([p.detach().flatten() for p in MLP.parameters()]), sum(x.numel() for x in state)

# %% [markdown] core=true
# **Guess:** how many elements of moments does a rank have, and what does it send in a step? The all-reduce of 73 numbers
# of 8 bytes on four ranks takes 876 bytes.

# %% name="train-run"
def error(result, truth):
    return f"{max(((w - truth).norm() / truth.norm()).item() for w, _ in result.values):.0e}"

serial = run(train, Sharded, ranks=1).values[0][0]
for ranks in (2, 3, 4):
    result = run(train, Sharded, ranks=ranks)
    print(f"{ranks} ranks: error {error(result, serial)}, {result.values[0][1]} elements of moments,",
          result.trace.bytes_sent(0, "step") // 10, "bytes a step")

# %% name="train-picture"
result

# %% [markdown] minutes=1 core=true
# The same parameters on every rank, a quarter of the moments on four, and the bytes of the all-reduce, with those of the
# padding: 2 · ¾ · 76 · 8 = 912. What a rank sends does not tell that anything was saved.

# %% [markdown] minutes=4 core=true
# ### Break it: gather the gradients
#
# Are a reduce-scatter and an all-gather not an all-reduce? Here the *gradients* are gathered, and every rank updates
# everything.

# %% name="gathers-gradients"
class GathersGradients(Sharded):
    def __init__(self, model, group, optimizer):
        super().__init__(model, group, optimizer)
        self.optimizer = optimizer(self.parameters)

    def step(self):
        gradients = self.flat(p.grad for p in self.parameters)
        piece = self.group.reduce_scatter(gradients, dim=0)
        whole = self.group.all_gather(piece, dim=0)
        for p, gradient in zip(self.parameters, whole[:73].split([p.numel() for p in self.parameters])):
            p.grad = gradient.view_as(p)
        self.optimizer.step()  # on all

# %% name="wrong-guess"
what_is_wrong = predict("What shows that this is not ZeRO 1?",
    A="the parameters after ten steps", B="the bytes sent", C="what a rank holds, and nothing else")

# %% name="wrong-run"
wrong = run(train, GathersGradients, ranks=4)
print(f"error {error(wrong, serial)}, {wrong.values[0][1]} elements of moments,",
      wrong.trace.bytes_sent(0, "step") // 10, "bytes a step")
wrong

# %% name="wrong-seen"
what_is_wrong.reveal(
    f"{wrong.values[0][1]} elements of moments on every rank", answer="C",
    A="the gradients are summed all the same, so the numbers are right: a test of numbers passes it",
    B="a gathered vector of gradients has as many bytes as a gathered vector of parameters",
)

# %% [markdown] minutes=1 core=true
# A test that compares numbers passes plain data parallel training as "ZeRO", and so does one that counts bytes. Look at
# what a rank *holds*.

# %% [markdown] minutes=4 core=true
# ### One norm for all
#
# **Clipping**: when the norm of *all* gradients is above a limit, all are made smaller by one factor. Now each rank has
# the gradients of a piece. Suppose that it takes the norm of those, here with SGD and the limit 0.05:

# %% name="clip"
def by_my_norm(self, piece):
    return min(1.0, 0.05 / piece.norm().item())

def by_the_global_norm(self, piece):
    squares = self.group.all_reduce(piece.square().sum())
    return min(1.0, 0.05 / squares.sqrt().item())

# %% name="clip-guess"
my_norm = predict("What happens on four ranks, if each clips by the norm of its piece?",
    A="the ranks' parameters drift apart",
    B="all ranks agree, and all are wrong",
    C="nothing: what is clipped is what was measured")

# %% name="clip-run"
from torch.optim import SGD

def clipped(how, ranks):
    kind = type("Clipped", (Sharded,), {"factor": how})
    return run(train, kind, partial(SGD, lr=0.3, momentum=0.9), ranks=ranks)

alone = clipped(by_my_norm, 1).values[0][0]
mine, right = clipped(by_my_norm, 4), clipped(by_the_global_norm, 4)
print("by my norm:         error", error(mine, alone))
print("by the global norm: error", error(right, alone))

# %% name="clip-seen"
same = all(torch.equal(w, mine.values[0][0]) for w, _ in mine.values)
my_norm.reveal(
    f"error {error(mine, alone)}; all ranks have the same parameters: {same}", answer="B",
    A="each parameter is updated by one rank and gathered by all, so ranks cannot differ; a check that they agree is no check",
    C="four factors in place of one turn the step into another direction",
)

# %% name="clip-picture"
right

# %% [markdown] minutes=1 core=true
# On one rank the wrong version is right. The right one adds up each rank's sum of squares: an all-reduce of *one number*, in
# ten steps 80 to 160 bytes. What lies on several ranks as a copy counts once; what is padding is zero and counts nothing.

# %% [markdown] minutes=3 core=true
# ## Does it save a factor of 4?
#
# "ZeRO 1 saves 4x", say many summaries.

# %% name="saving-guess"
factor = predict("16 bytes a parameter, 12 of them state. Four ranks: how many times less does each store?",
    A="4 times: 4 ranks", B="2.29 times", C="1.23 times: each rank drops its quarter of the 12")

# %% [markdown] core=true
# Measure: parameters in 16 bits, the state in 32, as the library's `Zero` holds them after a step.

# %% name="saving"
from lessons_lib.data_parallel import Zero

def held(stage):
    layer, group = nn.Linear(64, 64, bias=False), Mesh(dp=dist.get_world_size())["dp"]
    zero = Zero(layer, stage, group, Adam, compute_dtype=torch.bfloat16)
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    zero.step()
    return sum(zero.stored_bytes().values())

saved = {n: run(held, 0, ranks=n).values[0] / run(held, 1, ranks=n).values[0] for n in (2, 4, 8, 16, 64)}

# %% name="saving-seen"
factor.reveal(
    saved[4], answer="B",
    A="only the 12 are cut: 16 / (4 + 12/4)",
    C="a rank keeps its quarter, and drops the other three",
)

# %% name="saving-curve"
import matplotlib.pyplot as plt

from lessons_lib.cost.memory import saving

figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
ranks = [2**k for k in range(11)]
axes.plot(ranks, [saving(1, n) for n in ranks], color="#0072b2", label="formula: 16 / (4 + 12/N)")
axes.plot(saved.keys(), saved.values(), "o", color="#d55e00", label="measured")
axes.axhline(4, color="#57606a", linestyle="--", label="limit")
axes.set(title="How many times less a rank stores with ZeRO 1", xlabel="ranks N", xscale="log", ylim=(0, 4.4))
axes.set_xticks(ranks, map(str, ranks))
axes.legend()
plt.show()

# %% [markdown] minutes=1 core=true
# 2.29 times at 4 ranks, 2.91 at 8, 3.82 at 64. 4 is the limit that no number of ranks reaches: the 2 + 2 bytes stay
# whole. With momentum, whose state is 8 of 12 bytes, the limit is 3, and with plain SGD, 4 of 8, it is 2.

# %% [markdown] minutes=2 core=true
# ## In the library
#
# [`zero.py`](../lessons_lib/data_parallel/zero.py) does this for one layer after the other, so that what is sent can hide
# behind backward. Stages 0 (plain data parallel) and 1, two steps of each:

# %% name="two-stages"
from lessons_lib.data_parallel import STAGES, Zero, traffic
from lessons_lib.machines import Link, Machine

GPUS = Machine("4 small GPUs", flops_per_s=1e12, in_node=Link(1e-6, 1e11))

def two_steps(stage):
    model, group = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), Mesh(dp=4)["dp"]
    zero = Zero(model, stage, group, ADAM)
    for _ in range(2):
        zero.zero_grad()
        model(torch.ones(32, 256)).sum().backward()
        zero.step()

# %% [markdown] core=true
# The bytes by the library's formula, and counted:

# %% name="formula"
stage_0, stage_1 = (run(two_steps, stage, ranks=4, machine=GPUS, record=("memory",)) for stage in (0, 1))
n = 4 * 256 * 256
for stage, result in ((0, stage_0), (1, stage_1)):
    formula = 2 * 4 * sum(traffic(stage, n, 4).values())  # two steps, 4 bytes
    print(f"stage {stage}: {formula:,} and {result.trace.bytes_sent(0):,} bytes   {STAGES[stage]}")

# %% [markdown] core=true
# On the clock, with the memory of each rank in grey:

# %% name="stage-0"
stage_0

# %% name="stage-1"
stage_1

# %% [markdown] core=true
# The moments come with the first step, and they stay: four pieces of each with stage 0, one with stage 1. In time stage 1
# is a little later done. Its bytes are the same, but gathering begins when backward has ended and has nothing to hide
# behind.

# %% [markdown] minutes=3 more=true
# ## Two messages of different size
#
# "The same bytes" holds where gradients and parameters have the same number of bits. Often gradients are summed in
# 32 bits and parameters sent in 16. 7e9 parameters on 2 x 2 ranks, cut in two by tensor parallelism; ZeRO 1 over the
# other axis:

# %% name="messages" more=true
from lessons_lib.cost.memory import messages
from lessons_lib.timeline import ring_traffic

for what, kind, n_bytes in messages(1, 3_500_000_000, "mixed adam, fp32 gradients"):
    sent = ring_traffic(kind, n_bytes, 2)
    print(f"{kind} of {what}: a buffer of {n_bytes / 1e9:g} GB, of which a rank sends {float(sent) / 1e9:g} GB")

# %% [markdown] minutes=1 more=true
# 21 GB of buffers, where an all-reduce in 32 bits would be two halves of 14. Here ZeRO 1 sends *less*.

# %% [markdown] minutes=3 more=true
# ## Another number of ranks
#
# Four ranks save, and three go on. Their pieces begin elsewhere, and have other padding. **Guess:** can they?

# %% name="other-ranks" more=true
from tempfile import TemporaryDirectory

from lessons_lib.checkpoint import latest, load, pieces, save
from lessons_lib.data_parallel import Zero

def steps(folder, n_steps, opens=False):
    mesh = Mesh(dp=dist.get_world_size())
    zero = Zero(MLP, 1, mesh["dp"], ADAM)
    if opens:
        load(pieces(MLP, zero), latest(folder), mesh)
        zero.loaded()
    for _ in range(n_steps):
        zero.zero_grad()
        backward(MLP, mesh["dp"])
        zero.step()
    save(pieces(MLP, zero), folder, mesh, step=1 + opens)
    return torch.cat([p.detach().flatten() for p in MLP.parameters()])

# %% name="other-ranks-run" more=true
with TemporaryDirectory() as one, TemporaryDirectory() as other:
    unbroken = run(steps, one, 6, ranks=4).values[0]
    run(steps, other, 3, ranks=4)
    continued = run(steps, other, 3, True, ranks=3).values
print(f"error {max(((w - unbroken).norm() / unbroken.norm()).item() for w in continued):.0e}")

# %% [markdown] minutes=1 more=true
# They can, if a piece is saved as what it is: *elements i to j of this parameter*, without padding. A file of "rank 2's
# vector" could be opened by four ranks only.

# %% [markdown] minutes=4 core=true
# ## The same in production
#
# PyTorch has a `ZeroRedundancyOptimizer`, to be used with DDP. On the same ranks, beside the library's:

# %% name="production"
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

def n_moments(*optimizers):
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states)

def with_torch():
    group, model = Mesh(dp=4)["dp"], DistributedDataParallel(MLP)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)
    for at in range(10):
        with region("last step" if at == 9 else ""):
            backward(model, group, n_rows=len(X) / 4)  # DDP divides by 4 ranks once more
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in MLP.parameters()]), n_moments(optimizer.optim)

# %% name="production-ours"
from lessons_lib.data_parallel import Zero

def with_library():
    group = Mesh(dp=4)["dp"]
    zero = Zero(MLP, 1, group, ADAM)
    for at in range(10):
        zero.zero_grad()
        with region("last step" if at == 9 else ""):
            backward(MLP, group)
            zero.step()
    return torch.cat([p.detach().flatten() for p in MLP.parameters()]), n_moments(*(unit.optimizer for unit in zero.units))

# %% [markdown] core=true
# **Guess:** does PyTorch's send as much, and does each rank hold as much?

# %% name="production-compared"
theirs, ours = run(with_torch, ranks=4), run(with_library, ranks=4)
truth = ours.values[0][0]
worst = max(((w - truth).norm() / truth.norm()).item() for w, _ in theirs.values)
print(f"parameters differ by {worst:.0e}")
for name, result in (("torch", theirs), ("ours", ours)):
    sent = [result.trace.bytes_sent(rank, "last step") for rank in range(4)]
    print(f"{name:5} bytes of a step {sent}, in all {sum(sent)}; moments {[n for _, n in result.values]}")
theirs

# %% [markdown] minutes=2 core=true
# Equal parameters. But PyTorch's deals out *whole tensors*: rank 0 has the moments of the largest, rank 3 those of a
# small one. And it works behind DDP, which all-reduces; then each owner broadcasts what it has updated: an all-reduce
# and a half. Here "ZeRO communicates more" is true, and nothing in the idea asks for it.
#
# DeepSpeed's stage 1, Megatron-LM's distributed optimizer and this library's stop halfway.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Adam works number by number: whoever has the moments of a parameter updates it, and hands on the result.
# 2. ZeRO 1 is the all-reduce stopped halfway: reduce-scatter, update a piece, all-gather the *parameters*. Same bytes.
# 3. All parameters lie in one flat vector, padded so that the ranks can cut it evenly.
# 4. 12 of 16 bytes are cut by N: 2.29 times less at 4 ranks, 3.82 at 64, never 4.
# 5. A norm of all gradients needs all ranks. Numbers and bytes do not prove ZeRO: look at what a rank holds.
#
# **Where next:** lesson 06 cuts the gradients and the parameters, too; the [README](../README.md) has the map.
#
# *Sources:* Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), sections 3.1 and 5.1 (there "P_os");
# PyTorch's [ZeroRedundancyOptimizer](https://docs.pytorch.org/docs/stable/distributed.optim.html); the flat vector:
# Megatron-LM's [distributed optimizer](https://github.com/NVIDIA/Megatron-LM/blob/main/docs/user-guide/features/dist_optimizer.md).
