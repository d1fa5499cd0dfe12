# %% [markdown] minutes=2 more=true
# # Schedule puzzles
#
# A pipeline, some micro-batches, and a clock: what does every rank do, in which order? Fourteen puzzles, from two ranks
# to four with everything at once. The first seven need lesson 17, the eighth lesson 18, the others lesson 19. **How early
# can you be done?**
#
# There is no end to this notebook. Come back to it.

# %% tags=["setup"]
from lessons_lib.pipeline_parallel import PUZZLES, one_f_one_b, write_grid, zb_h1, zb_v

# %% [markdown] minutes=5 more=true
# ## How to play
#
# Each puzzle says which rank has which stages, how long actions take, and what a rank may keep.

# %% name="first"
PUZZLES[1]

# %% [markdown] more=true
# An answer is a grid: a row for each rank, its actions in order. `1B0` is stage 1, backward, micro-batch 0. Here is one
# that does one micro-batch after the other. Dots and spaces are only for your eyes.

# %% name="slow"
PUZZLES[1].play("""
0F0  .   .  0B0 0F1  .   .  0B1 0F2  .   .  0B2
 .  1F0 1B0  .   .  1F1 1B1  .   .  1F2 1B2
""")

# %% [markdown] more=true
# Legal, and slow: each rank stands still half of the time. The outlined actions follow each other to the very end: to be
# done earlier, break this chain. The last line of the text names a pause to begin with.
#
# **Guess:** what happens if rank 0 does everything forward first, and rank 1 begins with a backward?

# %% name="illegal"
PUZZLES[1].play("""
0F0 0F1 0F2 0B0 0B1 0B2
1B0 1F0 1F1 1B1 1F2 1B2
""")

# %% [markdown] more=true
# It is told the first action that is wrong, and what it waits for. What *can* come next, after what you have so far?

# %% name="next"
print(PUZZLES[1].next("""
0F0 0F1
1F0
"""))

# %% name="why-not"
print(PUZZLES[1].why_not("0B0", so_far="0F0 0F1 \n 1F0"))

# %% [markdown] more=true
# Your turn: here is the slow answer again, to be made better. You have the best score when it says "the best that is
# known".

# %% name="mine-1"
PUZZLES[1].play("""
0F0 0B0 0F1 0B1 0F2 0B2
1F0 1B0 1F1 1B1 1F2 1B2
""")

# %% [markdown] more=true
# Stuck? There are `hint(1)`, `hint(2)` and `hint(3)`, each saying more.

# %% name="hint"
print(PUZZLES[1].hint(1))

# %% [markdown] minutes=3 more=true
# ## On ranks
#
# A legal schedule is a program. `execute()` trains real layers by it, one rank for each of the puzzle's: the gradients
# are compared with a serial model's, the bytes are counted, the memory is measured.

# %% name="executed"
done = PUZZLES[1].play(PUZZLES[1].start).execute()
print(done)

# %% name="executed-picture"
done.timeline

# %% [markdown] more=true
# However bad a legal schedule is, its gradients are right. It is only late.

# %% [markdown] minutes=10 more=true
# ## Two easy steps, and a wire
#
# 2 is there to be filled, 3 has little memory, 4 has slow messages. The answers below are legal and slow.

# %% name="puzzle-2"
print(PUZZLES[2])
PUZZLES[2].play("""
0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
""")

# %% name="puzzle-3"
print(PUZZLES[3])
PUZZLES[3].play("""
0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4 0F5 0B5
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
""")

# %% [markdown] more=true
# An answer may also be a schedule of the library, or your own function of (p, m). **Guess:** 1F1B has the best score in 3.
# Has it in 4?

# %% name="puzzle-4"
print(PUZZLES[4])
PUZZLES[4].play(one_f_one_b)

# %% [markdown] minutes=20 more=true
# ## Where 1F1B is not the best
#
# A slow stage; slow wires with a small store; two places for four ranks; stages that go round twice.
# `print(PUZZLES[5].start)` prints a legal answer to begin with; `write_grid` makes text of any schedule.

# %% name="puzzle-5"
print(PUZZLES[5])
PUZZLES[5].play(one_f_one_b)

# %% name="puzzle-6"
print(PUZZLES[6])
print(write_grid(one_f_one_b(4, 8)))

# %% name="puzzle-6-play"
PUZZLES[6].play(one_f_one_b)

# %% name="puzzle-7"
print(PUZZLES[7])
PUZZLES[7].play(PUZZLES[7].start)

# %% name="puzzle-8"
print(PUZZLES[8])
PUZZLES[8].play(PUZZLES[8].start)

# %% [markdown] minutes=20 more=true
# ## Place the W
#
# From here on the backward is split: I is awaited, W is not (lesson 19). A micro-batch is kept until its W is done.

# %% name="puzzle-9"
print(PUZZLES[9])
PUZZLES[9].play(PUZZLES[9].start)

# %% name="puzzle-10"
print(PUZZLES[10])
PUZZLES[10].play(PUZZLES[10].start)

# %% [markdown] more=true
# ZB-H1 would be early enough for the next one. **Guess:** what speaks against it?

# %% name="puzzle-11"
print(PUZZLES[11])
PUZZLES[11].play(zb_h1)

# %% [markdown] minutes=20 more=true
# ## In a V
#
# Rank 0 has the first stage and the last.

# %% name="puzzle-12"
print(PUZZLES[12])
PUZZLES[12].play(PUZZLES[12].start)

# %% name="puzzle-13"
print(PUZZLES[13])
PUZZLES[13].play(PUZZLES[13].start)

# %% [markdown] more=true
# The last one has 192 actions. ZB-V is a good beginning, and not the best: write a program that looks for a better one.

# %% name="puzzle-14"
print(PUZZLES[14])
PUZZLES[14].play(zb_v)

# %% [markdown] minutes=4 more=true
# ## Where you stand
#
# Put your answers here: 1 star for a legal one, 2 within the memory, 3 for the best that is known.

# %% name="scores"
mine = {4: one_f_one_b, 11: zb_h1}

for number, puzzle in PUZZLES.items():
    attempt = puzzle.play(mine.get(number, puzzle.start))
    print(f"{number:2} {puzzle.name:25} {'*' * attempt.score:3}  done at {float(attempt.timeline.makespan):5.4g}, "
          f"best known {float(puzzle.best_known):.4g}, nobody before {float(puzzle.at_least):.4g}")

# %% [markdown] more=true
# "Nobody before" is a bound: one micro-batch there and back, and every rank's own work, with what must come before and
# after it. Where it equals the best known, you cannot do better. Where it does not, nobody knows: the best was found by
# a search, and yours may be earlier. It will say so.

# %% [markdown] minutes=1 more=true
# ## To remember
#
# 1. A schedule is an order and nothing else; the times follow from what each action needs.
# 2. Any legal order gives the same gradients.
# 3. The busiest rank decides: begin its work early, never let it stand still, and end soon after it.
# 4. A place in the memory is worth a round trip: who keeps more waits less.
# 5. What nobody waits for, W, belongs where the rank would stand still.
#
# In production nobody searches by hand: the zero-bubble paper's scheduler does it from measured times, and PyTorch runs
# any such table: [`write_csv`](../lessons_lib/pipeline_parallel/text.py) writes what its runtime reads.
#
# *Sources:* Qi et al. 2024, [Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241), section 3.
