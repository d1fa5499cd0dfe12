"""Lessons 16 and 17: a right solution passes, however it is written; each wrong one is told by its name."""

import re
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from lessons_lib.grading import check
from lessons_lib.grading.catalogue import find
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.lesson_17 import N_SCHEDULES, first_illegal, place
from lessons_lib.pipeline_parallel import Schedule, first_early, gpipe, one_f_one_b, simulate
from tests.test_exercises import solved


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


# ---- 16: a stage, and what can be done with it ----


def forward(w, xs, k, n, pp):
    x = xs[k] if pp.rank == 0 else pp.recv(w.new_empty(n, w.shape[0]), pp.rank - 1).requires_grad_()
    y = torch.tanh(x @ w)
    if pp.rank < pp.size - 1:
        dist.isend(y.detach(), group_dst=pp.rank + 1, group=pp.process_group)
    return x, y


def backward(x, y, dy_or_loss, pp):
    dy_or_loss.backward() if dy_or_loss.dim() == 0 else y.backward(dy_or_loss)
    if pp.rank > 0:
        pp.send(x.grad, pp.rank - 1)


def upstream(y, share, targets, k, pp):
    if pp.rank < pp.size - 1:
        return pp.recv(torch.empty_like(y), pp.rank + 1)
    return share((y - targets[k]).square().sum(), len(y))


def pipeline(w, xs, targets, rows, pp, share=None, one_by_one=False, between=None):
    """Right, but for what is given."""
    w = w.clone().requires_grad_()
    share = share or (lambda total, n: total / sum(rows))
    kept = []
    for k, n in enumerate(rows):
        kept.append(forward(w, xs, k, n, pp))
        if one_by_one:
            backward(*kept[k], upstream(kept[k][1], share, targets, k, pp), pp)
    for k, (x, y) in enumerate(kept if not one_by_one else []):
        if between:
            between(w, k)
        backward(x, y, upstream(y, share, targets, k, pp), pp)
    return w.grad


def backwards_in_another_order(w, xs, targets, rows, pp):
    w = w.clone().requires_grad_()
    kept = [forward(w, xs, k, n, pp) for k, n in enumerate(rows)]
    for k in reversed(range(len(rows))):
        backward(*kept[k], upstream(kept[k][1], lambda total, n: total / sum(rows), targets, k, pp), pp)
    return w.grad


def own_means(w, xs, targets, rows, pp):
    return pipeline(w, xs, targets, rows, pp, lambda total, n: total / n)


def mean_of_means(w, xs, targets, rows, pp):
    return pipeline(w, xs, targets, rows, pp, lambda total, n: total / n / len(rows))


def not_divided(w, xs, targets, rows, pp):
    return pipeline(w, xs, targets, rows, pp, lambda total, n: total)


def by_all_numbers(w, xs, targets, rows, pp):
    def share(total, n):
        return total / sum(rows) / (w.shape[1] if pp.rank == pp.size - 1 else 1)

    return pipeline(w, xs, targets, rows, pp, share)


def means_of_numbers(w, xs, targets, rows, pp):
    """mse_loss of each micro-batch, added up."""
    return pipeline(w, xs, targets, rows, pp, lambda total, n: total / n / w.shape[1])


def loss_of_all_at_once(w, xs, targets, rows, pp):
    """One backward on the last rank, and then all gradients are sent."""
    if pp.rank < pp.size - 1:
        return pipeline(w, xs, targets, rows, pp)
    w = w.clone().requires_grad_()
    kept = [forward(w, xs, k, n, pp) for k, n in enumerate(rows)]
    sum(
        (y - target).square().sum() / sum(rows) for (_, y), target in zip(kept, targets, strict=True)
    ).backward()
    for x, _ in kept:
        pp.send(x.grad, pp.rank - 1)
    return w.grad


def divided_twice(w, xs, targets, rows, pp):
    return pipeline(w, xs, targets, rows, pp, lambda total, n: total / sum(rows) / len(rows))


def overwritten(w, xs, targets, rows, pp):
    def wipe(w, k):
        w.grad = None

    return pipeline(w, xs, targets, rows, pp, between=wipe)


def one_after_the_other(w, xs, targets, rows, pp):
    return pipeline(w, xs, targets, rows, pp, one_by_one=True)


def whole_batch_at_once(w, xs, targets, rows, pp):
    n = sum(rows)
    return pipeline(w, [torch.cat(xs)] if xs else [], [torch.cat(targets)] if targets else [], [n], pp)


def all_told_to_all(w, xs, targets, rows, pp):
    pp.barrier()
    pp.all_gather(torch.ones(1).double(), dim=0)
    return pipeline(w, xs, targets, rows, pp)


def gradient_awaited_first(w, xs, targets, rows, pp):
    if pp.rank < pp.size - 1:
        pp.recv(torch.empty(rows[0], w.shape[1]).double(), pp.rank + 1)
    return pipeline(w, xs, targets, rows, pp)


def nothing_kept_apart(w, xs, targets, rows, pp):
    """The input that was received has no gradient of its own."""
    w = w.clone().requires_grad_()
    for n in rows:
        x = xs[0] if pp.rank == 0 else pp.recv(w.new_empty(n, w.shape[0]), pp.rank - 1)
        if pp.rank < pp.size - 1:
            pp.send(torch.tanh(x @ w).detach(), pp.rank + 1)
    return w * 0


SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("solution", [pipeline, SLOW(backwards_in_another_order)])
def test_a_right_step_passes(solution):
    report = check("16-gpipe", solution, seed=7)
    assert report.passed, report


WRONG_STEPS = [
    (own_means, "values", r"each micro-batch has its own mean, and \d+ of them were added"),
    SLOW(mean_of_means, "values", "this is an average of averages"),
    SLOW(not_divided, "values", "this is the gradient of the sum: the loss was not divided"),
    SLOW(divided_twice, "values", r"divided twice, by all \d+ rows and by \d+ micro-batches"),
    SLOW(overwritten, "values", "this is the last micro-batch's gradient"),
    SLOW(by_all_numbers, "values", r"divided by all \d+ numbers: it is the \d+ rows that were asked for"),
    SLOW(means_of_numbers, "values", r"the mean of its own numbers, and \d+ were added"),
    SLOW(loss_of_all_at_once, "time", "and a gradient as soon as there is one"),
    (one_after_the_other, "time", "send an output off before you wait for its gradient"),
    SLOW(whole_batch_at_once, "traffic", r"went 1 messages down and 1 up, and \d+ micro-batches need"),
    SLOW(
        all_told_to_all, "traffic", "all_gather was called; stages need only their neighbours|times as much"
    ),
    (gradient_awaited_first, "no deadlock", "no rank can go on"),
    SLOW(nothing_kept_apart, "values", "zero everywhere"),
]


@pytest.mark.parametrize("solution, claim, words", WRONG_STEPS)
def test_a_wrong_step_is_told_by_its_name(solution, claim, words):
    report = check("16-gpipe", solution, seed=7)
    (line,) = (line for line in report.lines if line.claim == claim)
    assert line.passed is False and re.search(words, line.message), report
    assert report.points < report.possible


# ---- 17: the order ----


def from_the_library(p, m, r):
    return one_f_one_b(p, m).rows[r]


def with_first(rule, p, m, r):
    """1F1B with another number of forwards first."""
    first = max(1, min(rule(p, r), m))
    F, B = ([(kind, r, k) for k in range(m)] for kind in "FB")
    return F[:first] + [action for k in range(m) for action in (B[k], *F[first + k : first + k + 1])]


def all_forwards_first(p, m, r):
    return gpipe(p, m).rows[r]


def forgets_that_there_are_few(p, m, r):
    F, B = ([(kind, r, k) for k in range(max(m, p - r))] for kind in "FB")
    return F[: p - r] + [action for k in range(m) for action in (B[k], *F[p - r + k : p - r + k + 1])]


def last_backwards_missing(p, m, r):
    return one_f_one_b(p, m).rows[r][: m + 1]


def wrong_order_of_backwards(p, m, r):
    row = list(gpipe(p, m).rows[r])
    return row[:m] if r == p - 1 and p > 1 else row


def test_the_order_of_1f1b_passes():
    assert check("17-1f1b", from_the_library, seed=3).passed


WRONG_ORDERS = [
    (partial(with_first, lambda p, r: 1), "time kept", "is done at .* GPipe at"),
    (partial(with_first, lambda p, r: p), "time kept", "is done at .* GPipe at"),
    (partial(with_first, lambda p, r: p - 1 - r), "time kept", "before its first backward each rank has"),
    (partial(with_first, lambda p, r: 2 * (p - 1 - r) + 1), "little kept", r"are enough: before its first"),
    (all_forwards_first, "little kept", r"ranks keep \[.*\] micro-batches, and \[.*\] are enough"),
    (partial(with_first, lambda p, r: r + 1), "legal", "it comes to a standstill or is not whole"),
    (
        forgets_that_there_are_few,
        "legal",
        r"rank 0 does 0F\d, which is not among its actions, 0F0 to 0B\d: kind",
    ),
    (
        last_backwards_missing,
        "legal",
        r"rank 0 never does 0B\d, and every rank has \d+ forwards and \d+ backwards",
    ),
    (wrong_order_of_backwards, "legal", "never does 3B0"),
    (lambda p, m, r: all_forwards_first(p, m, 0), "legal", "rank 1 does 0F0, .* stage 1, micro-batch 0 to"),
]


@pytest.mark.parametrize("solution, claim, words", WRONG_ORDERS)
def test_a_wrong_order_is_told_by_its_name(solution, claim, words):
    """Judged here, as a check does it in its child process."""
    said = judged("17-1f1b", solution)
    assert any(re.search(words, message) for message in said[claim]), said
    assert not any(judged("17-1f1b", from_the_library).values())


@cache
def trials(id, seed):
    return find(id).trials(Draw(seed))


def judged(id, solution, seed=3):
    """What is said about each claim of an exercise, without a child process."""
    said = {claim.key: [] for claim in find(id).claims}
    for trial in trials(id, seed):
        found = []
        for rank, args in enumerate(trial.args):
            mesh = type("Rank", (), {"rank": rank})()
            found.append(trial.then(solution(*args), mesh))
        for number, output in enumerate(trial.outputs):
            said[output.claim] += filter(None, [output.judged([each[number] for each in found])])
    return said


# ---- 17: the checker ----


def last_stage(slots):
    return max(action[1] for row in slots for action in row if action)


def needs(kind, stage, k, last):
    if kind == "F":
        return [("F", stage - 1, k)] * (stage > 0)
    return [("F", stage, k)] + [("B", stage + 1, k)] * (stage < last)


def by_ends(slots, same_slot=False, twice=True, rank_first=False, of=needs):
    """Right, and written unlike ours: look up when everything was done first."""
    last, made = last_stage(slots), {}
    places = sorted((t, r) for r, row in enumerate(slots) for t, action in enumerate(row) if action)
    for t, r in places:
        made.setdefault(slots[r][t], (t, r))
    order = sorted(places, key=lambda place: place[::-1]) if rank_first else places
    for t, r in order:
        action = slots[r][t]
        when = [made.get(need, (10**6, 0))[0] for need in of(*action, last)]
        if any(end > t if same_slot else end >= t for end in when) or (twice and made[action] != (t, r)):
            return r, t
    return ()


def own_forward_only(kind, stage, k, last):
    return [("F", stage, k)] if kind == "B" else [("F", stage - 1, k)] * (stage > 0)


def last_number_of_ranks(slots):
    """As if every rank had one stage."""
    return by_ends(slots, of=lambda kind, stage, k, _: needs(kind, stage, k, len(slots) - 1))


def only_the_order(slots):
    """Ranks may take their time: the slots are not looked at."""
    rows = [[action for action in row if action] for row in slots]
    at, done, last = [0] * len(rows), set(), last_stage(slots)
    while True:
        can = [
            r
            for r, row in enumerate(rows)
            if at[r] < len(row) and done.issuperset(needs(*row[at[r]], last)) and row[at[r]] not in done
        ]
        if not can:
            break
        for r in can:
            done.add(rows[r][at[r]])
            at[r] += 1
    stuck = [r for r, row in enumerate(rows) if at[r] < len(row)]
    return (stuck[0], slots[stuck[0]].index(rows[stuck[0]][at[stuck[0]]])) if stuck else ()


def test_the_checker_passes_and_a_broken_one_does_not():
    assert check("17-check", by_ends, seed=11).passed
    report = check("17-check", partial(by_ends, same_slot=True), seed=11)
    assert not report.passed and report.points == 0, report
    assert "it was called legal, but" in report.lines[0].message and "rank 0: 0F0" in report.lines[0].message


@pytest.mark.slow
def test_a_checker_that_nobody_has_written_gets_nothing():
    report = check("17-check", lambda slots: None, seed=11)
    assert report.points == 0 and "nothing came back" in report.lines[0].message


WRONG_CHECKERS = [
    (lambda slots: (), {"told apart", "first"}, "it was called legal, but .* needs .*, which"),
    (lambda slots: (0, 0), {"told apart", "first"}, "it is legal, and you named slot 0 of rank 0, "),
    (partial(by_ends, same_slot=True), {"told apart", "first"}, "it was called legal, but"),
    (partial(by_ends, twice=False), {"told apart", "first"}, "has been done before"),
    (partial(by_ends, rank_first=True), {"first"}, "you named slot .*, and before that .* needs"),
    (partial(by_ends, of=own_forward_only), {"told apart", "first"}, "it was called legal, but"),
    (last_number_of_ranks, {"told apart", "first"}, "it is legal, and you named|it was called legal, but"),
    (only_the_order, {"told apart", "first"}, "it was called legal, but"),
]


@pytest.mark.parametrize("solution, claims, words", WRONG_CHECKERS)
def test_a_wrong_checker_is_told_what_it_overlooks(solution, claims, words):
    said = judged("17-check", solution, seed=11)
    assert {claim for claim, messages in said.items() if messages} == claims
    assert any(re.search(words, message) for messages in said.values() for message in messages)


def test_the_schedules_are_two_hundred_and_half_of_them_broken():
    """And the library's own check of drawings names the same action, where it speaks of the same thing."""
    drawn = [trial.args[0][0] for trial in trials("17-check", 11)]
    broken = [slots for slots in drawn if first_illegal(slots)]
    assert (len(drawn), len(broken)) == (N_SCHEDULES, N_SCHEDULES // 2) == (200, 100)
    assert all(slots not in drawn[at + 1 :] for at, slots in enumerate(drawn))
    sizes = [sum(map(len, slots)) for slots in drawn]
    assert sizes == sorted(sizes)  # the first that is told apart wrongly is a small one
    assert {trial.facts for trial in trials("17-check", 11)} > {
        "a legal schedule",
        "a schedule in which an action is missing",
    }
    assert any(len({action[1] for action in row if action}) > 1 for slots in drawn for row in slots)  # chunks
    for slots in drawn:
        assert by_ends(slots) == first_illegal(slots)
        actions = [action for row in slots for action in row if action]
        if len(set(actions)) < len(actions):  # one twice, which is not a matter of time
            continue
        starts = [[t for t, action in enumerate(row) if action] for row in slots]
        schedule = Schedule.of("drawn", [[action for action in row if action] for row in slots])
        fault = first_early(schedule, starts, [[start + 1 for start in row] for row in starts])
        right = (fault.rank, starts[fault.rank][fault.index]) if fault else ()
        assert first_illegal(slots) == right


def test_a_checker_that_returns_something_else_is_told_so():
    with pytest.raises(ValueError, match=r"return \(rank, slot\), or \(\) where all is legal, not 3"):
        place(3, None)


# ---- what the notebooks say ----


def test_the_numbers_in_the_text_of_16() -> None:
    text, names = solved("16_pipeline_stages")
    assert names["SIZES"] == (4, 7, 5, 6) and len(names["ROWS"]) == 4 and len(set(names["ROWS"])) > 1
    assert "With four micro-batches and three ranks, 8 messages went over each border." in text
    tried = names["tried"]
    for border in range(2):
        both = {border, border + 1}
        assert sum(e.kind == "send" and {e.rank, e.peer} == both for e in tried.trace.events) == 8
    for rank, found in enumerate(tried.values):
        right = names["ws"][rank].grad
        assert (found - right).norm() < 1e-14 * right.norm()


def test_the_numbers_in_the_text_of_17(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("builtins.display", shown.append, raising=False)
    text, names = solved("17_pipeline_1f1b")
    assert "done at the same time, 33, with peaks of 4, 3, 2 and 1" in text and len(shown) == 1
    timeline = simulate(Schedule.of("yours", names["rows"]))
    assert timeline.makespan == simulate(gpipe(4, 8)).makespan == 33
    assert timeline.peak_in_flight() == [4, 3, 2, 1]
    assert "in the second rank 0 goes back too early, in slot 2" in text
    checker = names["first_illegal"]
    assert (checker(names["legal"]), checker(names["early"])) == ((), (0, 2))
    assert "With 8 ranks and 3 micro-batches rank 0 does 3 forwards" in text
    assert [action[0] for action in names["one_f_one_b_row"](8, 3, 0)] == ["F"] * 3 + ["B"] * 3
