"""Sequence parallelism: the sequence is cut over ranks, in whole layers or between them.

``ATTENTIONS`` maps the name of a method to the method: attention over a sequence that many ranks hold.
``SequenceColumn`` and ``SequenceRow`` are Megatron's: 1D tensor parallelism with the stream cut along S.

>>> SequenceRow().Y
Layout("B@tp F")
>>> list(ATTENTIONS)
['ring', 'zigzag', 'striped', 'ulysses', 'rsa']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.sequence_parallel.assignment import Contiguous, Striped, Zigzag, busy, pairs, share
    from lessons_lib.sequence_parallel.attention import SequenceAttention
    from lessons_lib.sequence_parallel.attentions import ATTENTION_VARIANTS, ATTENTIONS
    from lessons_lib.sequence_parallel.context import context_parallel
    from lessons_lib.sequence_parallel.megatron import (
        SEQUENCE_SCHEMES,
        SequenceColumn,
        SequenceColumnKept,
        SequenceParallelBlock,
        SequenceRow,
    )
    from lessons_lib.sequence_parallel.online_softmax import (
        Partial,
        attend_part,
        finish,
        gradients_of_part,
        merge,
    )
    from lessons_lib.sequence_parallel.ring import RingAttention
    from lessons_lib.sequence_parallel.ring_self_attention import (
        RingSelfAttention,
        RingSelfAttentionScattered,
    )
    from lessons_lib.sequence_parallel.tokens import Tokens, gather_tokens, hidden_pairs, shard_tokens
    from lessons_lib.sequence_parallel.ulysses import Ulysses
    from lessons_lib.sequence_parallel.visits import Hop, visits

__all__ = [
    "ATTENTIONS",
    "ATTENTION_VARIANTS",
    "SEQUENCE_SCHEMES",
    "Contiguous",
    "Hop",
    "Partial",
    "RingAttention",
    "RingSelfAttention",
    "RingSelfAttentionScattered",
    "SequenceAttention",
    "SequenceColumn",
    "SequenceColumnKept",
    "SequenceParallelBlock",
    "SequenceRow",
    "Striped",
    "Tokens",
    "Ulysses",
    "Zigzag",
    "attend_part",
    "busy",
    "context_parallel",
    "finish",
    "gather_tokens",
    "gradients_of_part",
    "hidden_pairs",
    "merge",
    "pairs",
    "shard_tokens",
    "share",
    "visits",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ATTENTIONS": ".attentions",
        "ATTENTION_VARIANTS": ".attentions",
        "SEQUENCE_SCHEMES": ".megatron",
        "Contiguous": ".assignment",
        "Hop": ".visits",
        "Partial": ".online_softmax",
        "RingAttention": ".ring",
        "RingSelfAttention": ".ring_self_attention",
        "RingSelfAttentionScattered": ".ring_self_attention",
        "SequenceAttention": ".attention",
        "SequenceColumn": ".megatron",
        "SequenceColumnKept": ".megatron",
        "SequenceParallelBlock": ".megatron",
        "SequenceRow": ".megatron",
        "Striped": ".assignment",
        "Tokens": ".tokens",
        "Ulysses": ".ulysses",
        "Zigzag": ".assignment",
        "attend_part": ".online_softmax",
        "busy": ".assignment",
        "context_parallel": ".context",
        "finish": ".online_softmax",
        "gather_tokens": ".tokens",
        "gradients_of_part": ".online_softmax",
        "hidden_pairs": ".tokens",
        "merge": ".online_softmax",
        "pairs": ".assignment",
        "shard_tokens": ".tokens",
        "share": ".assignment",
        "visits": ".visits",
    },
)
