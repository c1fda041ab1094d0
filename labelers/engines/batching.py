"""Running a decoder on torch: attention without copies, forward passes over rows of one key-value cache, shared
prefixes, drawing of tokens, and continuous batching."""

from __future__ import annotations

import bisect
import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import TokenSequence, distribution
from relabel.manifests.asks import Sampling
from relabel.manifests.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ------------------------------------------------------------------------------
# Attention whose keys and values several heads share, without copies of them.


GROUPED = "relabel_grouped"
"""Name under which our attention is registered with transformers."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention that reads each key and value once for all query heads that share it.

    transformers repeats keys and values per query head where there is a mask: for SmolLM2 (9 heads on 3) it copied the
    whole cache threefold at every step. While decoding, query heads of a group are taken for so many query positions
    instead. A square mask is always the plain causal one here (see `Forward.prefill`), for which the kernel needs no
    mask.
    """
    B, num_heads, S, D = query.shape
    if attention_mask is None or kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return plain
    if S == 1:
        folded = query.view(B, key.shape[1], -1, D)
        mask = attention_mask.expand(B, 1, folded.shape[2], key.shape[2])
        out = scaled_dot_product_attention(
            folded,
            key,
            value,
            attn_mask=mask,
            scale=scaling,
        )
        return out.reshape(B, num_heads, 1, -1).transpose(1, 2), None
    is_causal = getattr(attention_mask, "is_plain_causal", False)
    mask = None if is_causal else attention_mask
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


# ------------------------------------------------------------------------------
# Keys and values of all rows in flight, in one buffer a layer; rows come and go without a copy of the others.
#
# Every row begins at column 0, so a column is a position. A prefill writes a block of neighbouring rows, a decoding
# step writes one column per row, each at its own row's end; what lies beyond a row's end is masked by the caller and
# overwritten later. Rows in use are always the first ones: when one leaves, the last one moves into its place.


# R rows, H key-value heads, T columns, D width of a head


COLUMN_STEP = 64
"""Buffers grow to a multiple of this many columns, so that a slightly longer row does not move everything again."""


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer: two buffers [R, H, T, D], made when the first keys show H and D."""

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a masked column still enters the sum, and 0 times NaN is NaN.
        return like.new_zeros((self.owner.num_rows, like.shape[1], self.owner.num_columns, like.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[owner.place] = states if isinstance(owner.place[0], slice) else states[:, :, 0]
        return self.keys[owner.block, :, : owner.columns.stop], self.values[owner.block, :, : owner.columns.stop]

    def resize(self, used_rows: int, used_columns: int) -> None:
        """Move what is in use into buffers of the owner's present size."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._buffer(old)
            new[:used_rows, :, :used_columns] = old[:used_rows, :, :used_columns]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.columns.stop, 0

    def get_seq_length(self) -> int:
        return int(self.owner.columns.start)

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]
    """All layers' buffers, and what the next forward pass writes.

    Args:
        num_layers: decoder layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.point(slice(0, 0), slice(0, 0))
        self.num_rows = self.num_columns = 0
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def point(self, block: slice, columns: slice, ends: torch.Tensor | None = None) -> None:
        """Have the next forward pass write a block of rows in these columns, or, with `ends`, one column per row."""
        rows = block if ends is None else torch.arange(len(ends), device=ends.device)
        self.block = block
        self.columns = columns
        self.place = (rows, slice(None), columns if ends is None else ends)

    def reserve(self, num_rows: int, num_columns: int, *, used_rows: int, used_columns: int) -> None:
        """Have at least `num_rows` x `num_columns`. Buffers shrink only while no row is in use."""
        columns = -(-num_columns // COLUMN_STEP) * COLUMN_STEP
        is_wasteful = used_rows == 0 and (self.num_columns > 2 * columns or self.num_rows > 2 * num_rows)
        if num_rows <= self.num_rows and columns <= self.num_columns and not is_wasteful:
            return
        keep = used_rows > 0
        self.num_rows = max(num_rows, self.num_rows) if keep else num_rows
        self.num_columns = max(columns, self.num_columns) if keep else columns
        for layer in self.layers:
            layer.resize(used_rows, used_columns)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row over another's."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def snapshot(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A copy of a row's first `length` columns, a pair [H, length, D] a layer."""
        return [(layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone()) for layer in self.layers]

    def restore(self, saved: list[tuple[torch.Tensor, torch.Tensor]], first: int, last: int) -> None:
        """Begin the rows first..last-1 with what a snapshot holds."""
        for layer, (keys, values) in zip(self.layers, saved, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[first:last, :, : keys.shape[1]] = keys
            layer.values[first:last, :, : values.shape[1]] = values


# ------------------------------------------------------------------------------
# Forward passes of one decoder over rows of a `RowCache`: a prefill of a block of rows, or one more token for every
# row.
#
# Masks and positions are made here, since rows begin at column 0 and end where they end. Only each row's last logits
# are ever computed.


# B rows, S new tokens, P prefix columns, T columns, V vocabulary


EXACT_LIMIT = 0.01
"""How far logits may lie from the model's own, in standard deviations, in float32."""
ROUNDED_LIMIT = 0.25
"""In bfloat16 or float16, whose rounding makes a few hundredths in most models. A model that is further off is run in
float32, which says whether rounding was the cause."""
MOST_ROUNDING = 0.8
"""What is further off than this isn't asked about: of four kinds of models, each with a wrong mask or wrong positions,
the nearest was off by 1.1."""


class Forward:
    """Runs a decoder over the rows of its cache.

    Args:
        model: a causal language model of transformers, in eval mode.
        device: where it lies.
    Raises:
        ModelError: the model has layers that are no attention over keys and values.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        config = model.config.get_text_config()
        kind = model.config.model_type
        self.sliding_window: int | None = getattr(config, "sliding_window", None)
        default = ["sliding_attention" if self.sliding_window else "full_attention"]
        self.layer_types = sorted(set(getattr(config, "layer_types", None) or default))
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(
                f"models of type {kind} have layers of kind {', '.join(sorted(unknown))}, which this engine can't run; "
                "try vllm."
            )
        self.cache = RowCache(config.num_hidden_layers)
        self._last: torch.Tensor | None = None
        self._lowest = torch.finfo(model.dtype).min
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"models of type {kind} have no output layer over a vocabulary; a decoder is needed.")
        head.register_forward_pre_hook(self._keep_last)
        self.vocab_size: int = head.weight.shape[0]

    def check(self) -> bool:
        """Run a few tokens our way and the model's own way, and compare the logits.

        Models differ in what they make of masks, positions and caches that they are handed; one that ignores ours, or
        mixes the rows of a batch, would give plausible labels. Takes six forward passes of a few tokens, and five
        more where rows can't be run together; as many again in float32 where rounding may be the cause.

        Returns:
            Whether rows may be run together; False for a model that answers so only a row that is alone.
        Raises:
            ModelError: the model can't be run by rows of a cache, or gives other logits when it is.
        """
        ids = [token * 7919 % self.vocab_size for token in range(1, 25)]
        is_exact = self.model.dtype == torch.float32
        limit = EXACT_LIMIT if is_exact else ROUNDED_LIMIT
        if self._difference([ids, ids[:11] + ids[21:]]) < limit:
            return True
        difference = self._difference([ids])
        if difference < limit:
            return False
        if not is_exact and difference < MOST_ROUNDING:
            return self._in_float32().check()
        advice = "try vllm" if is_exact else "try engine.args.dtype: float32, where rounding is no cause, or vllm"
        raise ModelError(
            f"this model of type {self.model.config.model_type} can't be run by this engine: its logits are off by "
            f"{difference:.3g} standard deviations (limit {limit}) against the model's own; {advice}."
        )

    def _in_float32(self) -> Forward:
        """The same model and the same way to run it, on copies."""
        exact = copy.deepcopy(self)  # with the hook, which is the copy's own then
        exact.model.float()
        exact.cache = RowCache(len(self.cache.layers))
        exact._lowest = torch.finfo(torch.float32).min
        return exact

    def _difference(self, rows: Sequence[Sequence[int]]) -> float:
        """How far the last logits of rows that we run together, with a prefix that they share, lie from those that the
        model gives each alone; in standard deviations, of the worst row.
        """
        first = rows[0]
        B = len(rows)
        try:
            with torch.inference_mode():
                own = (self.model(input_ids=torch.tensor([row], device=self.device), use_cache=False) for row in rows)
                own_BV = torch.cat([output.logits[:, -1] for output in own]).float()
                self.cache.reserve(B, len(first), used_rows=0, used_columns=0)
                self.prefill([first[:8], first[:3]][:B], first_row=0, prefix=0)
                self.cache.restore(self.cache.snapshot(0, 8), 0, B)
                self.prefill([row[8:-3] for row in rows], first_row=0, prefix=8)
                for column in (-3, -2, -1):
                    ours_BV = self.decode([row[column] for row in rows], [len(row) + column for row in rows])
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as exc:
            raise ModelError(
                f"models of type {self.model.config.model_type} can't be run by this engine ({type(exc).__name__}); "
                "try vllm."
            ) from exc
        return float(((ours_BV - own_BV).abs().amax(1) / own_BV.std(1)).max())

    def prefill(self, suffixes: Sequence[Sequence[int]], *, first_row: int, prefix: int) -> torch.Tensor:
        """Run new rows whose first `prefix` columns are in the cache already.

        Args:
            suffixes: token ids after the prefix, at least one a row.
            first_row: the rows first_row.. take them, in order.
            prefix: columns that all of them share.
        Returns:
            Raw logits after each row's last token, float32 [B, V].
        """
        lengths = [len(suffix) for suffix in suffixes]
        B = len(lengths)
        S = max(lengths)
        ids_BS = torch.tensor([[*suffix, *[0] * (S - len(suffix))] for suffix in suffixes], device=self.device)
        positions_S = torch.arange(prefix, prefix + S, device=self.device)
        columns_T = torch.arange(prefix + S, device=self.device)
        self.cache.point(slice(first_row, first_row + B), slice(prefix, prefix + S))
        # Padding is to the right, where a causal mask keeps it from everything that counts.
        masks = self._masks(columns_T[None, None, None, :], positions_S[None, None, :, None])
        if prefix == 0 and "sliding_attention" not in self.layer_types:
            for mask in masks.values():
                mask.is_plain_causal = True
        self._last = torch.tensor([length - 1 for length in lengths], device=self.device)
        return self._run(ids_BS, positions_S.expand(B, S), masks)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the first rows, whose columns in use are `lengths`. Returns raw logits, float32
        [B, V].
        """
        B = len(tokens)
        T = max(lengths) + 1
        ends_B = torch.tensor(lengths, device=self.device)
        self.cache.point(slice(0, B), slice(T - 1, T), ends_B)
        masks = self._masks(torch.arange(T, device=self.device)[None, None, None, :], ends_B[:, None, None, None])
        self._last = None
        return self._run(torch.tensor(tokens, device=self.device)[:, None], ends_B[:, None], masks)

    def _masks(self, columns: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Additive masks by kind of layer: a position sees the columns up to itself, in a sliding layer only the last
        ones of them.
        """
        masks = {}
        for kind in self.layer_types:
            is_hidden = columns > positions
            if kind == "sliding_attention" and self.sliding_window is not None:
                is_hidden = is_hidden | (columns <= positions - self.sliding_window)
            masks[kind] = torch.zeros(is_hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
                is_hidden, self._lowest
            )
        return masks

    def _run(self, ids_BS: torch.Tensor, positions_BS: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model(
                input_ids=ids_BS,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions_BS,
                past_key_values=self.cache,
                use_cache=True,
            )
        return cast("torch.Tensor", output.logits[:, -1].float())

    def _keep_last(self, _head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the head runs: only the row's last hidden state is worth V products."""
        if self._last is None:
            return None
        hidden = inputs[0]
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last][:, None],)


# ------------------------------------------------------------------------------
# Prefixes that prompts share: found among what waits, computed once, kept while they are in use. Prompts of one labeler
# begin with the same instructions, those of one query go on alike.


MIN_SHARED = 32
"""Tokens that a prefix must add to be worth a forward pass of its own."""


class Prefix(NamedTuple):
    """Some first tokens, and their keys and values as the row cache's snapshot gave them."""

    ids: NDArray[np.int64]
    state: Any

    def begins(self, ids: NDArray[np.int64]) -> bool:
        """Whether a prompt goes on from it, by one token at least."""
        return common_length(ids, self.ids) == len(self.ids) < len(ids)


NO_PREFIX = Prefix(np.empty(0, dtype=np.int64), None)


class PrefixStore:
    """The prefixes used last.

    Args:
        max_tokens: tokens of all kept prefixes together; the one not used for longest goes first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()

    def longest(self, ids: NDArray[np.int64]) -> Prefix:
        """The longest kept prefix of `ids` that leaves at least one token to run; `NO_PREFIX` if there is none."""
        fitting = (prefix for prefix in self._kept.values() if prefix.begins(ids))
        best = max(fitting, key=lambda prefix: len(prefix.ids), default=NO_PREFIX)
        if best is not NO_PREFIX:
            self._kept.move_to_end(best.ids.tobytes())
        return best

    def keep(self, prefix: Prefix) -> None:
        """Keep one more; forget the least used ones over the limit, but never this one."""
        self._kept[prefix.ids.tobytes()] = prefix
        while len(self._kept) > 1 and sum(len(kept.ids) for kept in self._kept.values()) > self.max_tokens:
            self._kept.popitem(last=False)


def common_length(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many first tokens two prompts have in common."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def shared_length(leader: NDArray[np.int64], others: Sequence[NDArray[np.int64]], known: int) -> int:
    """The length of the leader's next prefix that is worth computing, or `known` if none is.

    Of all lengths that some other prompt shares, the one that spares most tokens: (length - known) x (prompts that
    share it). Within it, a shorter one comes first if so many more prompts share it that it spares them more: it is
    what stays of use when the longer one has gone (the instructions, as against the query).

    Args:
        leader: the prompt to be run next.
        others: those that wait.
        known: tokens of the leader that are kept already.
    """
    lengths = np.array([min(common_length(leader, other), len(leader) - 1) for other in others], dtype=np.int64)
    best = known
    limit = len(leader)
    floor = 0
    while True:
        candidates = np.unique(lengths[(lengths >= known + MIN_SHARED) & (lengths <= limit)])
        if not len(candidates):
            return best
        sharers = np.array([(lengths >= candidate).sum() for candidate in candidates])
        spared = (candidates - known) * (sharers - floor)
        most = int(spared.argmax())
        if spared[most] < MIN_SHARED:
            return best
        best = int(candidates[most])
        floor = int(sharers[most])
        limit = best - MIN_SHARED


# ------------------------------------------------------------------------------
# Drawing the next token: greedy, or by a random number that only the request's own seed decides.


# B rows, V vocabulary


def draw_tokens(sequences: Sequence[TokenSequence], logits_BV: torch.Tensor) -> list[int]:
    """One token a sequence, from its raw logits, and within its grammar: what that forbids is set to -inf in them.

    A row's own source of chance is used once per token, and only if the temperature is above 0: what other rows do in
    the meantime does not shift it.
    """
    bound = [number for number, sequence in enumerate(sequences) if sequence.matcher is not None]
    if bound:
        words = np.empty((len(bound), -(-logits_BV.shape[1] // 32)), dtype=np.int32)
        for row, number in zip(words, bound, strict=True):
            sequences[number].matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # llguidance's bits, 32 to a word and lowest first
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits_BV.shape[1]]
        is_allowed = torch.from_numpy(bits.view(np.bool_)).to(logits_BV.device)
        logits_BV[bound] = logits_BV[bound].masked_fill(~is_allowed, float("-inf"))
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.ask.sampling
        if sampling.temperature > 0.0:
            tokens[row] = _draw_row(logits_BV[row], sampling, sequence.rng.random())
    return tokens


def _draw_row(logits_V: torch.Tensor, sampling: Sampling, chance: float) -> int:
    probs_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    order: torch.Tensor | None = None
    if sampling.top_p < 1.0:  # the fewest most probable tokens that hold it, most probable first
        top, order = probs_V.topk(min(1024, len(probs_V)))  # the whole vocabulary is sorted only where these do not do
        if float(top.sum()) < sampling.top_p:
            top, order = probs_V.sort(descending=True)
        probs_V = top[: int((top.cumsum(dim=-1) < sampling.top_p).sum()) + 1]
    mass = probs_V.double().cumsum(dim=-1)
    index = int(torch.searchsorted(mass, mass.new_tensor(chance * float(mass[-1])), right=True))
    index = min(index, len(mass) - 1)
    while float(probs_V[index]) == 0.0:  # rounding at the very end of the sum: step back to a token that has mass
        index -= 1
    return int(order[index]) if order is not None else index


# ------------------------------------------------------------------------------
# Continuous batching: sequences that are done leave, sequences that wait join, and nobody waits for the slowest.
#
# One step is either a prefill of some waiting sequences or one more token for every sequence in flight. The one whose
# turn it is decides which prefix is shared and which length is sought; those nearest to its length go with it.


# B sequences, V vocabulary


class Batch:
    """Sequences in flight and sequences that wait.

    Args:
        max_sequences: sequences in flight.
        max_columns: key-value columns of all sequences together, as memory allows.
        prefill_tokens: tokens of one prefill, padding included; a longer sequence goes alone.
        shares_prefixes: whether a prefix that several prompts share is run once.
    """

    def __init__(
        self,
        forward: Forward,
        compiler: GrammarCompiler,
        encode_text: Callable[[str], list[int]],
        *,
        max_sequences: int,
        max_columns: int,
        prefill_tokens: int,
        shares_prefixes: bool,
    ) -> None:
        self._forward = forward
        self._compiler = compiler
        self._encode_text = encode_text
        self._max_sequences = max_sequences
        self._max_columns = max_columns
        self._prefill_tokens = prefill_tokens
        self._shares_prefixes = shares_prefixes
        self._waiting: list[TokenSequence] = []
        self._active: list[TokenSequence] = []
        self._done: list[TokenSequence] = []
        self._prefixes = PrefixStore(max(max_columns // 4, 1024))
        self._has_news = True  # something joined or left since a prefill was last thought about

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait its turn, which comes by its request's number."""
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.request.id)
        self._has_news = True

    def step(self) -> list[TokenSequence]:
        """Do one piece of work, and return the sequences that it finished."""
        with torch.inference_mode():
            group, prefix = self._next_group() if self._waiting and self._has_news else ([], NO_PREFIX)
            if group:
                self._prefill(group, prefix)
            elif self._active:
                self._has_news = False
                logits_BV = self._forward.decode(
                    [sequence.tokens[-1] for sequence in self._active],
                    [sequence.length - 1 for sequence in self._active],
                )
                self._advance(list(self._active), logits_BV)
        done = self._done
        self._done = []
        return done

    def _next_group(self) -> tuple[list[TokenSequence], Prefix]:
        """Waiting sequences to prefill now and what they begin with, or none if it is better to go on decoding."""
        leader = self._waiting[0]
        if not self._fits([leader]):
            return [], NO_PREFIX
        prefix = self._share(leader) if self._shares_prefixes else NO_PREFIX
        shared = len(prefix.ids)
        wanted = len(leader.prompt)
        fitting = [sequence for sequence in self._waiting if prefix.begins(sequence.prompt_array())]
        fitting.sort(key=lambda sequence: (sequence is not leader, abs(len(sequence.prompt) - wanted)))
        group = self._take(fitting, shared)
        # few short sequences, while more could soon go with them, are not worth an interruption
        is_small = sum(len(sequence.prompt) - shared for sequence in group) < self._prefill_tokens // 8
        is_full = self._max_sequences - len(self._active) < max(1, self._max_sequences // 4)
        if self._active and len(fitting) > len(group) and is_small and is_full:
            return [], NO_PREFIX
        chosen = set(map(id, group))
        self._waiting = [sequence for sequence in self._waiting if id(sequence) not in chosen]
        return group, prefix

    def _take(self, sequences: Sequence[TokenSequence], shared: int) -> list[TokenSequence]:
        """The first of `sequences` that go together: within memory, the prefill's size, and the padding that is worth
        it.
        """
        group: list[TokenSequence] = []
        for sequence in sequences:
            sizes = [len(other.prompt) - shared for other in [*group, sequence]]
            padded = max(sizes) * len(sizes)
            is_padding_fine = padded - sum(sizes) <= 0.15 * padded + 8 * len(sizes)
            if group and (padded > self._prefill_tokens or not is_padding_fine):
                continue
            if not self._fits([*group, sequence]):
                break
            group.append(sequence)
        return group

    def _fits(self, sequences: Sequence[TokenSequence]) -> bool:
        """Whether these may join those in flight. A lone one always may."""
        together = [*self._active, *sequences]
        longest = max(sequence.max_length for sequence in together)
        return len(together) == 1 or len(together) <= min(self._max_sequences, self._max_columns // longest)

    def _share(self, leader: TokenSequence) -> Prefix:
        """The longest prefix that the leader can begin with, after running those that are worth it."""
        prefix = self._prefixes.longest(leader.prompt_array())
        others = [other.prompt_array() for other in self._waiting if other is not leader]
        while True:
            known = len(prefix.ids)
            length = shared_length(leader.prompt_array(), others, known)
            if length == known:
                return prefix
            leader.num_paid += length - known
            row = self._reserve([leader], prefix)
            self._forward.prefill([leader.prompt[known:length]], first_row=row, prefix=known)
            prefix = Prefix(leader.prompt_array()[:length].copy(), self._forward.cache.snapshot(row, length))
            self._prefixes.keep(prefix)

    def _reserve(self, group: Sequence[TokenSequence], prefix: Prefix) -> int:
        """Rows for a group, each begun with the prefix; returns the first."""
        first = len(self._active)
        count = len(self._active) + len(group)
        longest = max(sequence.max_length for sequence in [*self._active, *group])
        used = max((sequence.length for sequence in self._active), default=0)
        self._forward.cache.reserve(
            max(count, min(self._max_sequences, self._max_columns // longest)),
            longest,
            used_rows=first,
            used_columns=used,
        )
        if prefix is not NO_PREFIX:
            self._forward.cache.restore(prefix.state, first, count)
        return first

    def _prefill(self, group: list[TokenSequence], prefix: Prefix) -> None:
        shared = len(prefix.ids)
        first = self._reserve(group, prefix)
        for sequence in group:
            sequence.cached = shared - sequence.num_paid
        logits_BV = self._forward.prefill(
            [sequence.prompt[shared:] for sequence in group], first_row=first, prefix=shared
        )
        self._active += group
        self._advance(group, logits_BV)

    def _advance(self, sequences: list[TokenSequence], logits_BV: torch.Tensor) -> None:
        """Read decisions from the raw logits, draw the next token of each sequence, and drop those that are done."""
        for number, sequence in enumerate(sequences):
            here = sequence.places_here()
            if here:
                logits_V = logits_BV[number].cpu().numpy()
                for place in here:
                    sequence.note(place, distribution(logits_V, place.label_ids))
            if sequence.max_new == 0:
                sequence.finish = "stop"
        going = [number for number, sequence in enumerate(sequences) if sequence.finish is None]
        if going:
            drawn = draw_tokens([sequences[number] for number in going], logits_BV[going])
            for number, token in zip(going, drawn, strict=True):
                self._append(sequences[number], token)
        for sequence in sequences:
            if sequence.finish is not None:
                self._leave(sequence)

    def _append(self, sequence: TokenSequence, token: int) -> None:
        is_end = token in self._compiler.eos_ids
        sequence.append(token, self._compiler.token_bytes(token))
        if sequence.matcher is not None:
            if not is_end and not sequence.matcher.consume_token(token):
                sequence.finish = "error"
                sequence.detail = f"the grammar got stuck: {sequence.matcher.get_error()[:300]}"
            elif is_end or sequence.matcher.is_stopped():
                sequence.finish = "stop"
        elif is_end or sequence.has_closing(since=sequence.ends[-1] - 64):
            sequence.finish = "stop"
        if sequence.finish is None and len(sequence.tokens) >= sequence.max_new:
            sequence.finish = "length"

    def _leave(self, sequence: TokenSequence) -> None:
        """Free the sequence's place: the last one moves there. A decision that never came by is asked for first."""
        self._has_news = True
        slot = self._active.index(sequence)
        last = len(self._active) - 1
        if slot != last:
            mover = self._active[last]
            self._forward.cache.move(last, slot, mover.length)
            self._active[slot] = mover
        self._active.pop()
        done, probes = sequence.settle(self._encode_text)
        self._done += done
        self._waiting[:0] = probes
