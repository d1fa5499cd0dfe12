# %% [markdown] minutes=1 core=true
# # Pipeline II: 1F1B
#
# GPipe does all forwards, then all backwards. But the last stage has the loss of the first micro-batch long before the
# other forwards are through. **1F1B** goes back at once, and then does one forward and one backward in turn. It starts its
# backward earlier. **Is it earlier done?**

# %% tags=["setup"]
from fractions import Fraction

import torch
import torch.distributed as dist

from lessons_lib import compute, run
from lessons_lib.errors import DeadlockError
from lessons_lib.grading import predict, recap
from lessons_lib.machines import Machine
from lessons_lib.pipeline_parallel import Schedule, Times, draw, gpipe, one_f_one_b, simulate

earlier = predict("1F1B starts its backward earlier than GPipe. Is it earlier done?",
    A="yes: its bubble is smaller", B="no: both are done at the same time", C="no: it is done later")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("17")

# %% [markdown] minutes=4 core=true
# ## A schedule is data
#
# A **schedule** says who does what in which order: a list of actions for every rank. An action is a kind, a stage and a
# micro-batch. GPipe takes one line:

# %% name="by-hand"
def all_then_all(p, m):
    return [[(kind, r, k) for kind in "FB" for k in range(m)] for r in range(p)]

print(Schedule.of("GPipe", all_then_all(p=3, m=4)))

# %% [markdown] core=true
# `1F2` is stage 1, forward, micro-batch 2. **No time stands in a schedule.** An action starts when its rank is free and
# when what it needs is there:
#
# | | needs |
# |---|---|
# | F | the output of the stage before |
# | B | its own F, and the gradient from the stage after; on the last stage only its own F |
#
# Forward takes 1; backward is two products, so it takes 2. (The axis calls them I and W; lesson 19 takes them apart.) `draw`
# finds all starts and ends. **Guess:** how many micro-batches does a rank keep?

# %% name="gpipe-picture"
draw(Schedule.of("GPipe", all_then_all(p=4, m=8)))

# %% [markdown] core=true
# The curve below a rank is what it keeps: a micro-batch from its forward to its backward. All eight, on every rank. Lesson
# 16 wanted *many* micro-batches, for a small bubble. Here they fill the memory.

# %% [markdown] minutes=6 core=true
# ## How many forwards first?
#
# To keep little, go back early. But whoever goes back too early waits: the first gradient has to come all the way from the
# last stage.

# %% name="warm-up-guess"
warm_up = predict("No rank shall wait longer than it must. How many forwards does rank r of 4 do before its first backward?",
    A="one, on every rank: it is called one forward, one backward",
    B="4 − r: four on rank 0, one on rank 3",
    C="four, on every rank: as many as there are stages")

# %% name="rows"
def in_turn(p, m, r, first):
    """`first` forwards, then a backward and a forward in turn, then the rest."""
    F, B = ([(kind, r, k) for k in range(m)] for kind in "FB")
    row = F[:first]
    for k in range(m):
        row += [B[k], *F[first + k : first + k + 1]]
    return row

print(*("{1}{0}{2}".format(*action) for action in in_turn(p=4, m=8, r=2, first=2)))

# %% name="three-rules"
rules = {"one": lambda r: 1, "4 - r": lambda r: 4 - r, "four": lambda r: 4}
made = {name: Schedule.of(name, [in_turn(4, 8, r, rule(r)) for r in range(4)]) for name, rule in rules.items()}
for name, schedule in made.items():
    print(f"{name:6} done at {simulate(schedule).makespan},  kept", simulate(schedule).peak_in_flight())

# %% name="warm-up-seen"
warm_up.reveal({name: simulate(schedule).makespan for name, schedule in made.items()}, answer="B",
    A="then one micro-batch at a time walks down and back up, and everybody else waits",
    C="rank 3 has the first gradient after one forward; if it does three more, all others wait for it")

# %% [markdown] core=true
# **The warm-up rule.** The last rank goes back after one forward, the one before after two: rank r after p − r. From then
# on, one backward and one forward in turn, so a rank keeps p − r micro-batches and never more. With fewer micro-batches
# than that, it has no more than there are.
#
# Now both on one axis:

# %% name="both-picture"
draw(gpipe(4, 8), one_f_one_b(4, 8))

# %% name="first-seen"
ends = {schedule.name: simulate(schedule).makespan for schedule in (gpipe(4, 8), one_f_one_b(4, 8))}
earlier.reveal(ends, answer="B",
    A="the first gradients come earlier, but the last one does not, and it ends the step",
    C="not while messages take no time; wait for the slow ones below")

# %% [markdown] core=true
# Neither can be faster. The last stage starts after 3 forwards, has 8 forwards and 8 backwards to do, and its last
# gradient takes 3 backwards to the first stage: 3 + 24 + 6 = 33. **1F1B does not shrink the bubble.**

# %% [markdown] minutes=3 core=true
# ## Then what is it for?
#
# With the same number of ranks, more and more micro-batches.

# %% name="memory-guess"
keeps = predict("4 ranks, 32 micro-batches. How many does rank 0 keep, with GPipe and with 1F1B?",
    A="32 and 32", B="32 and 16", C="32 and 4")

# %% name="memory"
for m in (4, 8, 16, 32):
    one, other = simulate(gpipe(4, m)), simulate(one_f_one_b(4, m))
    assert one.bubble == other.bubble
    print(f"m = {m:2}  bubble {float(one.bubble):4.0%}  rank 0 keeps", one.peak_in_flight()[0], "and", other.peak_in_flight()[0])

# %% name="memory-seen"
kept = [simulate(generator(4, 32)).peak_in_flight() for generator in (gpipe, one_f_one_b)]
keeps.reveal(kept, answer="C",
    A="GPipe frees nothing before the last forward; 1F1B frees one before each new one",
    B="it is not half of them: it is p − r, whatever m is")

# %% [markdown] core=true
# With 16:

# %% name="memory-picture"
draw(gpipe(4, 16), one_f_one_b(4, 16))

# %% [markdown] core=true
# The bubble depends on m, and with 1F1B the memory does not. With room for four micro-batches GPipe stands still 43 % of
# the time; 1F1B takes 32 of them, and 9 %. That is the whole gain. It is not even: rank 0 keeps four, rank 3 one.

# %% [markdown] minutes=7 core=true
# ## What happens before what
#
# Not every order can be carried out. Say rank 3 runs GPipe's row, and the others 1F1B's. (Somebody forgot a flag on one
# node.)

# %% name="mixed-guess"
mixed_up = predict("Ranks 0 to 2 follow 1F1B, rank 3 follows GPipe. What happens?",
    A="it works, only later: every single row is a legal one",
    B="rank 3 stops, and the others go on",
    C="all of them stop")

# %% [markdown] core=true
# An action **happens before** another if it stands before it on the same rank, or makes what that one needs; and so on,
# over any number of steps. If something comes before itself, nobody can do it. To find out, let every rank go as far as it
# can:

# %% name="checker"
def needs(kind, stage, k, last):
    if kind == "F":
        return [("F", stage - 1, k)] * (stage > 0)
    return [("F", stage, k)] + [("B", stage + 1, k)] * (stage < last)

def how_far(rows):
    """How many actions each rank can do."""
    done, at, moved = set(), [0] * len(rows), True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row) and done.issuperset(needs(*row[at[r]], last=len(rows) - 1)):
                done.add(tuple(row[at[r]]))
                at[r], moved = at[r] + 1, True
    return at

# %% name="mixed"
mixed = [*one_f_one_b(4, 8).rows[:3], gpipe(4, 8).rows[3]]
print("1F1B ", how_far(one_f_one_b(4, 8).rows), "of 16 each")
print("mixed", how_far(mixed))
for r, n in enumerate(how_far(mixed)):
    print(f"rank {r} stands before {mixed[r][n]}")

# %% name="mixed-seen"
mixed_up.reveal(f"of 16 actions each, {how_far(mixed)} are done", answer="C",
    A="legal is a schedule, not a row: GPipe's row is right among GPipe's rows",
    B="rank 2 waits for a gradient of rank 3, rank 1 for one of rank 2, and so on up")

# %% [markdown] core=true
# All ranks wait, and as in lesson 02 those that wait need not be at fault. The library's checker follows the circle and
# names its members:

# %% name="named" tags=["raises-exception"]
from lessons_lib.pipeline_parallel import check

check(Schedule.of("mixed", mixed))

# %% [markdown] minutes=4 core=true
# ## Too good to be true
#
# A drawing has times, so it can be wrong in another way, too. This 1F1B was drawn by hand. One slot is one action, forward
# or backward, and a dot is a rank that waits. It is three slots shorter than the right one. **Guess:** which action is the
# first that cannot be where it is?

# %% name="drawn"
from lessons_lib.pipeline_parallel import first_early, read_slots

drawn = read_slots("""
rank 0  0F0 0F1 0F2 0F3 0B0 0B1  .  0B2  .  0B3  .
rank 1   .  1F0 1F1 1F2 1B0 1F3 1B1  .  1B2  .  1B3
rank 2   .   .  2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3  .
rank 3   .   .   .  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3
""")
drawn

# %% name="drawn-fault"
print("drawn: ", drawn.makespan, "slots   right:", simulate(one_f_one_b(4, 4), Times(B=1)).makespan)
print(first_early(drawn.schedule, drawn.starts, drawn.ends))

# %% [markdown] core=true
# The order is legal; the times are not. A gradient cannot be used in the slot in which it is made, let alone before it.
# Lecture slides and simulators have both faults, and "1F1B has a smaller bubble" is what they show. A picture of a schedule
# has to come from a run, or from something that checks it.

# %% [markdown] minutes=5 core=true
# ## Legal, and it hangs
#
# Now ranks that really send. A stage computes nothing here but takes its time, on a virtual clock. `send` is `dist.send`,
# which blocks until the other side receives, or `dist.isend`.

# %% name="carry-out"
def carry_out(schedule, send):
    r, p, works = dist.get_rank(), dist.get_world_size(), []
    for kind, _, k in schedule.rows[r]:
        source, to = (r - 1, r + 1) if kind == "F" else (r + 1, r - 1)
        if 0 <= source < p:
            dist.recv(torch.empty(1), source)
        compute(1 if kind == "F" else 2)
        if 0 <= to < p:
            works.append(send(torch.full((1,), float(k)), to))
    for work in filter(None, works):
        work.wait()

# %% name="blocking-guess"
blocking = predict("Both schedules are legal. Which of them hang with blocking sends?",
    A="neither: they are legal", B="1F1B", C="both: a pipeline needs isend")

# %% name="blocking-gpipe"
FREE = Machine("free")  # where messages take no time
print("GPipe, send: ", run(carry_out, gpipe(4, 8), dist.send, ranks=4, machine=FREE).trace.timeline.makespan)
at_once = run(carry_out, one_f_one_b(4, 8), dist.isend, ranks=4, machine=FREE)
print("1F1B,  isend:", at_once.trace.timeline.makespan)
at_once

# %% name="blocking-1f1b" tags=["raises-exception"]
run(carry_out, one_f_one_b(4, 8), dist.send, ranks=4, machine=FREE)

# %% name="blocking-seen"
try:
    run(carry_out, one_f_one_b(4, 8), dist.send, ranks=4, machine=FREE)
except DeadlockError as error:
    blocking.reveal(str(error).partition("Why: ")[2].partition("\n")[0], answer="B",
        A="a blocking send needs something, too: that the other side receives. The schedule does not know that",
        C="in GPipe all messages go one way, and later all go the other way, so somebody always receives")

# %% [markdown] core=true
# In 1F1B an output goes down a border while a gradient comes up. Both sides send first, as in lesson 02. So 1F1B sends
# without blocking, or posts a send and a receive together: `batch_isend_irecv`, Megatron's `send_forward_recv_backward`.
# With small messages the blocking program may even pass, since they fit into a buffer. On a real cluster it then hangs
# the day the model grows.

# %% [markdown] minutes=6 core=true
# ## Slow messages
#
# So far a message arrived at once. Now it takes a tenth of a forward.

# %% name="latency-guess"
slow = predict("Messages take a tenth of a forward. Which is done first?",
    A="still both at the same time", B="1F1B: it has more time to hide messages in", C="GPipe")

# %% name="latency"
found = {}
for c in (0, Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), 1):
    found[c] = [float(simulate(generator(4, 8), Times(send=c)).makespan) for generator in (gpipe, one_f_one_b)]
    print(f"a message takes {float(c):4}:  GPipe {found[c][0]:5}  1F1B {found[c][1]:5}")

# %% name="latency-seen"
slow.reveal(found[Fraction(1, 10)], answer="C",
    A="the bubble is the same only where messages take no time",
    B="it has less: after the warm-up a rank has one gradient to wait for before each forward")

# %% name="latency-picture"
draw(gpipe(4, 8), one_f_one_b(4, 8), times=Times(send=1), critical_path=True)

# %% [markdown] core=true
# The outlined actions decide when it ends. GPipe's go down once and come back once: it waits for 2 (p − 1) messages, here 6,
# and in between each rank has a queue of work. In 1F1B rank 0 has four micro-batches on their way and begins the fifth when
# the first is back, the ninth when the fifth is. So every four of them wait for one more round trip: 16 messages here, and
# more the more micro-batches there are.
#
# Now find a latency at which interleaving (lesson 18) beats both, and one at which it does not:

# %% name="explorer"
from lessons_lib.widgets import pipeline_explorer

pipeline_explorer("gpipe", "1f1b", m=8, latency="1")

# %% [markdown] minutes=4 more=true
# ## A little more warm-up
#
# More forwards at the start are a store of work, and work hides messages. With 2 (p − 1 − r) + 1 forwards first, there is
# one for each hop of the round trip, and one more. **Guess:** what does it cost, and how slow may messages be?

# %% name="more-warm-up"
def patient(p, m):
    return Schedule.of("patient 1F1B", [in_turn(p, m, r, 2 * (p - 1 - r) + 1) for r in range(p)])

def in_turn(p, m, r, first):
    F, B = ([(kind, r, k) for k in range(m)] for kind in "FB")
    return F[:first] + [action for k in range(m) for action in (B[k], *F[first + k : first + k + 1])]

for schedule in (gpipe(4, 8), one_f_one_b(4, 8), patient(4, 8)):
    ends = [float(simulate(schedule, Times(send=c)).makespan) for c in (0, Fraction(1, 10), 1)]
    print(f"{schedule.name:12}", ends, "kept", simulate(schedule).peak_in_flight())

# %% [markdown] more=true
# It is as early as GPipe, even where a message takes as long as a forward, and keeps 7, 5, 3 and 1 instead of 4, 3, 2 and
# 1, whatever m is. Megatron-LM's interleaved schedule begins in the same way.

# %% [markdown] minutes=4 core=true
# ## On real stages
#
# `execute` trains real stages by any schedule (lesson 16), here of two layers each. A micro-batch has 16 rows. The bytes of
# all tensors are counted, those of the batch and of the weights set aside.

# %% name="stages"
from torch import nn

from lessons_lib import Mesh
from lessons_lib.pipeline_parallel import cut_batch, execute

D = 64
torch.manual_seed(0)
LAYERS = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(8))).double()
X, T = torch.randn(2, 512, D, dtype=torch.float64)

def train(generator, m):
    group = Mesh(pp=4)["pp"]
    mine = LAYERS[2 * group.rank : 2 * group.rank + 2]
    batch = cut_batch(X[: 16 * m], T[: 16 * m], m)
    squares = lambda y, t: (y - t).square().sum()
    execute(generator(4, m), {group.rank: mine}, batch, squares, group)
    return [parameter.grad for parameter in mine.parameters()]

# %% name="measured"
fixed = X.nbytes + T.nbytes + sum(parameter.nbytes for parameter in LAYERS[:2].parameters())

def peak_kB(generator, m):
    trace = run(train, generator, m, ranks=4, record=("memory",)).trace
    return (trace.peak_bytes(0) - fixed) / 1e3

for m in (8, 16, 32):
    print(f"m = {m:2}   rank 0 at its peak: GPipe {peak_kB(gpipe, m):3.0f} kB, 1F1B {peak_kB(one_f_one_b, m):3.0f} kB")

# %% [markdown] core=true
# GPipe grows with the batch, and 1F1B does not. (Both hold the gradients of two layers, 67 kB.)
#
# ### The same in production
#
# PyTorch calls it `Schedule1F1B`. The same stages, on the same ranks:

# %% name="production"
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

def with_torch(m):
    r, p = dist.get_rank(), dist.get_world_size()
    mine = LAYERS[2 * r : 2 * r + 2]
    means = lambda y, t: (y - t).square().mean()
    schedule = Schedule1F1B(PipelineStage(mine, r, p, torch.device("cpu")), m, loss_fn=means)
    schedule.step(*[X[: 16 * m]] * (r == 0), target=T[: 16 * m] if r == p - 1 else None)
    return [parameter.grad for parameter in mine.parameters()]

# %% name="production-compared"
def together(result):
    return torch.cat([gradient.flatten() for gradients in result.values for gradient in gradients])

ours, gpipes, torchs = (together(run(*each, 32, ranks=4)) for each in ((train, one_f_one_b), (train, gpipe), (with_torch,)))
for name, other in (("GPipe", gpipes), ("torch's 1F1B", torchs)):
    print(f"1F1B and {name}: gradients differ by {((ours - other).norm() / ours.norm()).item():.0e}")

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. A schedule is a list of actions for every rank. Times follow; they do not stand in it.
# 2. 1F1B: rank r does p − r forwards, then one backward and one forward in turn.
# 3. The bubble is GPipe's. The memory is not: p − r micro-batches, whatever m is.
# 4. Legal is a whole schedule, if nothing happens before itself. Blocking sends ask for more, and 1F1B hangs with them.
# 5. With slow messages 1F1B is later than GPipe: each p micro-batches wait for one more round trip.
#
# **Where next:** make the order, and check others', in the exercise; in lesson 18 pieces get smaller, and so does the bubble.
# The [README](../README.md) has the map.
#
# *Sources:* Narayanan et al. 2021, [PipeDream-2BW](https://arxiv.org/abs/2006.09503) (PipeDream-Flush); Fan et al. 2021,
# [DAPPLE](https://arxiv.org/abs/2007.01045), who name the warm-up. Neighbours that both send first: [NCCL, issue
# 479](https://github.com/NVIDIA/nccl/issues/479). "1F1B has a smaller bubble", by a simulator that does two things in a slot:
# [algolocal, pull request 95](https://github.com/zxypro1/algolocal/pull/95).
