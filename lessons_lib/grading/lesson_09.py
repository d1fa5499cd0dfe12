"""The exercises of lesson 09: the two ends of a GPT, whose words lie on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lessons_lib.grading.exercise import (
    Axis,
    Budget,
    Claim,
    Draw,
    Exercise,
    Output,
    Trial,
    sizes_text,
    sums_along,
)
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Group, sum_copy
from lessons_lib.models.gpt import IGNORED
from lessons_lib.tensor_parallel import VOCABULARIES, cross_entropy
from lessons_lib.tensor_parallel.vocabulary import Vocabulary
from lessons_lib.timeline import ring_traffic

# ---- the solutions ----


def embed(tokens: Tensor, table: Tensor, tp: Group) -> Tensor:
    """Return the rows of the table that ``tokens`` name, whole on every rank, so that autograd finds dtable.

    ``tokens`` are all tokens; ``table`` is this rank's n rows of the table, n x D, layout ``V@tp D``: rank r
    of ``tp`` has the rows of the words r n to (r+1) n - 1.
    """
    at = tokens - tp.rank * len(table)
    here = (at >= 0) & (at < len(table))
    rows = functional.embedding(at.where(here, 0), table).masked_fill(~here[:, None], 0)
    return sum_copy(rows, tp)


def losses_forward(logits: Tensor, labels: Tensor, V: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, whole on every rank, and this rank's columns of the softmax.

    ``logits`` is this rank's columns of all logits, layout ``B V@tp``. From word ``V`` on, counted over all
    ranks, columns are padding, whatever they hold: the softmax is 0 there. ``labels`` are all labels; where
    one is -100 the loss is 0. Logits may be as large as 1000, and as small as -1000.
    """
    n = logits.shape[1]
    word = torch.arange(n) + tp.rank * n
    scores = logits.masked_fill(word >= V, -torch.inf)
    scores = scores - tp.all_reduce(scores.amax(1), "max")[:, None]
    softmax = scores.exp()
    total = tp.all_reduce(softmax.sum(1))
    own = scores.masked_fill(word != labels[:, None], 0).sum(1)
    losses = total.log() - tp.all_reduce(own)
    return losses.masked_fill(labels == -100, 0), softmax / total[:, None]


def losses_backward(dlosses: Tensor, softmax: Tensor, labels: Tensor, tp: Group) -> Tensor:
    """Return this rank's columns of dlogits.

    ``dlosses`` is the gradient of every token's loss; ``softmax`` is this rank's columns, as the forward
    returned them, and ``labels`` are all labels. Where a label is -100, no logit has a gradient.
    """
    n = softmax.shape[1]
    is_label = torch.arange(n) + tp.rank * n == labels[:, None]
    return (softmax - is_label.to(softmax.dtype)) * (dlosses * (labels != -100))[:, None]


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 1, "tp": 4})
NOT_ADDED_UP = "this is each rank's own part: the parts were not added up over tp"
TOO_MANY = "this is a sum over all ranks of the mesh: tp is one axis of it"
WORD_0 = "the label of another rank's word was taken for this rank's first word"
OWN_MAX = "each rank subtracted its own maximum: all have to subtract the same"
PADDING = "padding was counted: its words are none"
COUNTED = "a token whose label is -100 was counted"
LABEL_NOT_LESS = "m is to be taken from the label's logit, too, as from all others"
NOT_DIVIDED = "this is exp(logit - m), not yet divided by the sum"
NO_LABEL = "this is the softmax alone: at the label, 1 is to be taken from it"
EVERY_FIRST = "labels count over all ranks: rank r, with n of them, has those from r n on"


class Setting:
    """The sizes and tensors of a trial. Data-parallel rows of the mesh have tokens of their own."""

    def __init__(self, draw: Draw, sizes: Mapping[str, int], B: int, n: int, V: int) -> None:
        self.sizes, self.p = sizes, sizes["tp"]
        self.B, self.n, self.V = B, n, V
        self.rows = [self._labels(draw) for _ in range(sizes["dp"])]

    def _labels(self, draw: Draw) -> Tensor:
        """The words beside the first border and the outermost, any others, and two that are ignored."""
        at_borders = [0, self.n - 1, self.n, self.V - 1]
        labels = at_borders + [draw.between(0, self.V - 1) for _ in range(self.B - 2 - len(at_borders))]
        labels += [IGNORED] * 2
        draw.random.shuffle(labels)
        return torch.tensor(labels)

    @property
    def n_words(self) -> int:
        return self.n * self.p

    def each(self, layout: Layout, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The block of every rank, of the tensor of its data-parallel row."""
        places = coordinates(self.sizes)
        return [layout.cut(wholes[place["dp"]], {"tp": self.p}, {"tp": place["tp"]}) for place in places]

    def mistaken(self, terms: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """What goes wrong where the terms of the ranks have to be added up over tp."""
        wrong: dict[str, Sequence[Tensor]] = {NOT_ADDED_UP: terms}
        if self.sizes["dp"] > 1:
            wrong[TOO_MANY] = sums_along(terms, self.sizes, ("dp", "tp"))
        return wrong

    def text(self, **more: int) -> str:
        shown = {axis: size for axis, size in self.sizes.items() if size > 1}
        return sizes_text(shown, B=self.B, V=self.V, **more)


def _settings(draw: Draw) -> list[Setting]:
    """A setting for every mesh, the last one twice; there one rank has no word. V divides over none."""
    settings = []
    for sizes in MESHES:
        p, n = sizes["tp"], draw.between(8, 11)  # more words than tokens: a table is large
        V = n * (p - 1) - 1 if p == 4 else n * p - draw.between(1, 2)
        B = p * draw.between(2, 3) if p > 2 else 6
        settings.append(Setting(draw, sizes, B, n, V))
    return [*settings, Setting(draw, sizes, B, n, V)]


def _embedding_trials(draw: Draw) -> list[Trial]:
    return [_embedding_trial(of, draw) for of in _settings(draw)]


def _embedding_trial(of: Setting, draw: Draw) -> Trial:
    D = draw.between(5, 9)
    vocabulary: Vocabulary = VOCABULARIES["1d"]
    table = draw.tensor(of.n_words, D)
    tokens = [labels.where(labels != IGNORED, 1) for labels in of.rows]
    dX = [draw.tensor(of.B, D) for _ in of.rows]
    blocks = of.each(vocabulary.table, [table] * len(of.rows))
    own_tokens, own_dx = of.each(Layout("B"), tokens), of.each(Layout("B D"), dX)

    def first_word(here: Tensor, at: Tensor, block: Tensor) -> Tensor:
        return block[at.where(here, 0)]

    def nothing(here: Tensor, at: Tensor, block: Tensor) -> Tensor:
        return first_word(here, at, block) * here[:, None]

    def terms(row: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        found = []
        for place, block, each in zip(coordinates(of.sizes), blocks, own_tokens, strict=True):
            at = each - place["tp"] * of.n
            found.append(row((at >= 0) & (at < of.n), at, block))
        return found

    dtable = [
        torch.zeros_like(table).index_add(0, mine, gradient)
        for mine, gradient in zip(tokens, dX, strict=True)
    ]
    own_dtable = of.each(vocabulary.table, dtable)
    mistakes = of.mistaken(terms(nothing)) | {
        "a rank that has not the word added its first row: it has nothing to add": sums_along(
            terms(first_word), of.sizes, ("tp",)
        )
    }
    wrong = {
        "gradients of different ranks were added up: each has its own words": sums_along(
            own_dtable, of.sizes, ("tp",)
        )
    }
    return Trial(
        function="embed",
        sizes=of.sizes,
        facts=of.text(D=D),
        args=[
            (each, block.clone().requires_grad_(), Axis("tp"))
            for each, block in zip(own_tokens, blocks, strict=True)
        ],
        outputs=[
            Output("X", "X", of.each(Layout("B D"), [table[each] for each in tokens]), None, mistakes),
            Output("dtable", "dtable", own_dtable, table, wrong),
        ],
        upstream=own_dx,
        budgets={
            "forward": Budget.of("all_reduce", of.B * D, of.sizes, "tp", "X is a sum over ranks"),
            "backward": Budget.nothing("every rank has all of dX, and the rows of its own words"),
        },
        wholes={"the table": of.n_words * D},
        spare=6 * of.B * D + 20 * of.B,
    )


def _loss_trials(draw: Draw) -> list[Trial]:
    """Logits of a common size; in the last setting near 1000."""
    *small, last = _settings(draw)
    settings = [(of, 3.0) for of in small] + [(last, 1000.0)]
    return [make(of, draw, scale) for of, scale in settings for make in (_forward, _backward)]


def _logits(of: Setting, draw: Draw, scale: float) -> list[Tensor]:
    """Padding is as large as anything."""
    wholes = []
    for _ in of.rows:
        logits = scale * draw.tensor(of.B, of.n_words).clamp(-1, 1)
        logits[:, of.V :] += scale / 4
        wholes.append(logits)
    return wholes


def _softmax(of: Setting, logits: Tensor) -> Tensor:
    """With zeros for the padding."""
    softmax = logits[:, : of.V].softmax(1)
    return functional.pad(softmax, (0, of.n_words - of.V))


def _picked(scores: Tensor, labels: Tensor) -> Tensor:
    """Each row's number at its label, 0 where there is none."""
    counts = labels >= 0
    return scores.gather(1, labels.where(counts, 0)[:, None])[:, 0] * counts


def _forward(of: Setting, draw: Draw, scale: float) -> Trial:
    wholes, layout = _logits(of, draw, scale), VOCABULARIES["1d"].logits
    pairs = list(zip(wholes, of.rows, strict=True))
    losses, softmax = [], []
    mistakes: dict[str, list[Tensor]] = {
        what: [] for what in (PADDING, COUNTED, WORD_0, OWN_MAX, LABEL_NOT_LESS)
    }
    for logits, labels in pairs:
        real = logits[:, : of.V].log_softmax(1)
        counts = labels != IGNORED
        losses.append(-_picked(real, labels))
        softmax.append(_softmax(of, logits))
        mistakes[PADDING].append(-_picked(logits.log_softmax(1), labels))
        total, top = logits[:, : of.V].logsumexp(1), logits[:, : of.V].amax(1)
        mistakes[COUNTED].append(losses[-1] + (total - top) * ~counts)
        mistakes[LABEL_NOT_LESS].append((losses[-1] - top) * counts)
        blocks = logits[:, : of.V].split(of.n, 1)
        maxima = [block.amax(1) for block in blocks]
        own_sum = sum((b - m[:, None]).exp().sum(1) for b, m in zip(blocks, maxima, strict=True))
        owner = labels.where(counts, 0) // of.n
        at_label = _picked(logits, labels) - torch.stack(maxima)[owner, torch.arange(of.B)]
        mistakes[OWN_MAX].append((torch.as_tensor(own_sum).log() - at_label) * counts)
        firsts = sum((b[:, 0] - top) * (owner != rank) for rank, b in enumerate(blocks))
        mistakes[WORD_0].append((losses[-1] - firsts) * counts)
    spread = {what: of.each(Layout("B"), each) for what, each in mistakes.items()}
    n_ranks = len(coordinates(of.sizes))
    why = "an all-reduce of the maximum, one of the sum of exp and one of the label's logit of every token do"
    return Trial(
        function="losses_forward",
        sizes=of.sizes,
        facts=of.text(padding=of.n_words - of.V) + (", logits near 1000" if scale > 100 else ""),
        args=[
            (block, labels, of.V, Axis("tp"))
            for block, labels in zip(of.each(layout, wholes), of.each(Layout("B"), of.rows), strict=True)
        ],
        outputs=[
            Output("losses", "losses", of.each(Layout("B"), losses), None, spread),
            Output("softmax", "softmax", of.each(layout, softmax), softmax[0], _own_softmax(of, wholes)),
        ],
        budgets={
            "forward": Budget.even(
                3 * ring_traffic("all_reduce", of.B, of.p), of.sizes, why, possible=n_ranks * of.B
            )
        },
        wholes={"the logits": of.B * of.n_words},
        spare=5 * of.B * of.n + 24 * of.B + 8 * of.n,
    )


def _own_softmax(of: Setting, wholes: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    alone = [
        torch.cat(
            [functional.pad(b.softmax(1), (0, of.n - b.shape[1])) for b in x[:, : of.V].split(of.n, 1)], 1
        )
        for x in wholes
    ]
    alone = [functional.pad(each, (0, of.n_words - each.shape[1])) for each in alone]
    layout = VOCABULARIES["1d"].logits
    real = [x[:, : of.V] for x in wholes]
    undivided = [functional.pad((x - x.amax(1, keepdim=True)).exp(), (0, of.n_words - of.V)) for x in real]
    return {
        "each rank divided by the sum of its own words": of.each(layout, alone),
        NOT_DIVIDED: of.each(layout, undivided),
        PADDING: of.each(layout, [x.softmax(1) for x in wholes]),
    }


def _backward(of: Setting, draw: Draw, scale: float) -> Trial:
    layout = VOCABULARIES["1d"].logits
    softmax = [_softmax(of, logits) for logits in _logits(of, draw, scale)]
    dlosses = [draw.tensor(of.B) for _ in of.rows]
    right, counted, undivided, first_word, no_label, every_first = [], [], [], [], [], []
    for share, dloss, labels in zip(softmax, dlosses, of.rows, strict=True):
        counts = labels != IGNORED
        one = functional.one_hot(labels.where(counts, 0), of.n_words).double() * counts[:, None]
        right.append((share - one) * (dloss * counts)[:, None])
        counted.append((share - one) * dloss[:, None])
        no_label.append(share * (dloss * counts)[:, None])
        every_first.append((share - one[:, : of.n].repeat(1, of.p)) * (dloss * counts)[:, None])
        undivided.append((share - one) * counts[:, None])
        others = one.clone()
        for rank in range(of.p):
            elsewhere = counts & (labels // of.n != rank)
            others[:, rank * of.n] += elsewhere.double()
        first_word.append((share - others) * (dloss * counts)[:, None])
    own = of.each(layout, right)
    mistakes: dict[str, Sequence[Tensor]] = {
        COUNTED: of.each(layout, counted),
        "dlosses is missing: the gradient of a token's loss is not 1": of.each(layout, undivided),
        WORD_0: of.each(layout, first_word),
        NO_LABEL: of.each(layout, no_label),
        EVERY_FIRST: of.each(layout, every_first),
        "blocks of different ranks were added up: each rank has its own words": sums_along(
            own, of.sizes, ("tp",)
        ),
    }
    args = zip(
        of.each(Layout("B"), dlosses), of.each(layout, softmax), of.each(Layout("B"), of.rows), strict=True
    )
    return Trial(
        function="losses_backward",
        sizes=of.sizes,
        facts=of.text(padding=of.n_words - of.V),
        args=[(*each, Axis("tp")) for each in args],
        outputs=[Output("dlogits", "dlogits", own, right[0], mistakes)],
        budgets={"forward": Budget.nothing("a rank has the softmax of its words, and all labels")},
        wholes={"the logits": of.B * of.n_words},
        spare=5 * of.B * of.n + 24 * of.B + 8 * of.n,
    )


TRAFFIC = Claim("traffic", "as few bytes as the best known way", 2)
MEMORY = Claim("memory", "no rank holds more than its words, and what it works on", 1)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="09-embedding",
        title="A table cut by words",
        objective="Look words up in a table of which each rank has some rows.",
        functions=(embed,),
        claims=(
            Claim("X", "X: the rows of all tokens, on every rank", 3),
            Claim("dtable", "dtable: each rank's rows", 2),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_embedding_trials,
        hints=(
            "Rank r has n = len(table) words, from r n on. Where in its block is a token, and which are not?",
            "Look up row 0 for the tokens that are not here, set what came to 0, and add up over ranks. What "
            "becomes of the gradient of a sum that one loss follows?",
            "at = tokens - tp.rank * len(table); here = (at >= 0) & (at < len(table)); then "
            "sum_copy(embedding(at.where(here, 0), table) * here[:, None], tp), with sum_copy of "
            "lessons_lib.mesh.",
        ),
        shown=(Vocabulary.embed,),
    ),
    Exercise(
        id="09-loss",
        title="Cross-entropy of logits that no rank has",
        objective="Compute a loss and its gradient where each rank has the logits of some words.",
        functions=(losses_forward, losses_backward),
        claims=(
            Claim("losses", "losses: of all tokens, on every rank", 3),
            Claim("softmax", "softmax: each rank's columns", 2),
            Claim("dlogits", "dlogits: each rank's columns", 3),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_loss_trials,
        hints=(
            "log softmax of the label is t - m - log s: m the maximum over all real words, s the sum of "
            "exp(logit - m), t the label's logit. Which of them can a rank make alone?",
            "Set padding to -inf first: some rank may have nothing else. Then three all-reduces, the first "
            'with op="max". Rank r has the words from r n on: word = torch.arange(n) + tp.rank * n.',
            "own = scores.masked_fill(word != labels[:, None], 0).sum(1) is 0 on all ranks but one. "
            "Backward: (softmax - (word == labels[:, None])) * dlosses[:, None], and 0 where labels == -100.",
        ),
        shown=(cross_entropy._TokenLosses,),
    ),
)
